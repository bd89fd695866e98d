"""SharedPrefill: one request computes the tokens that several requests share; the others wait."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from semantic.application.cache.checkpoint_plan import (
    FEWEST_TOKENS,
    Junctions,
    checkpoint_positions,
    distances,
)
from semantic.application.request import Phase, Request
from semantic.domain.block_hash import BlockHash
from semantic.domain.value_objects import BLOCK_TOKENS, ModelCacheSpec

_MOST_COMPARED = 128
"""The maximum number of requests to compare a prompt with."""
_HEAD_BYTES = FEWEST_TOKENS * array("I").itemsize


@dataclass(slots=True)
class _Group:
    """The requests of one tenant that begin with the same `FEWEST_TOKENS` tokens."""

    allowance: int

    live: dict[str, _Live] = field(default_factory=dict)
    version: int = 0
    compared: list[_Live] = field(default_factory=list)
    compared_at: int = -1


@dataclass(slots=True)
class _Live:
    """An unfinished request, and the lengths of the prefixes that it shares with others."""

    request: Request
    packed: bytes
    group: _Group
    common: dict[str, int] = field(default_factory=dict)
    longest: int = 0
    compared_at: int = -1


class CommonPrefixes:
    """Compares the prompts of unfinished requests. `add` is thread-safe; only the stepping thread
    calls the other methods."""

    def __init__(self, allowance: int = 0) -> None:
        """`allowance` is the bytes that a new group may use for checkpoints."""
        self._allowance = allowance
        self._live: dict[str, _Live] = {}
        self._groups: dict[tuple[str, bytes], _Group] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: Request) -> None:
        # The last token of a prompt never comes from a cache.
        packed = array("I", request.prompt[:-1]).tobytes()
        if len(packed) < _HEAD_BYTES:
            return
        with self._lock:
            group = self._groups.setdefault(_head(request, packed), _Group(self._allowance))
            group.live[request.uid] = self._live[request.uid] = _Live(request, packed, group)
            group.version += 1

    def remove(self, request: Request) -> None:
        """Remove a finished request."""
        with self._lock:
            own = self._live.pop(request.uid, None)
            if own is None:
                return
            del own.group.live[request.uid]
            own.group.version += 1
            if not own.group.live:
                del self._groups[_head(request, own.packed)]

    def version(self, request: Request) -> int:
        """Return a number that changes whenever the result of `of` may change."""
        own = self._live.get(request.uid)
        return -1 if own is None else own.group.version

    def allowance(self, request: Request) -> int:
        """Return the bytes left for checkpoints where the requests of the group diverge."""
        own = self._live.get(request.uid)
        return 0 if own is None else own.group.allowance

    def allow(self, request: Request, n_bytes: int) -> None:
        """Add `n_bytes`, which may be negative, to the allowance of the request's group."""
        own = self._live.get(request.uid)
        if own is not None:
            own.group.allowance += n_bytes

    def of(self, request: Request, at_least: int = FEWEST_TOKENS) -> Iterator[tuple[Request, int]]:
        """Yield each request that shares at least its first `at_least` tokens with `request`, and
        the number of shared tokens."""
        own = self._live.get(request.uid)
        if own is None:
            return
        if own.compared_at != own.group.version:
            self._compare(own)
        if own.longest < at_least:
            return
        for uid, n_tokens in own.common.items():
            other = own.group.live.get(uid)
            if other is not None and n_tokens >= at_least:
                yield other.request, n_tokens

    def _compare(self, own: _Live) -> None:
        before = own.common
        own.compared_at, others = self._others(own.group)
        own.common = {
            other.request.uid: before.get(other.request.uid) or _n_common(own.packed, other.packed)
            for other in others
            if other is not own
        }
        own.longest = max(own.common.values(), default=0)

    def _others(self, group: _Group) -> tuple[int, list[_Live]]:
        with self._lock:
            if group.compared_at != group.version:
                live = sorted(group.live.values(), key=lambda at: at.request.phase is Phase.WAITING)
                group.compared, group.compared_at = live[:_MOST_COMPARED], group.version
            return group.compared_at, group.compared


def computes_before(left: Request, right: Request) -> bool:
    """Return whether `left`, not `right`, should compute their shared tokens."""
    return _order(left) < _order(right)


def is_computing(request: Request) -> bool:
    """Return whether the request's prompt is in prefill and stops at checkpoints."""
    return request.phase is Phase.PREFILL and request.sequence is not None and not request.scoring


def _order(request: Request) -> tuple[int, int, int]:
    return -request.computed, request.to_prefill, request.number


def _head(request: Request, packed: bytes) -> tuple[str, bytes]:
    return request.tenant, packed[:_HEAD_BYTES]


def _n_common(left: bytes, right: bytes) -> int:
    size = array("I").itemsize
    same, stop = 0, min(len(left), len(right))
    while same < stop:
        middle = (same + stop + 1) // 2
        if left[same:middle] == right[same:middle]:
            same = middle
        else:
            stop = middle - 1
    return same // size


_MOST_IN_VAIN = 2
"""The number of useless waits after which a request computes all its tokens itself."""


@dataclass(slots=True)
class _Plan:
    """A request's checkpoints, and the request that it waits for."""

    start: int = 0
    """The last position with a checkpoint in the store."""
    junction: int | None = None
    """The position where the prompt differs from all stored tokens."""
    positions: tuple[int, ...] = ()
    """Positions at which to take checkpoints."""
    junctions: tuple[int, ...] = ()
    """The positions where other requests continue differently."""
    reserved: int = 0
    """Bytes reserved for checkpoints at junctions."""
    counted: int | None = None
    """The position up to which the request's tokens count in the allowance."""
    made_for: tuple[int, int] = (-1, -1)
    """The inputs from which `positions` was computed."""
    waits_for: tuple[Request, int] | None = None
    """The request that this one waits for, and the number of shared tokens."""
    looks_again: bool = False
    """True if the request should look for other requests' blocks."""
    waited: int = 0
    """The number to add to `in_vain` if the wait is useless."""
    in_vain: int = 0
    """The number of the request's useless waits."""
    in_flight: BlockHash | None = None
    """The block that this request computes for others."""


class SharedPrefill:
    """Decides which request computes the blocks that several requests need. `add` is thread-safe.
    `continues_from` and `parts_at` need the engine's lock; only the stepping thread calls the rest.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        next_block: Callable[[Request], BlockHash | None],
        *,
        needs_checkpoint: bool,
        best_chunk: int,
    ) -> None:
        """`next_block` returns a request's next block, or None if others cannot reuse it. If
        `needs_checkpoint`, sequences resume only at a checkpoint."""
        self._spec = spec
        self._next_block = next_block
        self._needs_checkpoint = needs_checkpoint
        self._apart = distances(spec, best_chunk)
        self._junctions = Junctions(spec, self._apart)
        self._common = CommonPrefixes(self._junctions.least_bytes)
        self._plans: dict[str, _Plan] = {}
        self._in_flight: dict[BlockHash, str] = {}

    # Life of a request

    def add(self, request: Request) -> None:
        """Add a new request. Running requests with the same prefix then take checkpoints for it."""
        if self._needs_checkpoint and request.keep:
            self._common.add(request)

    def parts_at(self, request: Request, junction: int | None) -> None:
        """Record the position where the prompt differs from all stored tokens."""
        self._plan(request).junction = junction

    def continues_from(self, request: Request, position: int) -> None:
        """Record that the request computes from `position` on."""
        plan = self._plan(request)
        plan.start, plan.counted, plan.waited = position, None, 0

    def took_checkpoint(self, request: Request, position: int) -> None:
        """Record that the store has the request's checkpoint at `position`."""
        plan = self._plan(request)
        if position in plan.junctions:
            # Spent. The next choice of junctions returns the other reserved bytes.
            plan.reserved -= self._junctions.bytes_at(position, plan.start)
        plan.start = position

    def preempt(self, request: Request) -> None:
        """Discard the request's plan, because its sequence closes."""
        junction = self._plan(request).junction
        self._forget(request)
        self._plans[request.uid] = _Plan(junction=junction)

    def drop(self, request: Request) -> None:
        """Forget a finished request."""
        self._forget(request)
        self._common.remove(request)
        self._plans.pop(request.uid, None)

    # Computing a shared block once

    def claim(self, request: Request) -> bool:
        """Return whether `request` may compute its next block; False while another computes it."""
        if self._needs_checkpoint:
            return not self._waits(request)
        self.release(request)
        block = self._next_block(request)
        if block is None:
            return True
        if not request.keep:
            return block not in self._in_flight or request.computed % BLOCK_TOKENS != 0
        if self._in_flight.setdefault(block, request.uid) == request.uid:
            self._plan(request).in_flight = block
            return True
        return request.computed % BLOCK_TOKENS != 0

    def release(self, request: Request) -> None:
        """Let other requests compute the request's block."""
        plan = self._plan(request)
        block, plan.in_flight = plan.in_flight, None
        if block is not None and self._in_flight.get(block) == request.uid:
            del self._in_flight[block]

    # Waiting for a checkpoint

    def waits_for(self, request: Request) -> Request | None:
        """Return the last request in the chain of waits that begins at `request`, or None."""
        first, plan = None, self._plans.get(request.uid)
        while plan is not None and plan.waits_for is not None:
            first = plan.waits_for[0]
            plan = self._plans.get(first.uid)
        return first

    def look_again(self, request: Request) -> None:
        """Make the request look for blocks that others have saved."""
        plan = self._plan(request)
        plan.looks_again = plan.in_vain < _MOST_IN_VAIN

    def looks_again(self, request: Request) -> bool:
        """Return whether others may have saved blocks since the last call."""
        plan = self._plan(request)
        looks, plan.looks_again = plan.looks_again, False
        return looks

    def in_vain(self, request: Request) -> None:
        """Record that the request's wait was useless."""
        plan = self._plan(request)
        plan.in_vain += plan.waited
        plan.waited = 0

    def read_in_vain(self, request: Request, *, look_again: bool) -> None:
        """Record that the request read a damaged body."""
        plan = self._plan(request)
        plan.in_vain += 1
        if look_again:
            plan.looks_again, plan.waited = True, 1

    def beginning_like(self, leader: Request) -> Iterator[Request]:
        """Yield the requests that begin like `leader` and have computed no token."""
        looking = Phase.WAITING, Phase.LOAD
        return (other for other, _ in self._common.of(leader) if other.phase in looking)

    # Taking checkpoints

    def checkpoint_at(self, request: Request) -> int | None:
        """Return the next position where prefill must stop to take a checkpoint."""
        positions = self._positions(request)
        following = bisect_right(positions, request.computed)
        return positions[following] if following < len(positions) else None

    def takes_checkpoint(self, request: Request) -> bool:
        """Return whether to take a checkpoint now."""
        if not self._needs_checkpoint:
            return False
        plan = self._plan(request)
        if plan.counted is not None and plan.counted < request.computed:
            self._common.allow(request, self._junctions.budget(request.computed - plan.counted))
            plan.counted = request.computed
        return request.computed in self._positions(request)

    # Inside

    def _plan(self, request: Request) -> _Plan:
        plan = self._plans.get(request.uid)
        # Two threads may get here for one request: both must return the same plan.
        return self._plans.setdefault(request.uid, _Plan()) if plan is None else plan

    def _positions(self, request: Request) -> tuple[int, ...]:
        if not self._needs_checkpoint or request.scoring:
            return ()
        plan = self._plan(request)
        made_for = (self._common.version(request), plan.start)
        if plan.made_for != made_for:
            plan.made_for = made_for
            end = self._spec.reusable(request.n_tokens - 1)
            plan.junctions = self._chosen_junctions(request, plan, end)
            plan.positions = checkpoint_positions(
                len(request.prompt),
                start=plan.start,
                end=end,
                apart=self._apart,
                junctions=plan.junctions,
            )
        return plan.positions

    def _chosen_junctions(self, request: Request, plan: _Plan, end: int) -> tuple[int, ...]:
        common, computed = self._common, request.computed
        if plan.counted is None:
            plan.counted = computed
        shared = [n_tokens for _, n_tokens in common.of(request)]
        chosen, n_bytes = self._junctions.choose(
            shared if plan.junction is None else [*shared, plan.junction],
            start=max(plan.start, computed + 1 - FEWEST_TOKENS),
            end=end,
            budget=common.allowance(request)
            + plan.reserved
            + self._junctions.budget(max(0, end - computed)),
        )
        common.allow(request, plan.reserved - n_bytes)
        plan.reserved = n_bytes
        return chosen

    def _forget(self, request: Request) -> None:
        self.release(request)
        plan = self._plan(request)
        self._common.allow(request, plan.reserved)
        plan.reserved = 0

    def _waits(self, request: Request) -> bool:
        # The number of useless waits is limited, so that later, shorter requests cannot delay this
        # one forever.
        plan = self._plan(request)
        if plan.looks_again or plan.in_vain >= _MOST_IN_VAIN or request.scoring:
            return False
        if plan.waits_for is None:
            plan.waits_for = next(self._leaders(request), None)
        elif not self._leads(*plan.waits_for, request):
            # If the leader still runs, it has taken the checkpoint and the store did not keep it.
            goes_on = plan.waits_for[0].phase in (Phase.PREFILL, Phase.DECODE)
            plan.waits_for, plan.looks_again = None, True
            plan.waited = _MOST_IN_VAIN if goes_on else 1
        return plan.waits_for is not None

    def _leaders(self, request: Request) -> Iterator[tuple[Request, int]]:
        for other, shared in self._common.of(request, request.computed + FEWEST_TOKENS):
            if self._leads(other, shared, request):
                yield other, shared

    def _leads(self, leader: Request, shared: int, request: Request) -> bool:
        if not (is_computing(leader) and computes_before(leader, request)):
            return False
        positions = self._positions(leader)
        n_shared = bisect_right(positions, shared)
        last = positions[n_shared - 1] if n_shared else 0
        return last > leader.computed and last >= request.computed + FEWEST_TOKENS
