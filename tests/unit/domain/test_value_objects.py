"""Sizes, specs and parameters: arithmetic that everything else relies on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.domain.errors import InvalidRequestError
from semantic.domain.value_objects import (
    BLOCK_TOKENS,
    CacheKey,
    CompletedGeneration,
    LayerKind,
    LayerSpec,
    ModelCacheSpec,
    PoolView,
    SamplingParams,
    whole_blocks,
)

WINDOWS = (1, 16, 128, 255, 256, 257, 300, 511, 512, 1024, 4096)
MOST_BLOCKS = (1, 1, 1, 2, 2, 2, 2, 3, 3, 5, 17)


def full(kv_heads: int = 2, k_head_dim: int = 8, v_head_dim: int = 8) -> LayerSpec:
    return LayerSpec(LayerKind.FULL, kv_heads, k_head_dim, v_head_dim, itemsize=2)


def sliding(size: int) -> LayerSpec:
    return LayerSpec(LayerKind.SLIDING_WINDOW, 1, 4, 4, itemsize=2, window=size)


@pytest.mark.parametrize(
    ("tokens", "rounded"),
    [(0, 0), (1, 256), (255, 256), (256, 256), (257, 512), (512, 512), (513, 768)],
)
def test_tokens_are_rounded_up_to_whole_blocks(tokens: int, rounded: int) -> None:
    assert whole_blocks(tokens) == rounded


# Layers


@pytest.mark.parametrize(("size", "most"), list(zip(WINDOWS, MOST_BLOCKS, strict=True)))
def test_a_window_owns_no_more_than_it_needs(size: int, most: int) -> None:
    layer = sliding(size)
    assert layer.max_blocks == most
    assert [layer.blocks_for(n) for n in (0, 1, 256)] == [0, 1, 1]
    assert layer.blocks_for(1_000_000) == most


@given(st.integers(1, 20_000))
def test_a_window_leaves_half_a_block_of_room_and_wastes_no_block(size: int) -> None:
    most = sliding(size).max_blocks
    assert most is not None
    assert most * BLOCK_TOKENS - size >= BLOCK_TOKENS // 2
    assert (most - 1) * BLOCK_TOKENS - size < BLOCK_TOKENS // 2


@given(st.integers(1, 5000), st.integers(0, 20_000))
def test_a_longer_sequence_never_needs_fewer_blocks(size: int, tokens: int) -> None:
    for layer in (full(), sliding(size), LayerSpec(LayerKind.STATE, state_bytes=7)):
        assert layer.blocks_for(tokens) <= layer.blocks_for(tokens + 1)
        assert layer.blocks_for(tokens) * BLOCK_TOKENS >= min(
            tokens, layer.window or tokens, tokens if layer.max_blocks is None else BLOCK_TOKENS
        )


def test_a_full_layer_grows_with_the_sequence() -> None:
    assert full().max_blocks is None
    assert [full().blocks_for(n) for n in (0, 1, 256, 257, 2560)] == [0, 1, 1, 2, 10]


def test_a_state_is_one_block_however_long_the_sequence() -> None:
    layer = LayerSpec(LayerKind.STATE, state_bytes=1000)
    assert (layer.max_blocks, layer.bytes_per_block) == (1, 1000)
    assert [layer.blocks_for(n) for n in (0, 1, 256, 100_000)] == [0, 1, 1, 1]


def test_a_growing_state_is_counted_per_block() -> None:
    layer = LayerSpec(LayerKind.STATE, state_bytes=1000, state_grows=True)
    assert layer.max_blocks is None
    assert layer.blocks_for(257) == 2


def test_bytes_of_a_block_are_keys_and_values_of_256_tokens() -> None:
    layer = LayerSpec(LayerKind.FULL, kv_heads=3, k_head_dim=16, v_head_dim=8, itemsize=4)
    assert layer.bytes_per_block == 3 * (16 + 8) * 4 * 256


@pytest.mark.parametrize("kind", [LayerKind.FULL, LayerKind.STATE])
def test_only_a_window_layer_has_a_window(kind: LayerKind) -> None:
    with pytest.raises(ValueError, match="window=8"):
        LayerSpec(kind, window=8)


@pytest.mark.parametrize(("size", "message"), [(None, "window=None"), (0, "got 0"), (-1, "got -1")])
def test_a_window_layer_needs_a_window_of_at_least_one_token(
    size: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LayerSpec(LayerKind.SLIDING_WINDOW, window=size)


# Models


def test_alternating_layer_types_of_a_mixture_of_experts_are_handled() -> None:
    spec = ModelCacheSpec(
        tuple(sliding(128) if i % 2 else full(kv_heads=8, k_head_dim=64) for i in range(24))
    )
    assert spec.layer_types == ("global", "sliding_window") * 12
    assert spec.n_layers == 24
    assert (spec.n_kv_heads, spec.head_dim) == (8, 64)
    assert spec.blocks_for(8192) == (32, 1) * 12
    assert spec.bytes_for(8192) == 12 * (32 * spec.bytes_per_block(0) + 1 * spec.bytes_per_block(1))


def test_a_model_has_at_least_one_layer() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        ModelCacheSpec(())


class SelfDescribing:
    """A model object that says what it caches."""

    def cache_spec(self) -> ModelCacheSpec:
        return ModelCacheSpec((full(),))


@pytest.fixture
def no_readers() -> Iterator[None]:
    kept = list(ModelCacheSpec.readers)
    ModelCacheSpec.readers.clear()
    yield
    ModelCacheSpec.readers[:] = kept


@pytest.mark.usefixtures("no_readers")
def test_a_model_that_describes_itself_needs_no_reader() -> None:
    assert ModelCacheSpec.from_model(SelfDescribing()) == ModelCacheSpec((full(),))


@pytest.mark.usefixtures("no_readers")
def test_the_first_reader_that_knows_a_bare_model_reads_it() -> None:
    known = ModelCacheSpec((sliding(3),))
    ModelCacheSpec.readers += [lambda _: None, lambda model: known if model == "bare" else None]
    assert ModelCacheSpec.from_model("bare") == known


@pytest.mark.usefixtures("no_readers")
def test_what_nobody_can_read_is_refused_by_its_type() -> None:
    with pytest.raises(InvalidRequestError, match="got dict"):
        ModelCacheSpec.from_model({})


# Sampling

INF = math.inf
NAN = math.nan


@pytest.mark.parametrize("value", [-0.1, INF, -INF, NAN])
def test_a_wrong_temperature_is_named(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize("value", [-0.1, 1.1, INF, NAN])
def test_a_wrong_top_p_is_named(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="top_p"):
        SamplingParams(top_p=value)


@pytest.mark.parametrize("value", [-0.1, 1.1, INF, NAN])
def test_a_wrong_min_p_is_named(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="min_p"):
        SamplingParams(min_p=value)


def test_a_wrong_top_k_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="top_k"):
        SamplingParams(top_k=-1)


@pytest.mark.parametrize("value", [0.0, -1.0, INF, NAN])
def test_a_wrong_repetition_penalty_is_named(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=value)


@pytest.mark.parametrize("value", [0, -5])
def test_a_wrong_repetition_context_is_named(value: int) -> None:
    with pytest.raises(InvalidRequestError, match="repetition_context"):
        SamplingParams(repetition_context=value)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_a_wrong_logit_bias_is_named(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        SamplingParams(logit_bias={1: 0.5, 2: value})


@pytest.mark.parametrize("value", [-1, 2**63])
def test_a_wrong_seed_is_named(value: int) -> None:
    with pytest.raises(InvalidRequestError, match="seed"):
        SamplingParams(seed=value)


@pytest.mark.parametrize("value", [("",), ("a", "")])
def test_an_empty_stop_string_is_named(value: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="stop"):
        SamplingParams(stop=value)


def test_a_single_string_is_not_taken_for_its_characters() -> None:
    text = cast("tuple[str, ...]", "END")
    with pytest.raises(InvalidRequestError, match="stop"):
        SamplingParams(stop=text)


def test_a_wrong_number_of_logprobs_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="logprobs"):
        SamplingParams(logprobs=-1)


def test_the_ends_of_every_range_are_allowed() -> None:
    params = SamplingParams(
        temperature=0.0,
        top_p=1.0,
        min_p=1.0,
        top_k=0,
        repetition_penalty=1e-9,
        repetition_context=1,
        logit_bias={0: -1e9},
        seed=2**63 - 1,
        stop=("x",),
        logprobs=0,
    )
    assert params.greedy
    assert SamplingParams(seed=0, top_p=0.0).seed == 0


def test_any_temperature_above_zero_samples() -> None:
    assert not SamplingParams(temperature=1e-6).greedy


# Small values


def test_two_models_never_share_a_cache_key() -> None:
    assert CacheKey("a", "x") != CacheKey("b", "x")
    assert len({CacheKey("a", "x"), CacheKey("a", "x"), CacheKey("a", "y")}) == 2


def test_a_view_sums_its_layers() -> None:
    assert PoolView("a", (3, 0, 2), 99).n_blocks == 5


def test_generated_tokens_are_counted_with_the_end_token() -> None:
    done = CompletedGeneration("u", "a", "hi", (5, 6, 0), "stop", 4, 1)
    assert done.generated_tokens == 3
