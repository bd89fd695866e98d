"""BlockPoolBatchEngine: many agents' requests, one model, one pool of blocks.

Decides what runs when; the pool counts blocks, the backend computes, the store keeps idle
caches. Knows no framework, no transport and no chat format.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from semantic.application.cache.agent_caches import AgentCaches
from semantic.application.cache.block_allocator import BlockAllocator
from semantic.application.cache.idle_caches import IdleCaches
from semantic.application.cache.prefix_store import PrefixStore
from semantic.application.engine.completion import completion
from semantic.application.engine.engine_load import EngineLoad
from semantic.application.engine.fair_queue import FairQueue
from semantic.application.engine.prefill_budget import PrefillBudget
from semantic.application.engine.prefilling import Prefilling
from semantic.application.engine.scheduler import preemption_victim
from semantic.application.engine.sequences import Sequences
from semantic.application.engine.submission import Submission
from semantic.application.engine.validation import RequestValidator
from semantic.application.request import Phase, Request
from semantic.domain.entities import AgentBlocks
from semantic.domain.errors import BackendError, InvalidRequestError
from semantic.domain.services import BlockPool
from semantic.domain.stored import Manifest
from semantic.domain.value_objects import (
    CompletedGeneration,
    FinishReason,
    ModelCacheSpec,
    SampledToken,
    SamplingParams,
    TokenEvent,
)
from semantic.ports.inbound import EngineEvent
from semantic.ports.outbound import BatchBackend, Clock, Tokenizer
from semantic.ports.store import CacheStorePort

_LOAD_WAIT = 0.02
"""Seconds of a step in which nothing happens but reading; it ends early when something is read."""


class BlockPoolBatchEngine:
    """Batched generation with every agent's KV cache in blocks of one pool.

    Implements `GenerationEnginePort`. A request's answer is the same alone or in any batch, with
    or without a cache, preempted or not. When the pool is full, idle caches are dropped first,
    then the youngest running request is preempted and computed again later; a request fails only
    if it could not fit alone, and then before any work.

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
        store: CacheStorePort | None = None,
        budget: PrefillBudget | None = None,
        max_batch: int = 32,
        clock: Clock = time.perf_counter,
        model_name: str = "",
    ) -> None:
        """`max_batch` is how many requests decode together.

        Idle caches stay in the pool while there is room; with a `store` they outlive that, and
        the process if the store does. `model_name` is written beside what is saved.

        Raises InvalidRequestError when model, spec and pool do not belong together.
        """
        if model.cache_spec() != spec or pool.spec != spec:
            raise InvalidRequestError("model, spec and pool must describe the same cache")
        if max_batch < 1:
            raise InvalidRequestError(f"max_batch must be at least 1, got {max_batch}")
        model.set_aside(pool.most_bytes)
        self._pool = pool
        self._resident = IdleCaches(pool)
        self._intake = RequestValidator(model, tokenizer)
        self._budget = budget or PrefillBudget(largest=model.best_chunk)
        self._archive = None
        if store is not None:
            self._archive = PrefixStore(
                model, store, prefill_rate=lambda: self._budget.rate, model_name=model_name
            )
        self._ledger = BlockAllocator(pool, spec, self._resident, model.model_id, self._archive)
        self._sequences = Sequences(model, self._ledger, self._archive)
        self._max_batch = max_batch
        self._clock = clock
        # Guards what `submit` and `cancel` share with the stepping thread: the queues, the store
        # and the blocks of waiting requests. Never held while the model computes.
        self._lock = threading.RLock()
        self._known = AgentCaches(self._ledger, self._archive, self._lock)
        self._waiting: FairQueue = FairQueue()
        self._running: list[Request] = []
        self._outbox: deque[CompletedGeneration] = deque()
        self._numbers = itertools.count()
        self._prefilling = Prefilling(self._sequences, self._budget, clock)
        self.preemptions = 0  # how often a running request was preempted, since the start

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
    ) -> str:
        """See `GenerationEnginePort.submit`."""
        sampling = sampling or SamplingParams()
        asked = Submission(
            agent_id, prompt, cache, max_tokens, sampling, append=append, tenant=tenant, note=note
        )
        # Not under the lock: a long text takes a while to encode, and nobody has to wait for it.
        self._intake.check(asked)
        archived = self._known.recall(agent_id, tenant)
        request = self._intake.accept(asked, archived, next(self._numbers))
        with self._lock:
            self._ledger.require_room(request, [r.owner for r in (*self._waiting, *self._running)])
            self._waiting.push(request)
            self._admit()
            return request.uid

    def cancel(self, uid: str) -> bool:
        """See `GenerationEnginePort.cancel`."""
        with self._lock:
            for request in (*self._waiting, *self._running):
                if request.uid == uid:
                    request.cancel_requested = True
                    return True
        return False

    def step(self) -> Iterator[CompletedGeneration]:
        """See `GenerationEnginePort.step`."""
        while self._outbox or self.has_work:
            if not self._outbox:
                events = self.step_once()
                self._outbox.extend(e for e in events if isinstance(e, CompletedGeneration))
            while self._outbox:
                yield self._outbox.popleft()

    def step_once(self) -> list[EngineEvent]:
        """See `GenerationEnginePort.step_once`."""
        with self._lock:
            events = self._finish_cancelled()
            self._admit()
            events += self._refuse_stuck()
        events += self._open_admitted()
        events += self._finish_loads()
        started = self._clock()
        decoding = bool(self._in_phase(Phase.DECODE))
        prefilled = self._prefill(events, decoding=decoding)
        ended = self._clock()
        with self._lock:
            events += self._grow()
        # Last, so that no token that is there waits for a chunk.
        events += self._decode()
        if decoding:
            ended = self._clock()
        self._budget.observe(prefilled, ended - started, decoding=decoding)
        return events

    # Beyond the port

    @property
    def resident(self) -> IdleCaches:
        """The idle caches that are in the pool; to be looked at only."""
        return self._resident

    @property
    def load(self) -> EngineLoad:
        """How much there is to do, and what the pool has for it."""
        restored = Counter() if self._archive is None else self._archive.restored_bytes
        return EngineLoad(self._waiting, self._running, self._pool, self.preemptions, restored)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._waiting or self._running)

    def forget(self, agent_id: str, *, tenant: str = "") -> bool:
        """Drop an agent's idle cache and what was saved of it; False when there is neither.

        Running requests go on.
        """
        return self._known.forget(agent_id, tenant)

    def fork(self, agent_id: str, new_agent_id: str, *, tenant: str = "") -> None:
        """Let a new agent begin with all that `agent_id` has; copies no keys and values.

        Raises InvalidRequestError when `agent_id` is not known or `new_agent_id` is.
        """
        self._known.fork(agent_id, new_agent_id, tenant)

    def manifest(self, agent_id: str, *, tenant: str = "") -> Manifest | None:
        """The agent as it was saved after its last turn; None when it was not."""
        return self._known.manifest(agent_id, tenant)

    def open_to_all(self, tokens: Sequence[int]) -> None:
        """Let every tenant begin with what PUBLIC_TENANT's agents have of `tokens`."""
        if self._archive is not None:
            self._archive.open_to_all(tokens)

    def flush(self) -> None:
        """Return when all that was kept is as safe as the store can make it."""
        if self._archive is not None:
            self._archive.flush()

    def close(self, *, keep_store: bool = False) -> None:
        """End the engine; flush and close the store, unless it is kept for another engine."""
        if self._archive is not None:
            self._archive.close(keep_store=keep_store)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless pool, requests and store agree on every block."""
        with self._lock:
            self._pool.check_integrity()
            self._ledger.check_integrity((*self._waiting, *self._running))

    # Admitting and growing (under the lock)

    def _in_phase(self, phase: Phase) -> list[Request]:
        return [request for request in tuple(self._running) if request.phase is phase]

    def _admit(self) -> None:
        """Give blocks to waiting requests, each in its turn, while there is room."""
        while len(self._running) < self._max_batch:
            request = self._waiting.take(self._running, self._give_blocks)
            if request is None:
                return
            request.phase = Phase.PREFILL
            self._running.append(request)

    def _give_blocks(self, request: Request) -> bool:
        # A preempted request comes back only when the others can grow beside it, else it would
        # be preempted again at the next block.
        headroom = len(self._running) if request.preemptions else 0
        return self._ledger.admit(request, headroom)

    def _refuse_stuck(self) -> list[EngineEvent]:
        """End the first waiting request when nothing runs and there is still no room for it:
        since it was submitted somebody outside the engine took blocks of the pool."""
        if self._running or not self._waiting:
            return []
        request = self._waiting.first(self._running)
        refusal = f"Cannot allocate blocks for {request.n_tokens} tokens: others hold the pool"
        return [self._complete(request, "error", error=refusal)]

    def _grow(self) -> list[EngineEvent]:
        """Room for one more token for each decoding request; preempt the youngest if need be."""
        events: list[EngineEvent] = []
        for request in sorted(self._in_phase(Phase.DECODE), key=lambda r: r.number):
            before = request.capacity
            while request.phase is Phase.DECODE and not self._ledger.grow(request):
                victim = preemption_victim(self._running)
                if victim is not None:
                    self._preempt(victim)
            if request.phase is Phase.DECODE and request.capacity > before:
                try:
                    self._sequences.reserve(request)
                except BackendError as error:
                    events.append(self._fail(request, str(error)))
        return events

    def _preempt(self, request: Request) -> None:
        """Take its blocks; it goes back to the head of the queue with the tokens it has."""
        self._sequences.preempt(request)
        self._ledger.release(request)
        self._running.remove(request)
        request.preempt()
        self.preemptions += 1
        self._waiting.push(request)

    # Running

    def _open_admitted(self) -> list[EngineEvent]:
        """Give newly admitted requests their sequences, so that blocks reserved are arrays held."""
        events: list[EngineEvent] = []
        for request in self._in_phase(Phase.PREFILL):
            if request.sequence is None:
                try:
                    self._sequences.open(request)
                except BackendError as error:
                    events.append(self._fail(request, str(error)))
        return events

    def _finish_loads(self) -> list[EngineEvent]:
        """Let those go on whose blocks have been read; wait only when nobody can do anything."""
        loading = self._in_phase(Phase.LOAD)
        if self._archive is not None and len(loading) == len(self._running):
            self._archive.wait([r.archived.load for r in loading if r.archived.load], _LOAD_WAIT)
        events: list[EngineEvent] = []
        for request in loading:
            if request.archived.load is None or request.archived.load.done:
                try:
                    self._sequences.finish_load(request)
                except BackendError as error:
                    events.append(self._fail(request, str(error)))
        return events

    def _decode(self) -> list[EngineEvent]:
        decoding = self._in_phase(Phase.DECODE)
        if not decoding:
            return []
        try:
            sampled = self._sequences.decode()
        except BackendError as error:
            return [self._fail(request, str(error)) for request in decoding]
        return [event for pair in sampled for event in self._advance(*pair)]

    def _advance(self, request: Request, sampled: SampledToken) -> list[EngineEvent]:
        text, reason = request.accept(sampled)
        event = TokenEvent(request.uid, request.agent_id, sampled.token, text, sampled.logprob)
        return [event] if reason is None else [event, self._finish(request, reason)]

    def _prefill(self, events: list[EngineEvent], *, decoding: bool) -> int:
        """Compute prompt chunks; returns how many tokens."""
        about = len(self._waiting) + len(self._running)
        chunks = self._prefilling.step(self._running, about, decoding=decoding)
        events += chunks.events
        events += [self._fail(request, reason) for request, reason in chunks.failed]
        return chunks.n_tokens

    # Ending

    def _finish_cancelled(self) -> list[EngineEvent]:
        cancelled = [r for r in (*self._waiting, *self._running) if r.cancel_requested]
        return [self._finish(request, "cancelled") for request in cancelled]

    def _finish(self, request: Request, reason: FinishReason) -> CompletedGeneration:
        """End a request; what it computed becomes its agent's idle cache."""
        if reason == "cancelled":
            request.end_text()
        with self._lock:
            blocks = self._sequences.extract(request)
            if blocks is not None:
                self._ledger.keep(request, blocks)
            else:
                self._ledger.give_back(request)
            return self._complete(request, reason, blocks=blocks)

    def _fail(self, request: Request, reason: str) -> CompletedGeneration:
        """End a request whose computation failed; its cache may be half written, so it goes."""
        with self._lock:
            self._sequences.close(request)
            self._ledger.release(request)
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
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        return completion(request, reason, blocks, error)
