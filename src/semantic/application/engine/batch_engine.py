"""BlockPoolBatchEngine: continuous batching of many agents' requests over one block pool."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from semantic.application.cache.agent_notes import match_report
from semantic.application.cache.block_allocator import AgentCaches, BlockAllocator
from semantic.application.cache.idle_caches import IdleCaches
from semantic.application.cache.prefix_store import PrefixStore
from semantic.application.cache.read_ahead import ReadAhead
from semantic.application.engine.memory_guard import MemoryGuard
from semantic.application.engine.prefill_budget import PrefillBudget
from semantic.application.engine.scheduler import Chunk, Scheduler, Step
from semantic.application.engine.sequences import Sequences
from semantic.application.engine.submission import RequestValidator, Submission
from semantic.application.request import Phase, Request
from semantic.domain.entities import AgentBlocks
from semantic.domain.errors import NOT_FINITE, BackendError, InvalidRequestError
from semantic.domain.identity import Hints
from semantic.domain.services import BlockPool
from semantic.domain.stored import Manifest, Tier
from semantic.domain.value_objects import (
    CacheKey,
    CompletedGeneration,
    FinishReason,
    ModelCacheSpec,
    PrefillEvent,
    SamplingParams,
    TokenEvent,
)
from semantic.ports.generation import (
    BatchBackend,
    Clock,
    DraftSource,
    EngineEvent,
    StepObserver,
    Tokenizer,
)
from semantic.ports.store import StorePort

_LOAD_WAIT = 0.02
"""The seconds that a step without other work waits for a load."""


class BlockPoolBatchEngine:
    """Batched generation with every agent's KV cache in blocks of one pool.

    A request gets the same answer alone and in any batch, with and without a cache. In a full pool,
    the engine evicts idle caches, then preempts the youngest request. Implements
    `GenerationEnginePort`.

    Example:
        >>> model, tokenizer = semantic.load()
        >>> spec = ModelCacheSpec.from_model(model)
        >>> engine = BlockPoolBatchEngine(model, tokenizer, BlockPool(spec, 500), spec)
        >>> uid = engine.submit("agent_1", "Hello", max_tokens=50)
        >>> for done in engine.step():
        ...     print(done.uid, done.text)
    """

    def __init__(
        self,
        model: BatchBackend,
        tokenizer: Tokenizer,
        pool: BlockPool,
        spec: ModelCacheSpec,
        *,
        store: StorePort | None = None,
        budget: PrefillBudget | None = None,
        max_batch: int = 32,
        clock: Clock = time.perf_counter,
        model_name: str = "",
    ) -> None:
        """At most `max_batch` requests run together. A `store` keeps caches after their eviction
        from the pool. Raises InvalidRequestError if model, spec and pool do not describe the same
        cache."""
        if model.cache_spec() != spec or pool.spec != spec:
            raise InvalidRequestError("model, spec and pool must describe the same cache")
        if max_batch < 1:
            raise InvalidRequestError(f"max_batch must be at least 1, got {max_batch}")
        model.set_aside(pool.capacity_bytes)
        self._model = model
        budget = budget or PrefillBudget(largest=model.best_chunk)
        self._prefixes = None
        self._ahead: ReadAhead | None = None
        self._idle = IdleCaches(pool, clock, finds_alike=any(model.shared_layers))
        if store is not None:
            self._prefixes = PrefixStore(
                model, store, prefill_seconds=budget.seconds, model_name=model_name, clock=clock
            )
            self._ahead = ReadAhead(self._prefixes, lambda key: self._idle.get(key) is not None)
        self.pool = pool
        self._allocator = BlockAllocator(
            pool, spec, self._idle, model.model_id, self._prefixes, model.shared_layers
        )
        self._scheduler = Scheduler(self._allocator, budget, clock, max_batch)
        self._sequences = Sequences(model, self._allocator, self._prefixes)
        self._validator = RequestValidator(model, tokenizer)
        self._clock = clock
        # Guards the state that `submit` and `cancel` share with the stepping thread: the queues,
        # idle caches and the allocation of blocks. Never held during a forward pass.
        self._lock = threading.RLock()
        self._agents = AgentCaches(self._allocator, self._prefixes, self._lock)
        self._outbox: deque[CompletedGeneration] = deque()
        self._numbers: Iterator[int] = itertools.count()
        self._others_work: Callable[[], bool] = lambda: False

    # The port

    def submit(
        self,
        agent_id: str,
        prompt: str | Sequence[int],
        cache: AgentBlocks | None = None,
        max_tokens: int = 256,
        *,
        sampling: SamplingParams | None = None,
        append: bool = False,
        tenant: str = "",
        note: str = "",
        keep: bool = True,
    ) -> str:
        params = sampling or SamplingParams()
        return self.enqueue(
            Submission(agent_id, prompt, max_tokens, params, tenant, note, cache, append, keep)
        )

    def enqueue(self, submission: Submission) -> str:
        """Submit a request, like `submit`."""
        # Without the lock: encoding a long text takes a while and does not affect other requests.
        self._validator.check(submission)
        cached = self._agents.recall(submission.agent_id, submission.tenant)
        request = self._validator.accept(submission, cached, next(self._numbers))
        request.arrived = self._clock()
        with self._lock:
            self._scheduler.add(request)
            if self._prefixes is not None:
                self._prefixes.shared.add(request)
            self._scheduler.admit()
            self._read_ahead(request)
            return request.uid

    def expect(self, agent_id: str, seconds: float, *, tenant: str = "") -> None:
        """Expect the agent's next request in `seconds`. Until then, the engine prefers to evict
        other idle caches."""
        with self._lock:
            self._heed(self._allocator.key(agent_id, tenant), Hints(back_in=seconds))

    def seconds_of(self, request: Request) -> float:
        """Return the seconds since the arrival of `request`."""
        return self._clock() - request.arrived

    def cancel(self, uid: str) -> bool:
        with self._lock:
            for request in self._scheduler:
                if request.uid == uid:
                    request.cancel_requested = True
                    return True
        return False

    def step(self) -> Iterator[CompletedGeneration]:
        while self._outbox or self.has_work:
            if not self._outbox:
                events = self.step_once()
                self._outbox.extend(e for e in events if isinstance(e, CompletedGeneration))
            while self._outbox:
                yield self._outbox.popleft()

    def step_once(self) -> list[EngineEvent]:
        with self._lock:
            events = self._finish_cancelled()
            self._scheduler.admit()
            events += self._refuse_stuck()
        events += self._open_admitted()
        events += self._finish_loads()
        step = self._scheduler.begin_step(others=self._others_work())
        events += self._prefill(step)
        events += self._reserve(self._scheduler.full())  # oldest first
        events += self._decode()  # last: a prompt completed in this step decodes in it
        self._scheduler.end_step(step)
        return events

    # Beyond the port

    @property
    def has_work(self) -> bool:
        return self.n_requests > 0

    def share(
        self, others_work: Callable[[], bool], numbers: Iterator[int], *, by_tenants: bool
    ) -> None:
        """Share the thread with other engines. Chunks are short while `others_work` returns True.
        If `by_tenants`, no tenant may fill the batch."""
        self._others_work, self._numbers = others_work, numbers
        self._scheduler.is_shared = by_tenants

    def keep_within(self, guard: MemoryGuard) -> None:
        """Let `guard` limit chunks, batch and new requests."""
        self._scheduler.keep_within(guard)
        if self._prefixes is not None:
            self._prefixes.keep_within(guard.max_bytes)

    def draft_from(self, drafts: DraftSource) -> None:
        """Let steps check drafts from `drafts`. The engine closes them."""
        self._sequences.drafts = drafts
        if self._prefixes is not None:
            drafts.recall(self._prefixes.texts_of)

    def report_steps(self, observer: StepObserver | None) -> None:
        self._scheduler.observer = observer

    @property
    def n_requests(self) -> int:
        return len(self._scheduler)

    @property
    def requests(self) -> tuple[Request, ...]:
        """All unfinished requests; callers must not change them."""
        return tuple(self._scheduler)

    @property
    def waiting(self) -> frozenset[str]:
        """The uids of new and preempted requests, which hold no blocks."""
        return self._scheduler.waiting.uids

    @property
    def n_running(self) -> int:
        """The number of requests that hold blocks."""
        return len(self._scheduler.running)

    @property
    def idle_caches(self) -> IdleCaches:
        """The idle caches in the pool; callers must not change them."""
        return self._idle

    def caches_of(self, tenant: str, names: Collection[str] | None = None) -> list[AgentBlocks]:
        """Return the idle caches of a tenant's agents, or of the agents `names`. Callers must not
        change them."""
        if names is None:
            keys = [key for key in self._idle.lru_order() if key.tenant == tenant]
        else:
            keys = [self._allocator.key(name, tenant) for name in names]
        return [cache for key in keys if (cache := self._idle.get(key)) is not None]

    @property
    def preemptions(self) -> int:
        """The number of preemptions since the start."""
        return self._scheduler.preemptions

    @property
    def restored_bytes(self) -> Counter[Tier]:
        """The bytes read from each tier of the store since the start."""
        return Counter() if self._prefixes is None else self._prefixes.restored_bytes

    def evict_idle(self, n_bytes: int, room: int = sys.maxsize) -> bool:
        """Return `n_bytes` to the system, those of unused blocks first and then those of idle
        caches; return whether any went back. The eviction may use `room` bytes."""
        unused = self._model.unused_bytes
        with self._lock:
            used = self.pool.used_bytes
            if unused is None:
                return self._idle.evict_to(used - n_bytes)
            if used > room or unused < n_bytes + used:  # a pool that grows doubles
                if used - self.pool.evictable_bytes > room:
                    return False
                self._idle.evict_to(min(used - n_bytes, room))
        return self._model.return_memory(room)

    def forget(self, agent_id: str, *, tenant: str = "") -> bool:
        """Drop an agent's idle cache and its manifest. Returns False if it has neither."""
        found = self._agents.forget(agent_id, tenant)
        if self._sequences.drafts is not None:
            self._sequences.drafts.forget(tenant)
        return found

    def fork(
        self, agent_id: str, new_agent_id: str, *, tenant: str = "", history: Manifest | None = None
    ) -> None:
        """Share the cached blocks of `agent_id`, or only those of `history`, with a new agent.
        Raises InvalidRequestError if `agent_id` is unknown or `new_agent_id` exists."""
        self._agents.fork(agent_id, new_agent_id, tenant, history)

    def restore(self, manifest: Manifest, *, tenant: str = "") -> None:
        """Continue an agent without a request from the history of `manifest`."""
        self._agents.restore(manifest, tenant)

    def manifest(self, agent_id: str, *, tenant: str = "") -> Manifest | None:
        """Return the agent's newest manifest, or None."""
        return self._agents.manifest(agent_id, tenant)

    def make_public(self, tokens: Sequence[int]) -> None:
        """Share PUBLIC_TENANT's blocks for `tokens` with every tenant."""
        if self._prefixes is not None:
            self._prefixes.make_public(tokens)

    def flush(self) -> None:
        """Wait until all data saved so far is durable."""
        if self._prefixes is not None:
            self._prefixes.flush()

    def close(self, *, keep_store: bool = False) -> None:
        """End the engine. Also closes the store unless `keep_store`."""
        if self._sequences.drafts is not None:
            self._sequences.drafts.close()
        if self._ahead is not None:
            self._ahead.close()
        if self._prefixes is not None:
            self._prefixes.close(keep_store=keep_store)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless pool, requests and idle caches agree on every block."""
        with self._lock:
            self.pool.check_integrity()
            self._allocator.check_integrity(self._scheduler)

    def _heed(self, key: CacheKey, hints: Hints) -> None:
        self._idle.heed(key, hints)
        if self._ahead is not None and hints.back_in is not None:
            self._ahead.expect(key, hints.back_in)

    def _read_ahead(self, request: Request) -> None:
        if self._ahead is None or self._prefixes is None:
            return
        key = self._allocator.key(request.agent_id, request.tenant)
        self._ahead.arrived(key)
        if request.phase is Phase.WAITING and self._idle.get(key) is None:
            prefix = self._prefixes.find_ahead(request)
            if prefix is not None:
                self._ahead.waits(key, prefix)

    # The parts of a step, in their order

    def _finish_cancelled(self) -> list[EngineEvent]:
        cancelled = [request for request in self._scheduler if request.cancel_requested]
        return [self._finish(request, "cancelled") for request in cancelled]

    def _refuse_stuck(self) -> list[EngineEvent]:
        request = self._scheduler.stuck()
        if request is None:
            return []
        reason = f"Cannot allocate blocks for {request.n_tokens} tokens: others hold the pool"
        return [self._complete(request, "error", error=reason)]

    def _open_admitted(self) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for request in self._scheduler.in_phase(Phase.PREFILL):
            if request.sequence is None:
                if self._ahead is not None:
                    self._ahead.arrived(self._allocator.key(request.agent_id, request.tenant))
                events += self._try(self._sequences.open, request)
        return events

    def _finish_loads(self) -> list[EngineEvent]:
        """Continue requests after their loads. Waits if nothing else can run."""
        loading = self._scheduler.in_phase(Phase.LOAD)
        if loading and len(loading) == self.n_running:
            self._sequences.wait_for_load(loading, _LOAD_WAIT)
        events: list[EngineEvent] = []
        for request in loading:
            if self._sequences.is_loaded(request):
                events += self._try(self._sequences.finish_load, request)
        return events

    def _prefill(self, step: Step) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        while chunks := self._scheduler.next_pass(step, self._sequences):
            events += self._compute(step, chunks)
        self._scheduler.end_prefill(step)
        return events

    def _compute(self, step: Step, chunks: Sequence[Chunk]) -> list[EngineEvent]:
        started = self._clock()
        results = self._sequences.prefill(chunks)
        n_tokens = [(one.request, one.n_tokens) for one in results]
        self._scheduler.prefilled(step, n_tokens, self._model.peak_bytes)
        seconds = self._clock() - started
        events: list[EngineEvent] = []
        for request, _, error in results:
            if error is not None:
                events.append(self._fail(request, error))
                continue
            request.prefill_seconds += seconds
            total = request.n_tokens - 1
            events.append(PrefillEvent(request.uid, request.agent_id, request.computed, total))
        return events

    def _reserve(self, requests: Iterable[Request]) -> list[EngineEvent]:
        """Allocate blocks for one more token of each request. May preempt other requests."""
        events: list[EngineEvent] = []

        def preempt(one: Request) -> None:
            events.extend(self._preempt(one))

        with self._lock:
            for request in requests:
                if self._scheduler.grow(request, preempt):
                    events += self._try(self._sequences.reserve, request)
        return events

    def _preempt(self, request: Request) -> list[EngineEvent]:
        sampled = self._sequences.preempt(request)
        events: list[EngineEvent] = [] if sampled is None else [request.take(sampled)[0]]
        return [*events, PrefillEvent(request.uid, request.agent_id, 0, request.n_tokens - 1)]

    def _decode(self) -> list[EngineEvent]:
        decoding = self._scheduler.in_phase(Phase.DECODE)
        if not decoding:
            return []
        try:
            decoded = self._sequences.decode()
        except BackendError as error:
            return [self._fail(request, str(error)) for request in decoding]
        events: list[EngineEvent] = []
        for request, sampled in decoded:
            if not sampled.finite:
                events.append(self._fail(request, NOT_FINITE))
                continue
            events += self._taken(request, *request.take(sampled))
        forced = [one for one in self._scheduler.in_phase(Phase.DECODE) if one.forced]
        events += (event for request in forced for event in self._force(request))
        for request in forced:
            if request.phase is Phase.DECODE:  # neither finished nor preempted by another request
                events += self._resume(request)
        return events

    def _force(self, request: Request) -> list[EngineEvent]:
        try:
            taken = request.take_forced(self._sequences.pause(request))
        except BackendError as error:
            return [self._fail(request, str(error))]
        return [event for one in taken for event in self._taken(request, *one)]

    def _resume(self, request: Request) -> list[EngineEvent]:
        events = self._reserve([request])
        if request.phase is Phase.DECODE:
            events += self._try(self._sequences.resume, request)
        return events

    def _taken(
        self, request: Request, event: TokenEvent, reason: FinishReason | None
    ) -> list[EngineEvent]:
        return [event] if reason is None else [event, self._finish(request, reason)]

    # Ends

    def _finish(self, request: Request, reason: FinishReason) -> CompletedGeneration:
        if reason == "cancelled":
            request.end_text()
        with self._lock:
            blocks = self._sequences.extract(request)
            if blocks is not None:
                self._allocator.keep(request, blocks)
            else:
                self._allocator.give_back(request)
            self._heed(self._allocator.key(request.agent_id, request.tenant), request.hints)
            return self._complete(request, reason, blocks=blocks)

    def _try(self, act: Callable[[Request], object], request: Request) -> list[EngineEvent]:
        """Call `act`; if the backend fails, end the request."""
        try:
            act(request)
        except BackendError as error:
            return [self._fail(request, str(error))]
        return []

    def _fail(self, request: Request, reason: str) -> CompletedGeneration:
        # The request's cache may be incomplete. With NaN or infinite values, its stored blocks go
        # too.
        with self._lock:
            if reason == NOT_FINITE:
                self._sequences.discard(request)
            else:
                self._sequences.close(request)
            self._allocator.release(request)
            if reason == NOT_FINITE and not request.generated:
                # A cache from the pool may be the cause; blocks from the store are verified.
                self._allocator.drop_idle(request.agent_id, request.tenant)
            return self._complete(request, "error", error=reason)

    def _complete(
        self,
        request: Request,
        reason: FinishReason,
        *,
        blocks: AgentBlocks | None = None,
        error: str | None = None,
    ) -> CompletedGeneration:
        request.phase = Phase.FINISHED
        self._scheduler.remove(request)
        if self._prefixes is not None:
            self._prefixes.drop(request)
        return request.completed(reason, match_report(request), blocks=blocks, error=error)
