"""What the experiments compute with is right: a verdict is only as good as its yardstick.

Only shapes of a few kilobytes here; the experiments themselves are run by hand.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from experiments import subjects
from experiments.exp_001_model_specs.comparing import Reading, differences, expected_layer
from experiments.exp_001_model_specs.configurations import CONFIGURATIONS, EXPECTED
from experiments.exp_002_allocation import run as allocation
from experiments.exp_004_extraction import files
from experiments.exp_005_correctness.detokenizers import difference, ours
from experiments.exp_006_gather import ways
from experiments.exp_006_gather.layouts import (
    Token,
    all_full,
    gemma,
    layer_caches,
    neighbours,
    scattered,
)
from experiments.exp_006_gather.scaling import fit
from experiments.exp_006_gather.timing import compare, in_turns, keyed, number
from semantic.adapters.mlx.kv_cache.contiguous.cache import SequenceCache
from semantic.domain.errors import ModelNotFoundError
from semantic.domain.services import BlockPool

TOKEN = Token(2, 4, mx.float32)


def reading_of(name: str) -> Reading:
    expected = EXPECTED[name]
    n_layers = expected.full_layers + expected.window_layers
    layers = tuple(expected_layer(expected, i) for i in range(n_layers))
    return Reading(layers, 0.0, 0, 0, 0, 0)


# --- EXP-001 ----------------------------------------------------------------------------------


def test_every_configuration_has_an_expectation() -> None:
    assert CONFIGURATIONS.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_known_of_a_model_agrees_with_itself(name: str) -> None:
    assert list(differences(name, EXPECTED[name], reading_of(name))) == []


def test_a_layer_read_wrong_is_named() -> None:
    name = "Llama 3.1 8B"
    right = reading_of(name)
    wrong = replace(right, layers=(replace(right.layers[0], kv_heads=4), *right.layers[1:]))
    first, *rest = differences(name, EXPECTED[name], wrong)
    assert first.startswith("Llama 3.1 8B: layer 0 is")
    assert rest == ["Llama 3.1 8B: 129024 bytes per token, expected 131072"]


# --- EXP-002 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", allocation.CASES.values())
def test_a_timed_cycle_leaves_the_pool_as_it_was(counts: list[int]) -> None:
    pool = allocation.crowded_pool(1)
    before = pool.used_blocks
    times = list(allocation.timed_cycles(pool, counts, warmup=1, cycles=2))
    assert len(times) == 2
    assert pool.used_blocks == before
    pool.check_integrity()


# --- EXP-004 ----------------------------------------------------------------------------------


def test_an_agent_survives_its_file_bit_for_bit(tmp_path: Path) -> None:
    layout = gemma(1024)
    agent = neighbours(layout, TOKEN)
    agent.token_ids = tuple(range(layout.context))
    path = tmp_path / "agent.safetensors"
    files.save(path, agent)
    pool = BlockPool(layout.spec(TOKEN), total_blocks=layout.n_blocks)
    loaded = files.load(path, pool)
    assert files.digest(loaded) == files.digest(agent)
    assert loaded.token_ids == agent.token_ids
    assert [b.start for b in loaded.all_blocks()] == [b.start for b in agent.all_blocks()]
    assert pool.view("agent").n_blocks == layout.n_blocks


# --- EXP-005 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ("a fox", "a fox", "none"),
        ("a fox", " a fox", "a leading space is missing"),
        (" a fox", "a fox", "other"),
        ("", "x", "other"),
    ],
)
def test_a_difference_of_texts_is_named(left: str, right: str, found: str) -> None:
    assert difference(left, right) == found


def test_our_detokenizer_is_asked_token_by_token() -> None:
    class Bytes:
        detokenizer = None

        def decode(self, token_ids: list[int]) -> str:
            return bytes(token_ids).decode("utf-8", "replace")

    text = "  naïve 🦊 "
    assert ours(Bytes(), list(text.encode())) == text  # type: ignore[arg-type]


# --- EXP-006 ----------------------------------------------------------------------------------


def test_the_plans_shapes_have_the_blocks_that_are_claimed() -> None:
    assert all_full(48, 32).n_blocks == 1536
    assert gemma(8192).n_blocks == 416
    assert gemma(8192, window_blocks=5).n_blocks == 456
    assert Token(8, 256, mx.bfloat16).block_bytes * 416 == pytest.approx(0.872e9, rel=1e-3)


@pytest.mark.parametrize("make", [scattered, neighbours])
def test_restored_caches_hold_the_blocks_tokens_in_order(make: object) -> None:
    layout = all_full(2, 3)
    agent = make(layout, TOKEN)  # type: ignore[operator]
    caches = layer_caches(layout, TOKEN).restored(
        agent, layout.context, layout.context + 256, exclusive=False
    )
    for cache in caches:
        assert isinstance(cache, SequenceCache)
        k, v = cache.buffer.read(0, layout.context)
        assert k[0, 1, :, 3].tolist() == list(range(768))
        assert (k == -v).all().item()


def test_the_plans_way_gives_what_ours_gives() -> None:
    layout = gemma(2048)
    plan = ways.per_layer(layout, TOKEN)()
    assert isinstance(plan, list)
    caches = ways.gather(layout, TOKEN)()
    assert isinstance(caches, list)
    for (k, v), cache in zip(plan, caches, strict=True):
        assert mx.array_equal(k, cache.buffer.k[..., : k.shape[2], :]).item()
        assert mx.array_equal(v, cache.buffer.v[..., : v.shape[2], :]).item()


def test_taking_over_moves_no_bytes_and_copying_moves_all() -> None:
    layout = gemma(2048, window_blocks=5)
    agent = neighbours(layout, TOKEN)
    makes = layer_caches(layout, TOKEN)
    taken = makes.restored(agent, layout.context, layout.context, exclusive=True)
    assert ways.bytes_moved(taken, agent) == 0
    copied = makes.restored(agent, layout.context, layout.context + 256, exclusive=False)
    assert ways.bytes_moved(copied, agent) == (layout.n_blocks + 8) * TOKEN.block_bytes


@pytest.mark.parametrize("name", ways.WAYS)
def test_every_way_can_be_taken_twice(name: str) -> None:
    way = ways.WAYS[name](gemma(1024), TOKEN)
    way()
    way()


def test_growing_makes_larger_arrays_in_every_turn() -> None:
    layout = all_full(2, 3)
    way = ways.grow(layout, TOKEN)
    grown = []
    for _ in range(2):
        caches = way()
        assert isinstance(caches, list)
        grown.append(caches[0].buffer.k)
    assert [k.shape[2] for k in grown] == [layout.context + 256] * 2
    assert grown[0] is not grown[1]


def test_ways_take_turns_and_the_first_call_is_kept_apart() -> None:
    calls: list[str] = []
    times = in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, 1)
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3}


def test_a_ratio_is_against_the_fastest_plain_copy() -> None:
    times = {"slow, copy": [99.0, 4.0, 4.0], "fast copy": [99.0, 2.0, 2.0], "way": [9.0, 3.0, 3.0]}
    lines = compare(times, 10**6, ["slow, copy", "fast copy"])
    assert number(lines["way"], "ratio") == 1.5
    assert number(lines["way"], "first_ms") == 9.0
    assert set(keyed(lines)) == {"slow_copy", "fast_copy", "way"}


def test_a_straight_line_is_recognised() -> None:
    line = fit([1, 2, 3, 4], [5, 7, 9, 11])
    assert (line.slope, line.intercept, line.r_squared) == pytest.approx((2, 3, 1))
    assert fit([1, 2, 3, 4], [5, 0, 9, 2]).r_squared < 0.1
    assert math.isclose(fit([1, 2, 3], [4, 4, 4]).r_squared, 1.0)


# --- subjects ---------------------------------------------------------------------------------


def test_a_missing_model_is_a_reason_and_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(subjects.FOLDER_VARIABLE, str(tmp_path))
    reason = subjects.why_missing("stories260K")
    assert reason is not None
    assert subjects.FOLDER_VARIABLE in reason
    with pytest.raises(ModelNotFoundError, match="stories260K is not here"):
        subjects.load("stories260K")
    assert subjects.why_missing("smollm2-135m-shape") is None
