"""Prompts that are scored: computed as a whole, in chunks of their own, each entry once."""

from __future__ import annotations

import pytest

from semantic.adapters.stores.memory import MemoryStore
from semantic.domain.value_objects import ModelCacheSpec, SamplingParams, TokenLogprob
from tests.unit.application.world import SPECS, Done, World, completions, expected, text_of, world

SCORED = SamplingParams(prompt_logprobs=2)
Scores = tuple[TokenLogprob | None, ...]


def run(of: World, agent: str, prompt: tuple[int, ...], n: int = 4) -> Done:
    uid = of.engine.submit(agent, prompt, max_tokens=n, sampling=SCORED)
    (done,) = [one for one in of.finish() if one.uid == uid]
    assert done.tokens == expected(of.spec, prompt, n).tokens
    return done


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("n", [1, 2, 255, 600])
def test_there_is_an_entry_for_each_token(kind: str, n: int) -> None:
    prompt = text_of(1, n)
    done = run(world(kind), "ann", prompt)
    first, *others = done.prompt_logprobs
    assert first is None
    assert [one.token for one in others if one is not None] == list(prompt[1:])
    assert done.cached_tokens == 0


@pytest.mark.parametrize("kind", SPECS)
def test_nothing_is_read_and_the_figures_are_the_same(kind: str) -> None:
    prompt = text_of(2, 700)
    first = run(world(kind), "ann", prompt).prompt_logprobs
    spec = ModelCacheSpec(SPECS[kind])
    store = MemoryStore(1 << 30)
    for largest in (16, 100, 256):
        of = World(spec, 400, largest_chunk=largest, prefix_store=store)
        for agent in ("ann", "ann", "ben"):
            before = of.backend.prefilled_tokens
            assert run(of, agent, prompt).prompt_logprobs == first
            assert of.backend.prefilled_tokens - before == len(prompt) - 1
        assert of.backend.calls["restore"] == of.backend.calls["loading"] == 0


def test_what_was_scored_serves_others() -> None:
    prompt = text_of(3, 700)
    of = world()
    done = run(of, "ann", prompt)
    of.engine.submit("ann", (*prompt, *done.tokens, 5), max_tokens=3)
    (again,) = of.finish()
    assert again.cached_tokens == 704
    assert again.prompt_logprobs == ()


def test_a_preemption_while_scoring_neither_loses_nor_doubles_entries() -> None:
    spec = ModelCacheSpec(SPECS["full"])
    prompt = text_of(4, 1200)
    first = run(world(), "x", prompt).prompt_logprobs
    of = World(spec, 7 * spec.n_layers, largest_chunk=128)
    for i in (5, 6):
        of.engine.submit(f"a{i}", text_of(i, 249), max_tokens=300)
    last = of.engine.submit("z", prompt, max_tokens=4, sampling=SCORED)
    done: list[Done] = []
    scored = 0
    while of.engine.has_work:
        preempted = of.engine.preemptions
        done += completions(of.engine.step_once())
        if of.engine.preemptions > preempted:
            scored = of.backend.calls["score"]
            assert 0 < scored < 10, "it was to be preempted in the middle"
    assert scored
    (one,) = [one for one in done if one.uid == last]
    assert one.prompt_logprobs == first
    assert of.backend.calls["score"] == scored + 10


def test_a_prompt_that_was_not_scored_to_its_end_has_no_entries() -> None:
    of = world()
    uid = of.engine.submit("ann", text_of(5, 700), max_tokens=4, sampling=SCORED)
    of.engine.step_once()
    of.engine.cancel(uid)
    (done,) = of.finish()
    assert done.finish_reason == "cancelled"
    assert done.prompt_logprobs == ()


def test_a_prompt_that_cannot_be_scored_fails_alone() -> None:
    of = world()
    first = of.engine.submit("ann", text_of(6, 300), max_tokens=4, sampling=SCORED)
    second = of.engine.submit("ben", text_of(7, 300), max_tokens=4)
    of.backend.fail_next("score")
    done = {one.uid: one for one in of.finish()}
    assert done[first].finish_reason == "error"
    assert done[second].tokens == expected(of.spec, text_of(7, 300), 4).tokens


def test_an_answer_goes_on_behind_end_tokens_when_asked() -> None:
    spec = ModelCacheSpec(SPECS["full"])
    prompt = text_of(8, 20)
    whole = expected(spec, prompt, 200).tokens
    of = World(spec, eos=frozenset({whole[5]}))
    of.engine.submit("ann", prompt, max_tokens=200)
    of.engine.submit("ben", prompt, max_tokens=200, sampling=SamplingParams(ignore_eos=True))
    done = {one.agent_id: one for one in of.finish()}
    assert (len(done["ann"].tokens), done["ann"].finish_reason) == (
        whole.index(whole[5]) + 1,
        "stop",
    )
    assert (done["ben"].tokens, done["ben"].finish_reason) == (whole, "length")


def test_the_stop_string_is_told() -> None:
    spec = ModelCacheSpec(SPECS["full"])
    of = World(spec)
    prompt = text_of(9, 20)
    text = "".join(chr(32 + token) for token in expected(spec, prompt, 50).tokens)
    stop = text[10:13]
    of.engine.submit("ann", prompt, max_tokens=50, sampling=SamplingParams(stop=("~~~~", stop)))
    (done,) = of.finish()
    assert (done.finish_reason, done.stop_string) == ("stop", stop)
    of.engine.submit("ben", prompt, max_tokens=5)
    (done,) = of.finish()
    assert done.stop_string is None
