"""BlockPoolBatchEngine: many agents' requests, one model, one pool of blocks.

Decides what runs when; the pool counts blocks, the backend computes, the store keeps idle
caches. Knows no framework, no transport and no chat format.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from semantic.application.block_ledger import BlockLedger
from semantic.application.intake import Intake
from semantic.application.prefill_budget import PrefillBudget
from semantic.application.request import Phase, Request
from semantic.application.resident_store import ResidentStore
from semantic.application.scheduler import next_to_prefill, youngest
from semantic.application.sequences import Sequences
from semantic.domain.entities import AgentBlocks
from semantic.domain.errors import (
    BackendError,
    InvalidRequestError,
)
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import (
    CompletedGeneration,
    FinishReason,
    ModelCacheSpec,
    PrefillEvent,
    SampledToken,
    SamplingParams,
    TokenEvent,
)
from semantic.ports.inbound import EngineEvent
from semantic.ports.outbound import BatchBackend, CacheStorePort, Clock, Tokenizer

KV = TypeVar("KV")


class BlockPoolBatchEngine(Generic[KV]):
    """Batched generation with every agent's KV cache in blocks of one pool.

    Implements `GenerationEnginePort`. A request's answer is the same alone or in any batch, with
    or without a cache, suspended or not. When the pool is full, idle caches are dropped first,
    then the youngest running request is suspended and computed again later; a request fails
    only if it could not fit alone, and then before any work.

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
        model: BatchBackend[KV],
        tokenizer: Tokenizer,
        pool: BlockPool[KV],
        spec: ModelCacheSpec,
        *,
        store: CacheStorePort[KV] | None = None,
        budget: PrefillBudget | None = None,
        max_batch: int = 32,
        clock: Clock = time.perf_counter,
    ) -> None:
        """`max_batch` is how many requests decode together; `store` keeps idle caches.

        Raises InvalidRequestError when model, spec and pool do not belong together.
        """
        if model.cache_spec() != spec or pool.spec != spec:
            raise InvalidRequestError("model, spec and pool must describe the same cache")
        if max_batch < 1:
            raise InvalidRequestError(f"max_batch must be at least 1, got {max_batch}")
        self._pool = pool
        self._store = store if store is not None else ResidentStore(pool)
        self._intake = Intake(model, tokenizer)
        self._ledger = BlockLedger(pool, spec, self._store, model.model_id)
        self._sequences = Sequences(model, self._ledger)
        self._budget = budget or PrefillBudget(largest=model.best_chunk)
        self._max_batch = max_batch
        self._clock = clock
        # Guards what `submit` and `cancel` share with the stepping thread: the queues, the store
        # and the blocks of waiting requests. Never held while the model computes.
        self._lock = threading.RLock()
        self._waiting: deque[Request[KV]] = deque()
        self._running: list[Request[KV]] = []
        self._outbox: deque[CompletedGeneration[KV]] = deque()
        self._numbers = itertools.count()
        self._prefill_turn = 0
        self.suspensions = 0  # how often a running request was suspended, since the start

    # The port

    def submit(
        self,
        agent_id: str,
        prompt: str | Sequence[int],
        cache: AgentBlocks[KV] | None = None,
        max_tokens: int = 256,
        *,
        sampling: SamplingParams | None = None,
        append: bool = False,
    ) -> str:
        """See `GenerationEnginePort.submit`."""
        with self._lock:
            kept = self._store.get(self._ledger.key(agent_id)) if append else None
        # Not under the lock: a long text takes a while to encode, and nobody has to wait for it.
        request = self._intake.accept(
            agent_id,
            prompt,
            cache,
            max_tokens,
            sampling=sampling or SamplingParams(),
            append=append,
            kept=kept,
            number=next(self._numbers),
        )
        with self._lock:
            self._ledger.require_room(request, self._agents())
            self._waiting.append(request)
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

    def step(self) -> Iterator[CompletedGeneration[KV]]:
        """See `GenerationEnginePort.step`."""
        while self._outbox or self.has_work:
            if not self._outbox:
                events = self.step_once()
                self._outbox.extend(e for e in events if isinstance(e, CompletedGeneration))
            while self._outbox:
                yield self._outbox.popleft()

    def step_once(self) -> list[EngineEvent[KV]]:
        """See `GenerationEnginePort.step_once`."""
        started = self._clock()
        with self._lock:
            events = self._finish_cancelled()
            self._admit()
            events += self._refuse_stuck()
            events += self._grow()
        decoding = bool(self._in_phase(Phase.DECODE))
        events += self._open_admitted()
        events += self._decode()
        prefilled = self._prefill(events, decoding=decoding)
        self._budget.observe(prefilled, self._clock() - started, decoding=decoding)
        return events

    # Beyond the port

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._waiting or self._running)

    def forget(self, agent_id: str) -> bool:
        """Drop the idle cache of an agent; False when there is none. Running requests go on."""
        with self._lock:
            blocks = self._store.take(self._ledger.key(agent_id))
            if blocks is None:
                return False
            self._pool.free(blocks.all_blocks(), agent_id)
            blocks.retire()
            return True

    def check_integrity(self) -> None:
        """Raise IntegrityError unless pool, requests and store agree on every block."""
        with self._lock:
            self._pool.check_integrity()
            self._ledger.check_integrity((*self._waiting, *self._running))

    # Submitting

    def _agents(self) -> set[str]:
        return {request.agent_id for request in (*self._waiting, *self._running)}

    # Admitting and growing (under the lock)

    def _in_phase(self, phase: Phase) -> list[Request[KV]]:
        return [request for request in tuple(self._running) if request.phase is phase]

    def _admit(self) -> None:
        """Give blocks to waiting requests, strictly in order, while there is room."""
        while self._waiting and len(self._running) < self._max_batch:
            request = self._waiting[0]
            # A suspended request comes back only when the others can grow beside it, else it
            # would be suspended again at the next block.
            headroom = len(self._running) if request.suspensions else 0
            if not self._ledger.admit(request, headroom):
                return
            self._waiting.popleft()
            request.phase = Phase.PREFILL
            self._running.append(request)

    def _refuse_stuck(self) -> list[EngineEvent[KV]]:
        """End the first waiting request when nothing runs and there is still no room for it:
        since it was submitted somebody outside the engine took blocks of the pool."""
        if self._running or not self._waiting:
            return []
        request = self._waiting[0]
        refusal = f"Cannot allocate blocks for {request.n_tokens} tokens: others hold the pool"
        return [self._complete(request, "error", error=refusal)]

    def _grow(self) -> list[EngineEvent[KV]]:
        """Room for one more token for each decoding request; suspend the youngest if need be."""
        events: list[EngineEvent[KV]] = []
        for request in sorted(self._in_phase(Phase.DECODE), key=lambda r: r.number):
            before = request.capacity
            while request.phase is Phase.DECODE and not self._ledger.grow(request):
                victim = youngest(self._running)
                if victim is not None:
                    self._suspend(victim)
            if request.phase is Phase.DECODE and request.capacity > before:
                try:
                    self._sequences.reserve(request)
                except BackendError as error:
                    events.append(self._fail(request, error))
        return events

    def _suspend(self, request: Request[KV]) -> None:
        """Take its blocks; it goes back to the head of the queue with the tokens it has."""
        self._sequences.close(request)
        self._ledger.release(request)
        self._running.remove(request)
        request.suspend()
        self.suspensions += 1
        self._waiting = deque(sorted((*self._waiting, request), key=lambda other: other.number))

    # Running

    def _open_admitted(self) -> list[EngineEvent[KV]]:
        """Give newly admitted requests their sequences, so that blocks reserved are arrays held."""
        events: list[EngineEvent[KV]] = []
        for request in self._in_phase(Phase.PREFILL):
            if request.sequence is None:
                try:
                    self._sequences.open(request)
                except BackendError as error:
                    events.append(self._fail(request, error))
        return events

    def _decode(self) -> list[EngineEvent[KV]]:
        decoding = self._in_phase(Phase.DECODE)
        if not decoding:
            return []
        try:
            sampled = self._sequences.decode()
        except BackendError as error:
            return [self._fail(request, error) for request in decoding]
        return [event for pair in sampled for event in self._advance(*pair)]

    def _advance(self, request: Request[KV], sampled: SampledToken) -> list[EngineEvent[KV]]:
        text, reason = request.accept(sampled)
        event = TokenEvent(request.uid, request.agent_id, sampled.token, text, sampled.logprob)
        return [event] if reason is None else [event, self._finish(request, reason)]

    def _prefill(self, events: list[EngineEvent[KV]], *, decoding: bool) -> int:
        """Compute prompt chunks up to the budget; returns how many tokens."""
        budget = left = self._budget.next_chunk(decoding=decoding)
        while left > 0:
            opened = [r for r in self._in_phase(Phase.PREFILL) if r.sequence is not None]
            request = next_to_prefill(opened, self._prefill_turn)
            if request is None:
                break
            self._prefill_turn += 1
            try:
                left -= self._sequences.prefill(request, left)
            except BackendError as error:
                events.append(self._fail(request, error))
                continue
            done, total = request.computed, request.n_tokens - 1
            events.append(PrefillEvent(request.uid, request.agent_id, done, total))
        return budget - left

    # Ending

    def _finish_cancelled(self) -> list[EngineEvent[KV]]:
        cancelled = [r for r in (*self._waiting, *self._running) if r.cancel_requested]
        return [self._finish(request, "cancelled") for request in cancelled]

    def _finish(self, request: Request[KV], reason: FinishReason) -> CompletedGeneration[KV]:
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

    def _fail(self, request: Request[KV], error: BackendError) -> CompletedGeneration[KV]:
        """End a request whose computation failed; its cache may be half written, so it goes."""
        with self._lock:
            self._sequences.close(request)
            self._ledger.release(request)
            return self._complete(request, "error", error=str(error))

    def _complete(
        self,
        request: Request[KV],
        reason: FinishReason,
        *,
        blocks: AgentBlocks[KV] | None = None,
        error: str | None = None,
    ) -> CompletedGeneration[KV]:
        request.phase = Phase.FINISHED
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        return CompletedGeneration(
            uid=request.uid,
            agent_id=request.agent_id,
            text=request.text,
            tokens=tuple(request.generated),
            finish_reason=reason,
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens,
            blocks=blocks,
            logprobs=tuple(request.logprobs),
            error=error,
        )
