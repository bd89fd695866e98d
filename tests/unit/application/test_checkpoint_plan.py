"""Where a prompt takes checkpoints: few, at positions from which others continue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.cache.checkpoint_plan import (
    FEWEST_TOKENS,
    MOST_TOKENS,
    Distances,
    Junctions,
    checkpoint_bytes,
    checkpoint_positions,
    distances,
)
from semantic.domain.value_objects import BLOCK_TOKENS, LayerKind, LayerSpec, ModelCacheSpec

FULL = LayerSpec(LayerKind.FULL, kv_heads=8, k_head_dim=128, v_head_dim=128, itemsize=2)


def window(tokens: int) -> LayerSpec:
    return LayerSpec(
        LayerKind.SLIDING_WINDOW,
        kv_heads=8,
        k_head_dim=128,
        v_head_dim=128,
        itemsize=2,
        window=tokens,
    )


def state(n_bytes: int) -> LayerSpec:
    return LayerSpec(LayerKind.STATE, state_bytes=n_bytes)


@pytest.mark.parametrize(
    ("layers", "distance", "at_end"),
    [
        ((FULL, window(128)), 256, 64),  # as gpt-oss
        ((FULL, *[window(1024)] * 5), MOST_TOKENS, 64),  # as Gemma 3
        ((FULL, *[state(3 << 20)] * 3), 4096, 512),  # as Qwen3-Next: 2,304 tokens of its KV
        ((FULL, state(1 << 10)), 256, 64),
        ((state(1 << 20),), 512, 64),
        ((window(512),), 256, 64),
    ],
)
def test_checkpoints_are_as_dense_as_their_bytes_allow(
    layers: tuple[LayerSpec, ...], distance: int, at_end: int
) -> None:
    spec = ModelCacheSpec(layers)
    assert distances(spec, best_chunk=512) == Distances(distance, at_end)
    taken = checkpoint_bytes(spec, distance)
    between = sum(one.bytes_per_block for one in layers if one.kind is LayerKind.FULL)
    assert distance == MOST_TOKENS or not between or taken <= between * distance // BLOCK_TOKENS


def test_the_grid_divides_a_chunk_once_at_most() -> None:
    assert distances(ModelCacheSpec((FULL, state(1))), best_chunk=2048) == Distances(1024, 64)


def positions(n: int, start: int = 0, *junctions: int, distance: int = 256) -> tuple[int, ...]:
    return checkpoint_positions(
        n, start=start, end=n - 1, apart=Distances(distance, 64), junctions=junctions
    )


def test_a_prompt_has_checkpoints_on_the_grid_and_before_its_generation_prompt() -> None:
    assert positions(700) == (256, 512, 684)


def test_a_junction_is_exact_and_replaces_the_grid_beside_it() -> None:
    assert positions(1000, 0, 530) == (256, 530, 768, 984)


def test_a_junction_at_the_end_leaves_two_tokens() -> None:
    assert positions(1000, 900, 998) == (984, 997)
    assert positions(1000, 900, 999) == (984, 999)


@given(
    n=st.integers(1, 5000),
    start=st.integers(0, 5000),
    distance=st.sampled_from([256, 1024, 4096]),
    junctions=st.lists(st.integers(0, 6000), max_size=5),
)
def test_positions_are_ahead_in_order_and_leave_no_single_token(
    n: int, start: int, distance: int, junctions: list[int]
) -> None:
    found = positions(n, start, *junctions, distance=distance)
    assert list(found) == sorted(set(found))
    assert all(start + FEWEST_TOKENS <= one <= n - 1 for one in found)
    assert n - 2 not in found
    exact = {one for one in junctions if start + FEWEST_TOKENS <= one <= n - 1 and one != n - 2}
    assert exact <= set(found)
    most = max(0, n - start) // distance + len(junctions) + 2
    assert len(found) <= most


LARGE = ModelCacheSpec((FULL, state(3 << 20)))


def chosen(shared: list[int], n_checkpoints: int, spec: ModelCacheSpec = LARGE) -> tuple[int, ...]:
    """The junctions of a prompt of 5,000 tokens, with bytes for so many checkpoints."""
    junctions = Junctions(spec, distances(spec, best_chunk=512))
    budget = n_checkpoints * junctions.bytes_at(4351, 0)
    positions, n_bytes = junctions.choose(shared, start=0, end=4999, budget=budget)
    before = (0, *positions)
    assert sum(map(junctions.bytes_at, positions, before)) <= n_bytes <= budget
    return positions


def test_all_junctions_that_the_bytes_suffice_for_are_kept() -> None:
    assert chosen([700, 900, 900, 40, 5000], 2) == (700, 900)


def test_junctions_that_save_others_most_tokens_are_kept() -> None:
    assert chosen([700, 4000, 800, 4001], 1) == (4000,)
    assert chosen([*[700] * 9, 4000, 800, 4001], 1) == (700,)
    assert chosen([*[700] * 9, 4000, 800, 4001], 2) == (700, 4000)
    assert chosen([700, 800, 900], 0) == ()
    assert chosen([*[700] * 9, *range(701, 760)], 4) == (700,)  # others are beside it


@given(
    shared=st.lists(st.integers(0, 5000), max_size=40),
    n=st.integers(0, 5),
    width=st.sampled_from([1, 200, 256, 600, 5000]),
)
def test_junctions_take_no_more_bytes_than_they_may(shared: list[int], n: int, width: int) -> None:
    for spec in (LARGE, ModelCacheSpec((FULL, window(width))), ModelCacheSpec((window(width),))):
        chosen(shared, n, spec)
