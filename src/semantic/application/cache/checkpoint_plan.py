"""Where the prefill of a prompt stops to take checkpoints.

A window or a state cannot be cut back, so it is saved at the positions from which a later request
is likely to continue. Knows positions and sizes; neither requests nor what a checkpoint holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from semantic.domain.prefix import without_generation_prompt
from semantic.domain.value_objects import BLOCK_TOKENS, LayerKind, ModelCacheSpec

FEWEST_TOKENS = 64
"""Computing so few tokens again costs less than a checkpoint."""
MOST_TOKENS = 4096
"""The largest distance of the grid: what an edit in a long prompt computes again at most."""
_TIMES_AT_END = 8
"""The end of a prompt may take so many times the bytes of the keys and values before it: it is
where the next request is most likely to continue."""
_STATES_ALONE = 512
"""The grid of a model that caches nothing but states: they are all that it ever stores."""


@dataclass(frozen=True, slots=True)
class Distances:
    """The least tokens between checkpoints: of the grid, and of a prompt's end to the one before.

    Powers of two, 256 to 4,096 and 64 to 4,096.
    """

    grid: int
    at_end: int


def distances(spec: ModelCacheSpec, best_chunk: int) -> Distances:
    """The smallest distances at which checkpoints take no more bytes than they may.

    On the grid that is as much as the keys and values between them (of full attention, or of
    windows if there is none), with at most two of them in a chunk of `best_chunk` tokens.
    """
    per_token = _bytes_per_token(spec, LayerKind.FULL)
    if not per_token:
        per_token = _bytes_per_token(spec, LayerKind.SLIDING_WINDOW)

    def smallest(least: int, times: int) -> int:
        while least < MOST_TOKENS and checkpoint_bytes(spec, least) > times * per_token * least:
            least *= 2
        return least

    densest = max(BLOCK_TOKENS, min(best_chunk // 2, MOST_TOKENS))
    if not per_token:
        return Distances(max(densest, _STATES_ALONE), BLOCK_TOKENS)
    return Distances(smallest(densest, 1), smallest(FEWEST_TOKENS, _TIMES_AT_END))


def checkpoint_bytes(spec: ModelCacheSpec, distance: int) -> int:
    """Bytes that one more checkpoint takes, `distance` tokens after the one before.

    Windows of two checkpoints share their blocks where they overlap.
    """
    return sum(
        layer.state_bytes
        if layer.window is None
        else layer.bytes_per_block * min(layer.window, distance) // BLOCK_TOKENS
        for layer in spec.layers
        if layer.kind is not LayerKind.FULL
    )


def _bytes_per_token(spec: ModelCacheSpec, kind: LayerKind) -> int:
    return sum(one.bytes_per_block // BLOCK_TOKENS for one in spec.layers if one.kind is kind)


def checkpoint_positions(
    prompt_tokens: int, *, start: int, end: int, apart: Distances, junctions: Iterable[int]
) -> tuple[int, ...]:
    """Positions at which to take checkpoints while computing the tokens from `start` to `end`.

    `start` has a checkpoint. At each of the `junctions` another request continues with other
    tokens; between them is the grid, at the same positions in all prompts.
    The last one is where the agent's next prompt is expected to continue. None leaves a single
    token behind it: some models compute a chunk of one token differently.
    """
    exact = {_leaving_several(one, end) for one in junctions}
    near = sorted(one for one in exact if start + FEWEST_TOKENS <= one <= end)
    first = (start // apart.grid + 1) * apart.grid
    grid = range(first, end - FEWEST_TOKENS + 1, apart.grid)
    chosen = {one for one in grid if one >= start + FEWEST_TOKENS and not _is_near(one, near)}
    chosen.update(near)
    last = _leaving_several(without_generation_prompt(prompt_tokens), end)
    before = max((one for one in chosen if one <= last), default=start)
    if last <= end and last - before >= apart.at_end:
        chosen.add(last)
    return tuple(sorted(chosen))


def _leaving_several(position: int, end: int) -> int:
    return position - 1 if position == end - 1 else position


def _is_near(position: int, others: Sequence[int]) -> bool:
    """Whether one of `others`, in order, is less than `FEWEST_TOKENS` away."""
    after = bisect_right(others, position - FEWEST_TOKENS)
    return after < len(others) and others[after] < position + FEWEST_TOKENS
