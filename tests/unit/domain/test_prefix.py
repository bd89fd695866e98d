"""What a cache gives a new prompt, against trying every length."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.domain.entities import AgentBlocks, BlockId, KVBlock
from semantic.domain.prefix import common_prefix, earliest_cut, reusable_prefix
from semantic.domain.value_objects import LayerKind, LayerSpec, ModelCacheSpec

FULL = LayerSpec(LayerKind.FULL, 1, 1, 1, 1)
STATE = LayerSpec(LayerKind.STATE, state_bytes=1)


def sliding(size: int) -> LayerSpec:
    return LayerSpec(LayerKind.SLIDING_WINDOW, 1, 1, 1, 1, window=size)


def cache_of(tokens: Sequence[int], *held: range) -> AgentBlocks:
    """A cache of `tokens` whose layer i holds positions `held[i]`, in blocks of 4."""
    blocks = AgentBlocks("a", token_ids=tuple(tokens))
    number = 0
    for layer, positions in enumerate(held):
        for start in range(positions.start, positions.stop, 4):
            count = min(4, positions.stop - start)
            blocks.add_block(KVBlock(BlockId(number), layer, count, None, start))
            number += 1
    return blocks


def can_give(layer: LayerSpec, held: range, total: int, length: int) -> bool:
    """Whether a layer that holds `held` of `total` tokens can go on after the first `length`."""
    if layer.kind is LayerKind.STATE:
        return length == total == held.stop
    seen_first = 0 if layer.window is None else max(0, length - layer.window + 1)
    return all(position in held for position in range(seen_first, length))


def oracle(spec: ModelCacheSpec, blocks: AgentBlocks, prompt: Sequence[int]) -> int:
    """The longest shared prefix, if every layer can be cut to it. Tries no shorter one: a layer
    that cannot be cut so far back cannot be cut further back either."""
    shared = 0
    while (
        shared < min(len(blocks.token_ids), len(prompt) - 1)
        and blocks.token_ids[shared] == prompt[shared]
    ):
        shared += 1
    works = all(
        can_give(layer, blocks.token_range(i), blocks.total_tokens, shared)
        for i, layer in enumerate(spec.layers)
    )
    return shared if shared and works else 0


tokens = st.lists(st.integers(0, 2), max_size=24)
# No model has a window of one token, which remembers nothing: such a cache is only computed again.
layers = st.one_of(st.just(FULL), st.just(STATE), st.integers(2, 30).map(sliding))


@st.composite
def caches(draw: st.DrawFn) -> tuple[ModelCacheSpec, AgentBlocks]:
    """Any spec, and a cache as a backend leaves it: windows keep what the next token needs."""
    spec = ModelCacheSpec(tuple(draw(st.lists(layers, min_size=1, max_size=3))))
    ids = draw(tokens)
    held = []
    for layer in spec.layers:
        least = 0 if layer.window is None else max(0, len(ids) - max(1, layer.window - 1))
        held.append(range(draw(st.integers(0, least)), len(ids)))
    return spec, cache_of(ids, *held)


@given(caches(), tokens, st.integers(0, 24))
def test_every_cache_gives_what_trying_every_length_finds(
    cached: tuple[ModelCacheSpec, AgentBlocks], fresh: list[int], shared: int
) -> None:
    spec, blocks = cached
    prompt = [*blocks.token_ids[:shared], *fresh]
    assert reusable_prefix(spec, blocks, prompt) == oracle(spec, blocks, prompt)


@st.composite
def holes(draw: st.DrawFn) -> tuple[ModelCacheSpec, AgentBlocks]:
    """Any spec, and a cache whose layers hold any part of the tokens, or nothing."""
    spec = ModelCacheSpec(tuple(draw(st.lists(layers, min_size=1, max_size=3))))
    ids = draw(tokens)
    ends = st.integers(0, len(ids))
    held = [range(*sorted((draw(ends), draw(ends)))) for _ in spec.layers]
    return spec, cache_of(ids, *held)


@given(holes(), st.integers(0, 24))
def test_an_incomplete_cache_never_gives_what_it_does_not_hold(
    cached: tuple[ModelCacheSpec, AgentBlocks], shared: int
) -> None:
    spec, blocks = cached
    prompt = [*blocks.token_ids[:shared], 3]
    length = reusable_prefix(spec, blocks, prompt)
    for i, layer in enumerate(spec.layers):
        held, total = blocks.token_range(i), blocks.total_tokens
        assert length == 0 or can_give(layer, held, total, length)


@given(tokens, tokens)
def test_a_common_prefix_is_common_and_longest(left: list[int], right: list[int]) -> None:
    n = common_prefix(left, right)
    assert left[:n] == right[:n]
    assert n == min(len(left), len(right)) or left[n] != right[n]
    assert n == common_prefix(right, left)


@pytest.mark.parametrize("size", [1, 16, 128, 255, 256, 257, 300, 511, 512, 1024, 4096])
def test_a_window_is_cut_back_as_far_as_the_next_token_still_sees_all_of_it(size: int) -> None:
    held = range(5000, 10_000)
    earliest = earliest_cut(sliding(size), held, 10_000)
    assert earliest == 5000 + size - 1
    assert can_give(sliding(size), held, 10_000, earliest)
    assert not can_give(sliding(size), held, 10_000, earliest - 1) or size == 1


def test_the_last_token_of_a_prompt_always_runs() -> None:
    spec = ModelCacheSpec((FULL,))
    blocks = cache_of([1, 2, 3, 4], range(4))
    assert reusable_prefix(spec, blocks, [1, 2, 3, 4]) == 3
    assert reusable_prefix(spec, blocks, [1]) == 0
    assert reusable_prefix(spec, blocks, [1, 2, 3, 4, 5]) == 4


def test_a_state_is_used_whole_or_not_at_all() -> None:
    spec = ModelCacheSpec((FULL, STATE))
    blocks = cache_of([1, 2, 3, 4], range(4), range(4))
    assert reusable_prefix(spec, blocks, [1, 2, 3, 4, 5]) == 4
    assert reusable_prefix(spec, blocks, [1, 2, 3, 4]) == 0
    assert reusable_prefix(spec, blocks, [1, 2, 3, 9]) == 0


def test_a_retired_or_missing_cache_gives_nothing() -> None:
    spec = ModelCacheSpec((FULL,))
    blocks = cache_of([1, 2, 3], range(3))
    assert reusable_prefix(spec, blocks, [1, 2, 3]) == 2
    blocks.retire()
    assert reusable_prefix(spec, blocks, [1, 2, 3]) == 0
    assert reusable_prefix(spec, None, [1, 2, 3]) == 0


def test_a_cache_of_unknown_tokens_gives_nothing() -> None:
    blocks = AgentBlocks("a", total_tokens=8)
    assert reusable_prefix(ModelCacheSpec((FULL,)), blocks, [0, 0, 0]) == 0
