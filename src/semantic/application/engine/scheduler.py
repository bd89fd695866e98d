"""Scheduler: decides which requests run, and which prompt gets the next chunk (chunked prefill)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from semantic.application.cache.block_allocator import BlockAllocator
from semantic.application.engine.fair_queue import FairQueue
from semantic.application.engine.memory_guard import MemoryGuard, StepMemory
from semantic.application.engine.prefill_budget import (
    MeasuredPass,
    PrefillBudget,
    SharedPass,
    chunk_size,
)
from semantic.application.request import Phase, Request
from semantic.domain.fair_share import FairRoom
from semantic.ports.generation import Clock, StepObserver

_PARTS = 7
"""A tenant may take this many places in a shared batch for each place that stays free."""
_LONGEST_WAITING_EVERY = 4
"""Every fourth chunk goes to the request that has waited longest. Short prompts thus cannot starve
a long one."""


class PrefillOrder:
    """Decides which prompt gets the next chunk. Prefers the agent that will have computed the
    fewest tokens at its prompt's end."""

    def __init__(self) -> None:
        self._turn = 0
        self._computed: dict[str, int] = {}  # tokens, by agent
        self._waits_since: dict[str, int] = {}  # turn, by agent
        self._last_turn: dict[int, int] = {}  # turn of last chunk or arrival, by request
        self._urgent: dict[int, tuple[int, int]] = {}  # order of the first one behind
        self._priority: dict[int, int] = {}  # own, or higher from behind, by request

    def next(
        self, requests: Sequence[Request], behind: Sequence[tuple[Request, Request | None]] = ()
    ) -> Request | None:
        """Return the request to prefill next. `behind` has pairs of a request and the request that
        it waits for."""
        numbers = {request.number for request in requests}
        here = {request.owner for request in requests}
        self._computed = {owner: self._computed.get(owner, 0) for owner in here}
        self._waits_since = {owner: self._waits_since.get(owner, self._turn) for owner in here}
        self._last_turn = {number: self._last_turn.get(number, self._turn) for number in numbers}

        self._urgent = {}
        self._priority = {request.number: request.hints.priority for request in requests}
        for request, leader in behind:
            if leader is not None:
                self._inherit(leader, request)
                order = self._computed.get(request.owner, 0) + request.to_prefill, request.number
                before = self._urgent.get(leader.number, order)
                self._urgent[leader.number] = min(before, order)

        oldest = min(requests, key=self._longest_waiting, default=None)
        if oldest is not None and (self._turn + 1) % _LONGEST_WAITING_EVERY == 0:
            passed_over = self._turn - self._last_turn[oldest.number]
            if passed_over >= _LONGEST_WAITING_EVERY - 1:
                return oldest
        return min(self._first_of_tenants(requests), key=self._least_computed, default=None)

    def by_least_computed(self, requests: Sequence[Request]) -> list[Request]:
        """Return `requests` in the order of prefill. Call `next` with the same requests first."""
        return sorted(requests, key=self._least_computed)

    def account(self, request: Request, n_tokens: int, *, same_pass: bool = False) -> None:
        """Count a chunk of `n_tokens` for the request's agent."""
        self._turn += not same_pass
        self._computed[request.owner] = self._computed.get(request.owner, 0) + n_tokens
        self._waits_since[request.owner] = self._last_turn[request.number] = self._turn

    def _inherit(self, leader: Request, request: Request) -> None:
        # Only within one tenant
        own = self._priority.get(leader.number)
        if own is not None and leader.tenant == request.tenant:
            self._priority[leader.number] = max(own, request.hints.priority)

    def _first_of_tenants(self, requests: Sequence[Request]) -> list[Request]:
        highest: dict[str, int] = {}
        for one in requests:
            own = self._priority[one.number]
            highest[one.tenant] = max(own, highest.get(one.tenant, own))
        return [one for one in requests if self._priority[one.number] == highest[one.tenant]]

    def _longest_waiting(self, request: Request) -> tuple[int, int]:
        return self._waits_since[request.owner], request.number

    def _least_computed(self, request: Request) -> tuple[int, int]:
        order = self._computed[request.owner] + request.to_prefill, request.number
        return min(order, self._urgent.get(request.number, order))


_CONCURRENT_SECONDS = 30.0
"""The seconds for which more requests may come after two were active at once."""


@dataclass(slots=True)
class Step:
    """Measurements of one engine step. Costs are relative to a token of a prompt alone."""

    started: float
    decoding: int
    first_token_due: bool
    concurrent: bool
    cost: float = 0.0
    passes: list[MeasuredPass] = field(default_factory=list)
    allowed: int = 0
    beside: SharedPass | None = None
    pass_started: float = 0.0
    prefill_ended: float = 0.0


class Chunk(NamedTuple):
    """A request to prefill, and the maximum number of tokens to compute."""

    request: Request
    limit: int


class Prompts(Protocol):
    """The scheduler's view of the sequences in prefill."""

    @property
    def pads_chunks(self) -> bool:
        """True if chunks in one pass may have different numbers of tokens."""

    def may_prefill(self, request: Request) -> bool:
        """Return whether the request may prefill; False if it waits for another request."""

    def waits_for(self, request: Request) -> Request | None:
        """Return the request that this one waits for, or None."""

    def may_join(self, request: Request) -> bool:
        """Return whether one pass can compute the rest of this prompt with other prompts."""

    def side_by_side(self, request: Request, limit: int) -> int:
        """Return the next chunk's size in tokens if other prompts can share the pass, else 0."""


class Scheduler:
    """The waiting and running requests of one engine. Not thread-safe."""

    def __init__(
        self, allocator: BlockAllocator, budget: PrefillBudget, clock: Clock, max_batch: int
    ) -> None:
        """At most `max_batch` requests run together."""
        self._allocator = allocator
        self._budget = budget
        self._clock = clock
        self._max_batch = max_batch
        self._order = PrefillOrder()
        self._concurrency = RecentConcurrency()
        self._guard: MemoryGuard | None = None
        self._memory = StepMemory()
        self.waiting = FairQueue()
        self.running: list[Request] = []
        self.is_shared = False  # True: a tenant may not fill the batch alone
        self.preemptions = 0  # since the start
        self.observer: StepObserver | None = None

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all unfinished requests."""
        return iter((*self.waiting, *self.running))

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def in_phase(self, phase: Phase) -> list[Request]:
        return [request for request in tuple(self.running) if request.phase is phase]

    def keep_within(self, guard: MemoryGuard) -> None:
        """Let `guard` limit chunks, batch and new requests."""
        self._guard, self._budget.narrowing = guard, guard.chunks

    # Admit

    def add(self, request: Request) -> None:
        """Queue a new request. Raises PoolExhaustedError if the request needs a larger pool."""
        self._allocator.require_capacity(request, [other.owner for other in self.running])
        self.waiting.push(request)

    def admit(self) -> None:
        """Allocate blocks to waiting requests in fair order."""
        while len(self.running) < self._most_running:
            request = self.waiting.take(self.running, self._allocate, self._may_run())
            if request is None:
                return
            request.phase = Phase.PREFILL
            self.running.append(request)

    def _may_run(self) -> Callable[[str], bool]:
        room = FairRoom(self._most_running, _PARTS)
        for one in self.running if self.is_shared else ():
            room.take(one.tenant, 1)
        return lambda tenant: room.leaves_room(tenant, 1)

    @property
    def _most_running(self) -> int:
        if self._guard is None:
            return self._max_batch
        return 1 if self._guard.is_exceeded else self._guard.batch.of(self._max_batch)

    def _allocate(self, request: Request) -> bool:
        # Readmit a preempted request only if the running ones can still grow: otherwise it would be
        # preempted again at the next block.
        headroom = len(self.running) if request.preemptions else 0
        return self._allocator.admit(request, headroom)

    def stuck(self) -> Request | None:
        """Return the first waiting request if no request runs, else None."""
        if self.running or not self.waiting:
            return None
        return self.waiting.first(self.running)

    def remove(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    # Prefill

    def begin_step(self, *, others: bool = False) -> Step:
        """Begin to measure a step. `others` says that other engines wait for the step's end."""
        now = self._clock()
        decoding = self.in_phase(Phase.DECODE)
        return Step(
            started=now,
            decoding=len(decoding),
            first_token_due=any(one.computed < one.n_tokens for one in decoding),
            concurrent=self._concurrency.observe(len(self) + others, now),
        )

    def next_pass(self, step: Step, prompts: Prompts) -> list[Chunk]:
        """Return the chunks of the next pass; an empty list ends the step's prefill."""
        if step.first_token_due:
            return []
        prefilling = self.in_phase(Phase.PREFILL)
        ready = [one for one in prefilling if prompts.may_prefill(one)]
        numbers = {one.number for one in ready}
        behind = [(one, prompts.waits_for(one)) for one in prefilling if one.number not in numbers]
        request = self._order.next(ready, behind)
        if request is None:
            return []
        step.pass_started = self._clock()
        left = self._budget.tokens_left(
            int(step.cost),
            len(step.passes),
            decoding=step.decoding,
            prompts=len(ready),
            concurrent=step.concurrent,
        )
        left = self._within_memory(step, request, left)
        step.allowed = int(step.cost) + left
        is_last = left >= request.to_prefill
        first_token_due = any(one.awaits_first_token for one in self.running)
        # The rest of a step's budget may be less than a pass costs.
        least = self._budget.smallest if step.passes and not is_last else 1
        if left < least or (first_token_due and not is_last):
            return []
        rest = [one for one in ready if one is not request]
        chunks = self._side_by_side(step, request, rest, left, prompts)
        if chunks:
            return chunks
        if not is_last:
            return [Chunk(request, chunk_size(left))]
        joins = bool(rest) and prompts.may_join(request)
        joining = [one for one in rest if prompts.may_join(one)] if joins else []
        return self._joined(Chunk(request, left), self._order.by_least_computed(joining))

    def _side_by_side(
        self, step: Step, first: Request, rest: Sequence[Request], left: int, prompts: Prompts
    ) -> list[Chunk]:
        beside, even = prompts.side_by_side, not prompts.pads_chunks
        n_first = beside(first, left) if rest else 0
        if not n_first:
            return []
        ready = self._order.by_least_computed(rest)
        sizes = [(one, n) for one in ready if (n := beside(one, left))]
        fitting = self._fitting(self._budget.largest, first.computed + n_first)
        chunks = [n_first, *(n for _, n in sizes)]
        chosen = self._budget.beside(chunks, min(left, fitting), even=even)
        if chosen is None:
            return []
        width = chosen.width
        others = [sizes[i - 1][0] for i in chosen.others][: max(0, fitting // width - 1)]
        together = [one for one in (first, *others) if not even or beside(one, width) == width]
        if together[:1] != [first] or len(together) == 1:
            return []
        step.beside = chosen
        return [Chunk(one, width) for one in together]

    def _within_memory(self, step: Step, request: Request, left: int) -> int:
        # 0 if the pass should wait for decoding requests
        n_tokens = min(left, request.to_prefill)
        fewest, context = self._budget.smallest, request.computed + n_tokens
        fitting = self._fitting(n_tokens, context)
        if fitting == n_tokens:
            return left
        if fitting < fewest and step.decoding and self._memory.is_measured(fewest, context):
            return 0
        return max(fewest, fitting)

    def _fitting(self, n_tokens: int, context: int) -> int:
        if self._guard is None or n_tokens < 1:
            return n_tokens
        expected = self._memory.expected(n_tokens, context)
        # A guess frees no caches: a shorter chunk measures first.
        room = self._guard.room(expected, frees=self._memory.is_measured(n_tokens, context))
        return n_tokens if room >= expected else n_tokens * room // expected

    @staticmethod
    def _joined(first: Chunk, joining: Sequence[Request]) -> list[Chunk]:
        chosen = [first]
        left = first.limit - first.request.to_prefill
        for request in joining:
            if request.to_prefill <= left:
                chosen.append(Chunk(request, left))
                left -= request.to_prefill
        return chosen

    def prefilled(
        self, step: Step, n_tokens: Sequence[tuple[Request, int]], n_bytes: int = 0
    ) -> None:
        """Record a pass that computed `n_tokens`. It needed `n_bytes` of memory, 0 if unknown."""
        longest = max((request.computed for request, _ in n_tokens), default=0)
        self._memory.observe(sum(n for _, n in n_tokens), longest, n_bytes)
        total, n_beside = sum(n for _, n in n_tokens), 0
        if step.beside is not None:
            total = max((n for _, n in n_tokens), default=0)
            n_beside = total * (len(n_tokens) - 1)  # padding costs as much
            step.cost += n_beside * step.beside.share
        step.cost += total
        if total:
            seconds = self._clock() - step.pass_started
            step.passes.append(MeasuredPass(total, seconds, step.allowed, n_beside))
        for i, (request, n) in enumerate(n_tokens):
            self._order.account(request, n, same_pass=i > 0)
        step.beside = None

    def end_prefill(self, step: Step) -> None:
        step.prefill_ended = self._clock()

    def end_step(self, step: Step) -> None:
        """Learn the rates of prefill and decode from a finished step."""
        ended = self._clock() if step.decoding else step.prefill_ended
        seconds = ended - step.started
        self._budget.observe(step.passes, seconds, decoding=step.decoding > 0)
        if self.observer is not None and (step.passes or step.decoding):
            self.observer.stepped(seconds, step.decoding, prefilled=bool(step.passes))

    # Grow and preempt

    def full(self) -> list[Request]:
        """Return the decoding requests that lack a block for one more token, oldest first."""
        decoding = self.in_phase(Phase.DECODE)
        full = [request for request in decoding if request.n_tokens >= request.capacity]
        return sorted(full, key=lambda request: request.number)

    def grow(self, request: Request, close_sequence: Callable[[Request], None]) -> bool:
        """Allocate blocks for one more token; return whether the request still runs. Calls
        `close_sequence` for each preempted request."""
        before = request.capacity
        while request.phase is Phase.DECODE and not self._allocator.grow(request):
            victim = preemption_victim(self.running)
            if victim is not None:
                close_sequence(victim)
                self._preempt(victim)
        return request.phase is Phase.DECODE and request.capacity > before

    def _preempt(self, request: Request) -> None:
        self._allocator.release(request)
        self.running.remove(request)
        request.preempt()
        self.preemptions += 1
        self.waiting.push(request)


def preemption_victim(requests: Sequence[Request]) -> Request | None:
    """Return the youngest request, so that the oldest always progresses."""
    return max(requests, key=lambda request: request.number, default=None)


class RecentConcurrency:
    """Records whether several requests were active in the last 30 s."""

    def __init__(self) -> None:
        self._until = float("-inf")

    def observe(self, n_requests: int, now: float) -> bool:
        """Record the number of active requests; return whether more requests may come."""
        if n_requests > 1:
            self._until = now + _CONCURRENT_SECONDS
        return now < self._until
