"""What a pass takes for a moment is expected, and waits where there is no room for it."""

from __future__ import annotations

import pytest

from semantic.application.engine.memory_guard import Memory, MemoryGuard, StepMemory
from semantic.domain.value_objects import ModelCacheSpec
from tests.unit.application.world import SPECS, World, expected, text_of

MIB = 1 << 20


def attention(n_tokens: int, context: int) -> int:
    """Bytes of a pass whose scores are materialised, beside activations."""
    return n_tokens * (40_000 + 32 * 4 * context)


def test_nothing_is_expected_before_the_first_pass_nor_learned_from_what_is_not_measured() -> None:
    of = StepMemory()
    of.observe(64, 64, 0)
    assert of.expected(512, 4096) == 0


@pytest.mark.parametrize("start", [0, 5000, 100_000])
def test_each_pass_of_a_long_prompt_is_expected_to_take_what_it_takes(start: int) -> None:
    of = StepMemory()
    of.observe(64, start + 64, attention(64, start + 64))
    context = start + 64
    while context < start + 50_000:
        n_tokens = 512
        context += n_tokens
        expected, taken = of.expected(n_tokens, context), attention(n_tokens, context)
        assert taken <= 1.05 * expected
        assert expected <= 3 * taken or context < 2048
        of.observe(n_tokens, context, taken)


def test_the_fixed_part_of_a_small_pass_is_soon_none_of_larger_ones() -> None:
    of = StepMemory()
    of.observe(16, 4000, 60 * MIB)
    for _ in range(24):
        of.observe(512, 4000, 70 * MIB)
    assert of.expected(512, 4000) <= 80 * MIB


def test_a_short_pass_after_a_long_one_shows_nothing_new() -> None:
    of = StepMemory()
    of.observe(2048, 4000, 800 * MIB)
    of.observe(1, 4000, 200 * MIB)
    assert of.expected(2048, 4000) == 800 * MIB
    of.observe(1, 4000, 900 * MIB)
    assert of.expected(2, 4000) == 1800 * MIB


def test_only_a_similar_pass_is_a_measurement() -> None:
    of = StepMemory()
    of.observe(8, 8, 200 * MIB)
    assert not of.is_measured(8, 16)
    assert not of.is_measured(64, 15)
    assert of.is_measured(32, 15)


def guard(limit: int, used: int, cache: int, kept: int = 0) -> tuple[MemoryGuard, list[int]]:
    held = [cache]

    def free(n_bytes: int) -> bool:
        freed = min(n_bytes, held[0])
        held[0] -= freed
        return bool(freed)

    memory = Memory(lambda: used + held[0], lambda: None, kept=lambda: kept)
    made = MemoryGuard(limit, memory, clock=lambda: 0.0, report=lambda _: None)
    made.add("cache", free)
    return made, held


def test_caches_are_given_up_for_what_a_pass_takes_before_it_begins() -> None:
    of, held = guard(1600, used=600, cache=700)
    assert (of.room(20), held) == (20, [700]), "as little as that is always free"
    assert (of.room(200), held) == (200, [700])
    assert (of.room(500), held) == (500, [450])
    assert (of.room(5000), held) == (950, [0]), "what there is, without half of a part"


def test_what_the_framework_would_use_again_is_room() -> None:
    of, held = guard(1600, used=600, cache=700, kept=300)
    assert (of.room(500), held) == (500, [700])


def test_a_guess_of_what_a_pass_takes_frees_no_cache() -> None:
    of, held = guard(1600, used=600, cache=700)
    assert (of.room(5000, frees=False), held) == (250, [700])


def test_the_first_long_prompt_after_a_short_one_gives_up_no_cache() -> None:
    of = World(ModelCacheSpec(SPECS["full"]), total_blocks=200)
    held = [1 << 29]

    def free(_: int) -> bool:
        held[0] = 0
        return True

    memory = Memory(lambda: held[0], lambda: None)
    made = MemoryGuard(1 << 30, memory, clock=of.clock, report=print)
    made.add("cache", free)
    of.engine.keep_within(made)
    passes: list[int] = []
    observe = of.engine._scheduler._memory.observe

    def passed(n_tokens: int, context: int, n_bytes: int) -> None:
        passes.append(n_tokens)
        observe(n_tokens, context, max(n_bytes, 64 * MIB + 4000 * n_tokens))

    of.engine._scheduler._memory.observe = passed  # type: ignore[method-assign]
    for prompt in (text_of(1, 8), text_of(2, 3000), text_of(3, 3000)):
        of.engine.submit("a", prompt, max_tokens=2)
        list(of.engine.step())
    assert held == [1 << 29]
    assert len(passes) < 40


def test_a_prompt_has_shorter_chunks_or_waits_where_there_is_no_room_and_says_the_same() -> None:
    spec = ModelCacheSpec(SPECS["full"])
    of = World(spec, total_blocks=200)
    used = [0]
    made = MemoryGuard(1 << 20, Memory(lambda: used[0], lambda: None), clock=of.clock, report=print)
    of.engine.keep_within(made)
    sizes: list[int] = []
    observe = of.engine._scheduler._memory.observe

    def passed(n_tokens: int, context: int, n_bytes: int) -> None:
        sizes.append(n_tokens)
        observe(n_tokens, context, n_bytes or 4000 * n_tokens)

    of.engine._scheduler._memory.observe = passed  # type: ignore[method-assign]
    prompts = {"a": text_of(1, 20), "b": text_of(2, 1500), "c": text_of(3, 900)}
    of.engine.submit("b", prompts["b"], max_tokens=40)
    for _ in range(4):
        of.engine.step_once()
    assert max(sizes) > 32
    used[0] = (1 << 20) - (1 << 15) - 80_000  # for 20 tokens
    of.engine.submit("c", prompts["c"], max_tokens=9)
    for _ in range(6):
        of.engine.step_once()
    assert 16 <= max(sizes[-3:]) <= 20
    of.engine.submit("a", prompts["a"], max_tokens=60)
    used[0] = 1 << 20
    done = {one.agent_id: one for one in of.engine.step()}
    for agent, end in done.items():
        assert end.tokens == expected(spec, prompts[agent], len(end.tokens)).tokens
    assert done.keys() == prompts.keys()
