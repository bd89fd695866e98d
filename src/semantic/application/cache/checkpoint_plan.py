"""Positions at which prefill stops to take checkpoints.

A sequence cannot shorten windows or states. Prefill therefore saves them where a later request is
likely to continue.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from semantic.domain.prefix import without_generation_prompt
from semantic.domain.value_objects import BLOCK_TOKENS, LayerKind, ModelCacheSpec, whole_blocks

FEWEST_TOKENS = 64
"""The minimum number of tokens that are worth a checkpoint."""
MOST_TOKENS = 4096
"""The largest distance between regular checkpoints, in tokens."""
_TIMES_WHERE_LIKELY = 8
"""The maximum size of checkpoints as a multiple of the keys and values. It applies where requests
are likely to continue."""
_FREE_JUNCTIONS = 4
"""The number of checkpoints that requests may take before they compute a token."""
_STATES_ALONE = 512
"""The number of tokens between two checkpoints of a model that has only states."""


@dataclass(frozen=True, slots=True)
class Distances:
    """The minimum number of tokens between two checkpoints. `grid` is for regular checkpoints,
    `at_end` for the last two checkpoints of a prompt."""

    grid: int
    at_end: int


def distances(spec: ModelCacheSpec, best_chunk: int) -> Distances:
    """Return the smallest distances that keep checkpoints within their byte limits."""
    per_token = _bytes_per_token(spec, LayerKind.FULL)
    if not per_token:
        per_token = _bytes_per_token(spec, LayerKind.SLIDING_WINDOW)

    def smallest(least: int, times: int) -> int:
        while least < MOST_TOKENS and checkpoint_bytes(spec, least) > times * per_token * least:
            least *= 2
        return least

    densest = max(BLOCK_TOKENS, min(best_chunk // 2, MOST_TOKENS))
    if not per_token:
        return Distances(max(densest, _STATES_ALONE), FEWEST_TOKENS)
    return Distances(smallest(densest, 1), smallest(FEWEST_TOKENS, _TIMES_WHERE_LIKELY))


def checkpoint_bytes(spec: ModelCacheSpec, distance: int) -> int:
    """Return the size in bytes of a checkpoint `distance` tokens after the previous checkpoint."""
    return sum(
        layer.state_bytes
        if layer.window is None
        else layer.bytes_per_block * min(layer.window, distance) // BLOCK_TOKENS
        for layer in spec.layers
        if layer.kind is not LayerKind.FULL
    )


class Junctions:
    """Chooses checkpoints at junctions: positions at which other requests continue differently.
    Chooses the junctions that save most tokens first."""

    def __init__(self, spec: ModelCacheSpec, apart: Distances) -> None:
        self._spec = spec
        self._apart = apart
        self._full = _bytes_per_token(spec, LayerKind.FULL)
        self._per_token = self._full or _bytes_per_token(spec, LayerKind.SLIDING_WINDOW)

    @property
    def least_bytes(self) -> int:
        """The number of bytes that checkpoints may take before any token is computed."""
        whole = 2 * MOST_TOKENS - 1  # after a whole window, in the middle of a block
        return _FREE_JUNCTIONS * self.bytes_at(whole, 0)

    def budget(self, n_tokens: int) -> int:
        """Return the maximum size in bytes of checkpoints after `n_tokens` computed tokens."""
        if self._per_token:
            return _TIMES_WHERE_LIKELY * self._per_token * n_tokens
        grid = self._apart.grid  # states alone
        return _TIMES_WHERE_LIKELY * checkpoint_bytes(self._spec, grid) * n_tokens // grid

    def bytes_at(self, position: int, before: int) -> int:
        """Return the size in bytes of a checkpoint at `position` after a checkpoint at `before`."""
        return self._full * (position % BLOCK_TOKENS) + sum(
            layer.state_bytes
            if layer.window is None
            else layer.bytes_per_block
            * _window_tokens(layer.window, position, before)
            // BLOCK_TOKENS
            for layer in self._spec.layers
            if layer.kind is not LayerKind.FULL
        )

    def choose(
        self, shared: Iterable[int], *, start: int, end: int, budget: int
    ) -> tuple[tuple[int, ...], int]:
        """Return the chosen positions, and the size of their checkpoints in bytes. The positions
        are after `start` and at most `end`."""
        users = _junctions_between(shared, start, end)
        near = sorted(users)
        n_bytes = sum(map(self.bytes_at, near, [start, *near]))
        if not near or n_bytes <= budget:
            return tuple(near), n_bytes
        up_to = list(accumulate((users[one] for one in near), initial=0))
        chosen: list[int] = []
        n_bytes = 0
        between = _most_useful(near, up_to, start, -1, len(near))  # a heap
        while between:
            _, at, left, right = heapq.heappop(between)
            more = self.bytes_at(near[-at], near[left] if left >= 0 else start)
            if n_bytes + more > budget:
                break
            n_bytes += more
            chosen.append(near[-at])
            for ends in ((left, -at), (-at, right)):
                for one in _most_useful(near, up_to, start, *ends):
                    heapq.heappush(between, one)
        return tuple(sorted(chosen)), n_bytes


def _most_useful(
    near: Sequence[int], up_to: Sequence[int], start: int, left: int, right: int
) -> list[tuple[int, int, int, int]]:
    # The tuple has minus the saved tokens, minus the junction's index, `left` and `right`.
    # `up_to[i]` requests diverge before junction i.
    before = near[left] if left >= 0 else start
    last = near[right] - FEWEST_TOKENS if right < len(near) else near[-1]
    saved = (
        ((before - near[at]) * (up_to[right] - up_to[at]), -at, left, right)
        for at in range(left + 1, right)
        if before + FEWEST_TOKENS <= near[at] <= last
    )
    return sorted(saved)[:1]


def _window_tokens(window: int, position: int, before: int) -> int:
    """Return the number of tokens that only the window at `position` stores."""
    first = max(0, position - window + 1)
    blocks = min(whole_blocks(first), position)
    return blocks - first + position - max(blocks, before // BLOCK_TOKENS * BLOCK_TOKENS)


def _bytes_per_token(spec: ModelCacheSpec, kind: LayerKind) -> int:
    return sum(one.bytes_per_block // BLOCK_TOKENS for one in spec.layers if one.kind is kind)


def checkpoint_positions(
    prompt_tokens: int, *, start: int, end: int, apart: Distances, junctions: Iterable[int]
) -> tuple[int, ...]:
    """Return the positions of checkpoints between `start` and `end`."""
    near = sorted(_junctions_between(junctions, start, end))
    first = (start // apart.grid + 1) * apart.grid
    grid = range(first, end - FEWEST_TOKENS + 1, apart.grid)
    chosen = {one for one in grid if one >= start + FEWEST_TOKENS and not _is_near(one, near)}
    chosen.update(near)
    last = _leaving_several(without_generation_prompt(prompt_tokens), end)
    before = max((one for one in chosen if one <= last), default=start)
    if last <= end and last - before >= apart.at_end:
        chosen.add(last)
    return tuple(sorted(chosen))


def _junctions_between(positions: Iterable[int], start: int, end: int) -> Counter[int]:
    moved = Counter(_leaving_several(one, end) for one in positions)
    return Counter({one: n for one, n in moved.items() if start + FEWEST_TOKENS <= one <= end})


def _leaving_several(position: int, end: int) -> int:
    return position - 1 if position == end - 1 else position


def _is_near(position: int, others: Sequence[int]) -> bool:
    after = bisect_right(others, position - FEWEST_TOKENS)
    return after < len(others) and others[after] < position + FEWEST_TOKENS
