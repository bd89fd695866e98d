"""What the engine promises in `GenerationEnginePort`, on a fake model that notices everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.engine.submission import Submission
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.errors import (
    CacheReconstructionError,
    IntegrityError,
    InvalidRequestError,
    PoolExhaustedError,
    SemanticError,
)
from semantic.domain.identity import Hints
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import ModelCacheSpec, PrefillEvent, SamplingParams, TokenEvent
from tests.support.char_tokenizer import CharTokenizer
from tests.support.fake_backend import FULL, STATE, FakeBackend
from tests.support.pools import available, holders
from tests.unit.application.world import (
    EOS,
    SPECS,
    VARIANTS,
    Done,
    World,
    completions,
    expected,
    text_of,
    world,
)

LONG = 40


# Construction


def test_model_pool_and_spec_must_describe_the_same_cache() -> None:
    ours, other = ModelCacheSpec((FULL,)), ModelCacheSpec((FULL, STATE))
    tokenizer = CharTokenizer()
    for model, of, spec in [(ours, other, ours), (other, ours, ours), (ours, ours, other)]:
        with pytest.raises(InvalidRequestError, match="same cache"):
            BlockPoolBatchEngine(FakeBackend(model), tokenizer, BlockPool(of, 9), spec)


def test_a_batch_has_room_for_at_least_one() -> None:
    with pytest.raises(InvalidRequestError, match="max_batch must be at least 1, got 0"):
        world(max_batch=0)


def test_an_engine_needs_no_more_than_model_tokenizer_pool_and_spec() -> None:
    spec = ModelCacheSpec(SPECS["window"])
    pool = BlockPool(spec, 20)
    engine = BlockPoolBatchEngine(FakeBackend(spec), CharTokenizer(), pool, spec)
    prompt = CharTokenizer().encode("The quick brown fox")
    engine.submit("agent_1", "The quick brown fox", max_tokens=8)
    (done,) = engine.step()
    assert done.tokens[:3] == expected(spec, prompt, 3).tokens


# Answers


@pytest.mark.parametrize("kind", sorted(SPECS))
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_an_answer_is_the_models_own(kind: str, variant: int) -> None:
    of = world(kind)
    for n in (1, 2, 255, 256, 257, 600):
        prompt = text_of(1, n)
        of.engine.submit("a", prompt, None, LONG, sampling=VARIANTS[variant])
        (done,) = of.finish()
        answer = expected(of.spec, prompt, LONG, variant)
        assert (done.tokens, done.text, done.finish_reason) == (
            answer.tokens,
            answer.text,
            answer.reason,
        )


def test_text_and_token_ids_ask_the_same() -> None:
    of = world()
    of.engine.submit("a", "Hello there", None, 6)
    of.engine.submit("b", CharTokenizer().encode("Hello there"), None, 6)
    first, second = of.finish()
    assert first.tokens == second.tokens
    assert first.text == second.text


def test_an_end_token_ends_the_answer_and_is_not_in_its_text() -> None:
    for variant in range(len(VARIANTS)):
        of = World(ModelCacheSpec(SPECS["full"]), eos=EOS)
        of.engine.submit("a", text_of(2, 9), None, 400, sampling=VARIANTS[variant])
        (done,) = of.finish()
        answer = expected(of.spec, text_of(2, 9), 400, variant, eos=EOS)
        assert (done.tokens, done.text) == (answer.tokens, answer.text)
        assert done.finish_reason == "stop"


def test_two_requests_share_the_batch_and_return_every_block() -> None:
    of = world()
    first = text_of(0, 20)
    second = text_of(50, 30)
    of.engine.submit("a", first, None, LONG)
    of.engine.submit("b", second, None, LONG)
    done = {one.agent_id: one for one in of.finish()}
    assert done["a"].tokens == expected(of.spec, first, LONG).tokens
    assert done["b"].tokens == expected(of.spec, second, LONG).tokens
    assert of.backend.calls["decode"] <= LONG + 2
    of.forget_all()
    assert of.pool.used_blocks == 0
    assert of.backend.held_bytes == 0


def test_every_request_has_a_uid_of_its_own() -> None:
    of = world()
    uids = [of.engine.submit("a", [1, 2], None, 1) for _ in range(10)]
    assert len(set(uids)) == 10
    assert sorted(done.uid for done in of.finish()) == sorted(uids)


def test_log_probabilities_come_with_each_token() -> None:
    of = world()
    of.engine.submit("a", text_of(0, 9), None, 5, sampling=SamplingParams(logprobs=1))
    events = [event for _ in range(9) for event in of.engine.step_once()]
    (done,) = completions(events)
    told = [event.logprob for event in events if isinstance(event, TokenEvent)]
    assert [one.token for one in done.logprobs] == list(done.tokens)
    assert list(done.logprobs) == told


def test_a_sampled_request_without_a_seed_gets_one_of_its_own() -> None:
    of = world()
    prompt = text_of(0, 9)
    for agent in "abc":
        of.engine.submit(agent, prompt, None, 30, sampling=SamplingParams(temperature=1.0))
    assert len({done.tokens for done in of.finish()}) == 3


# Steps


def test_a_step_is_one_token_for_each_and_one_chunk() -> None:
    of = world(largest_chunk=64)
    running = text_of(0, 9)
    of.engine.submit("a", running, None, LONG)
    while of.backend.calls["decode"] < 2:
        of.engine.step_once()
    of.engine.submit("b", text_of(3, 500), None, 2)
    seen = 0
    while of.backend.calls["start"] != 2:
        events = of.engine.step_once()
        assert [e.agent_id for e in events if isinstance(e, TokenEvent)] == ["a"]
        (chunk,) = [e for e in events if isinstance(e, PrefillEvent)]
        assert (chunk.agent_id, chunk.total) == ("b", 499)
        assert seen < chunk.done <= seen + 64
        seen = chunk.done
    assert seen == 499


def test_a_step_without_work_does_nothing() -> None:
    of = world()
    assert of.engine.step_once() == []
    assert list(of.engine.step()) == []
    assert not of.engine.has_work
    assert of.backend.calls["decode"] == 0


def test_step_yields_each_generation_as_it_completes() -> None:
    of = world()
    lengths = {"a": 30, "b": 3, "c": 12}
    for agent, n in lengths.items():
        of.engine.submit(agent, text_of(0, 9 + n), None, n)
    assert [done.agent_id for done in of.engine.step()] == ["b", "c", "a"]


def test_more_can_be_submitted_between_two_completions() -> None:
    of = world()
    of.engine.submit("a", [1, 2], None, 2)
    answered = []
    for done in of.engine.step():
        answered.append(done.agent_id)
        if len(answered) < 4:
            of.engine.submit(f"then {len(answered)}", [1, 2], None, 2)
    assert answered == ["a", "then 1", "then 2", "then 3"]


def test_a_step_abandoned_and_resumed_loses_no_completion() -> None:
    of = world()
    uids = [of.engine.submit(f"agent {i}", [1, 2, 3], None, 4) for i in range(5)]
    first = next(of.engine.step())
    second = next(of.engine.step())
    assert not of.engine.has_work, "all five end in the same step: three are not yet told"
    rest = list(of.engine.step())
    assert sorted(done.uid for done in (first, second, *rest)) == sorted(uids)


def test_the_texts_of_the_events_are_the_answer() -> None:
    of = world()
    stop = VARIANTS[3]
    for seed in range(12):
        of.engine.submit(f"agent {seed}", text_of(seed, 9), None, 15, sampling=stop)
    events = [event for _ in range(99) for event in of.engine.step_once()]
    done = completions(events)
    assert {one.finish_reason for one in done} == {"stop", "length"}
    for one in done:
        mine = [e for e in events if isinstance(e, TokenEvent) and e.uid == one.uid]
        assert "".join(event.text for event in mine) == one.text
        assert [event.token for event in mine] == list(one.tokens)


def test_a_single_token_is_an_answer() -> None:
    of = world()
    done = of.run("a", [7], max_tokens=1)
    assert (done.finish_reason, done.prompt_tokens, done.generated_tokens) == ("length", 1, 1)


# Reuse


def test_a_conversation_is_never_computed_twice() -> None:
    of = world()
    first = of.run("a", text_of(0, 300), max_tokens=20)
    assert (first.cached_tokens, of.backend.prefilled_tokens) == (0, 299)
    whole = (*text_of(0, 300), *first.tokens)
    second = of.run("a", (*whole, 5, 6, 7), max_tokens=20)
    assert second.cached_tokens == len(whole)
    assert of.backend.prefilled_tokens == 299 + 2


def test_the_same_prompt_again_computes_only_its_last_token() -> None:
    of = world()
    prompt = text_of(0, 300)
    of.run("a", prompt)
    before = of.backend.prefilled_tokens
    assert of.run("a", prompt).cached_tokens == 299
    assert of.backend.prefilled_tokens == before


def test_an_edited_prompt_is_computed_from_the_edit_on() -> None:
    of = world()
    prompt = text_of(0, 600)
    of.run("a", prompt)
    edited = (*prompt[:400], 95, *prompt[401:])
    before = of.backend.prefilled_tokens
    assert of.run("a", edited).cached_tokens == 400
    assert of.backend.prefilled_tokens - before == 599 - 400


def test_a_cache_passed_is_taken_when_it_shares_more() -> None:
    of = world()
    system = text_of(0, 500)
    shared = of.run("a", system)
    of.run("b", text_of(1, 100))
    of.engine.submit("b", (*system, 1, 2, 3), shared.blocks, 5)
    (done,) = of.finish()
    assert done.cached_tokens == 500
    assert done.tokens == expected(of.spec, (*system, 1, 2, 3), 5).tokens


def test_the_kept_cache_is_taken_when_it_shares_more() -> None:
    of = world()
    other = of.run("b", text_of(0, 100))
    of.run("a", text_of(0, 400))
    of.engine.submit("a", text_of(0, 450), other.blocks, 5)
    (done,) = of.finish()
    assert done.cached_tokens == 400


def test_forks_copy_a_cache_and_leave_it_as_it_was() -> None:
    of = world()
    system = text_of(0, 500)
    root = of.run("root", system)
    assert root.blocks is not None
    prompts = {f"fork {i}": (*system, i, i + 1, i + 2) for i in range(4)}
    for agent, prompt in prompts.items():
        of.engine.submit(agent, prompt, root.blocks, 20)
    for done in of.finish():
        assert done.cached_tokens == 500
        assert done.tokens == expected(of.spec, prompts[done.agent_id], 20).tokens
    assert not root.blocks.retired
    assert of.run("root", system).cached_tokens == 499


def test_a_retired_cache_may_be_passed_and_saves_nothing() -> None:
    of = world()
    first = of.run("a", text_of(0, 300))
    of.run("a", text_of(1, 300))
    assert first.blocks is not None
    assert first.blocks.retired
    of.engine.submit("a", text_of(0, 310), first.blocks, 5)
    (done,) = of.finish()
    assert done.cached_tokens == 0
    assert done.tokens == expected(of.spec, text_of(0, 310), 5).tokens


def test_a_cache_whose_blocks_were_freed_saves_nothing() -> None:
    of = world()
    done = of.run("a", text_of(0, 300))
    assert done.blocks is not None
    stale = done.blocks.snapshot()
    of.forget_all()
    for block in stale.all_blocks():
        block.layer_data = None
    of.engine.submit("b", text_of(0, 310), stale, 5)
    (again,) = of.finish()
    assert again.cached_tokens == 0
    assert again.tokens == expected(of.spec, text_of(0, 310), 5).tokens


def test_a_cache_of_another_pool_changes_no_token_here_or_there() -> None:
    here, there = world(), world()
    foreign = there.run("a", text_of(0, 300)).blocks
    here.run("x", text_of(5, 300))
    here.engine.submit("a", text_of(0, 310), foreign, 20)
    edited = (*text_of(0, 100), *text_of(9, 205))
    there.run("a", edited, max_tokens=20)
    (done,) = here.finish()
    assert done.tokens == expected(here.spec, text_of(0, 310), 20).tokens


def test_several_requests_of_one_agent_run_together() -> None:
    of = world()
    of.run("a", text_of(0, 300))
    prompts = [(*text_of(0, 300), 1, 2), text_of(0, 280), text_of(1, 40), text_of(0, 300)]
    uids = {of.engine.submit("a", prompt, None, 25): prompt for prompt in prompts}
    for done in of.finish():
        assert done.tokens == expected(of.spec, uids[done.uid], 25).tokens
    assert of.store.lru_order() == (of.key("a"),)
    of.forget_all()
    assert of.pool.used_blocks == 0


def test_a_cancelled_request_leaves_what_it_computed() -> None:
    of = world(largest_chunk=64)
    uid = of.engine.submit("a", text_of(0, 500), None, 5)
    for _ in range(3):
        of.engine.step_once()
    of.engine.cancel(uid)
    (done,) = of.finish()
    assert done.finish_reason == "cancelled"
    assert done.blocks is not None
    assert 0 < done.blocks.total_tokens == of.backend.prefilled_tokens
    assert of.run("a", text_of(0, 500)).cached_tokens == done.blocks.total_tokens


# Appending


def test_appended_tokens_follow_the_kept_cache() -> None:
    of = world()
    first = of.run("a", text_of(0, 100), max_tokens=9)
    of.engine.submit("a", [8, 9], max_tokens=9, append=True)
    (done,) = of.finish()
    whole = (*text_of(0, 100), *first.tokens, 8, 9)
    assert done.tokens == expected(of.spec, whole, 9).tokens
    assert done.prompt_tokens == len(whole)
    assert done.cached_tokens == len(whole) - 2


def test_appended_tokens_follow_the_cache_passed_rather_than_the_kept() -> None:
    of = world()
    other = of.run("b", text_of(1, 50), max_tokens=3)
    of.run("a", text_of(0, 100))
    of.engine.submit("a", [8, 9], other.blocks, 9, append=True)
    (done,) = of.finish()
    whole = (*text_of(1, 50), *other.tokens, 8, 9)
    assert done.tokens == expected(of.spec, whole, 9).tokens


def test_appending_to_a_retired_cache_computes_it_again() -> None:
    of = world()
    first = of.run("a", text_of(0, 100), max_tokens=3)
    of.run("a", text_of(1, 100))
    of.engine.submit("a", [8], first.blocks, 5, append=True)
    (done,) = of.finish()
    assert done.tokens == expected(of.spec, (*text_of(0, 100), *first.tokens, 8), 5).tokens


def test_there_must_be_something_to_append_to() -> None:
    of = world()
    with pytest.raises(InvalidRequestError, match="agent 'a' has no cache to append to"):
        of.engine.submit("a", [1], append=True)
    assert not of.engine.has_work


def test_a_cache_without_token_ids_cannot_be_appended_to() -> None:
    of = world()
    unknown = AgentBlocks("a", total_tokens=300, model_id=of.backend.model_id)
    with pytest.raises(InvalidRequestError, match="append"):
        of.engine.submit("a", [1], unknown, append=True)


# Refusals


def account(of: World) -> object:
    """What a refusal must leave as it was."""
    caches = [of.store.get(key) for key in of.store.lru_order()]
    return (
        of.pool.used_blocks,
        holders(of.pool),
        of.engine.has_work,
        [(cache.agent_id, cache.token_ids, cache.retired) for cache in caches if cache],
    )


@pytest.mark.parametrize(
    ("send", "error"),
    [
        (lambda e: e.submit("a", ""), InvalidRequestError),
        (lambda e: e.submit("a", []), InvalidRequestError),
        (lambda e: e.submit("a", [96]), InvalidRequestError),
        (lambda e: e.submit("a", [1], max_tokens=0), InvalidRequestError),
        (lambda e: e.submit("new", [1], append=True), InvalidRequestError),
        (lambda e: e.submit("a", [1] * 4000), PoolExhaustedError),
        (lambda e: e.submit("a", [1], max_tokens=10**9), PoolExhaustedError),
        (lambda e: e.submit("a", [1], AgentBlocks("x", model_id="z")), CacheReconstructionError),
    ],
    ids=["text", "ids", "vocabulary", "max_tokens", "append", "prompt", "answer", "model"],
)
def test_a_refused_request_changes_nothing(
    send: Callable[[BlockPoolBatchEngine], str], error: type[SemanticError]
) -> None:
    of = world(columns=10)
    of.run("a", text_of(0, 100))
    before = account(of)
    with pytest.raises(error):
        send(of.engine)
    assert account(of) == before
    of.check()


def test_what_could_never_fit_is_refused_with_what_there_is() -> None:
    of = World(ModelCacheSpec(SPECS["full"]), 6, 6 * 1024)
    with pytest.raises(
        PoolExhaustedError,
        match=r"^Cannot allocate 8 blocks \(8192 bytes\) for 700 prompt and 100 new tokens: "
        r"the pool has 6 blocks and 6144 bytes$",
    ):
        of.engine.submit("a", text_of(0, 700), max_tokens=100)


def test_what_others_hold_is_not_there_to_give() -> None:
    of = world(columns=3)
    theirs = of.pool.allocate(1, 0, "somebody")
    with pytest.raises(PoolExhaustedError, match="1 other holders use part of it"):
        of.engine.submit("a", text_of(0, 600), max_tokens=100)
    of.pool.free(theirs, "somebody")
    assert of.run("a", text_of(0, 600)).finish_reason in ("stop", "length")


def test_idle_caches_do_not_stand_in_the_way() -> None:
    of = world(columns=3)
    for agent in "abc":
        of.run(agent, text_of(0, 100))
    assert available(of.pool) == 0
    of.run("d", text_of(0, 600))
    assert of.store.lru_order() == (of.key("d"),)


def test_the_idle_cache_used_longest_ago_is_dropped_first() -> None:
    of = world(columns=4)
    caches = {agent: of.run(agent, text_of(0, 100)).blocks for agent in "abcd"}
    of.run("a", text_of(0, 120))
    of.run("e", text_of(7, 100))
    assert [key.agent_id for key in of.store.lru_order()] == ["c", "d", "a", "e"]
    dropped = caches["b"]
    assert dropped is not None
    assert dropped.retired


def test_idle_caches_are_dropped_in_the_order_that_their_agents_hint() -> None:
    of = world(columns=4)
    told = {"a": Hints(back_in=60), "b": Hints(), "c": Hints(done=True), "d": Hints()}
    for agent, hints in told.items():
        of.engine.enqueue(Submission(agent, text_of(0, 100), 4, hints=hints))
        of.finish()
    for n, left in ((5, "abde"), (6, "adef"), (7, "aefg")):
        of.run(left[-1], text_of(n, 100))
        assert "".join(key.agent_id for key in of.store.lru_order()) == left


def test_a_hint_of_a_request_that_is_not_kept_concerns_what_its_agent_has() -> None:
    of = world(columns=3)
    of.run("a", text_of(0, 100))
    of.run("b", text_of(0, 100))
    of.engine.enqueue(Submission("b", text_of(0, 90), 4, keep=False, hints=Hints(done=True)))
    of.finish()
    of.run("c", text_of(5, 100))
    of.run("d", text_of(6, 100))
    assert [key.agent_id for key in of.store.lru_order()] == ["a", "c", "d"]


# Pressure


@pytest.mark.parametrize("variant", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", ["full", "window", "state"])
def test_the_youngest_is_preempted_and_ends_with_the_same_answer(kind: str, variant: int) -> None:
    of = world(kind, columns=3 if kind == "state" else 4)
    prompts = {agent: text_of(i, 250) for i, agent in enumerate("ab")}
    for agent, prompt in prompts.items():
        of.engine.submit(agent, prompt, None, 300, sampling=VARIANTS[variant])
    done = {one.agent_id: one for one in of.finish()}
    assert of.engine.preemptions > 0
    for agent, prompt in prompts.items():
        assert done[agent].tokens == expected(of.spec, prompt, 300, variant).tokens
    assert list(done) == ["a", "b"], "the oldest always goes on"


def test_a_preempted_request_comes_back_before_those_that_came_later() -> None:
    of = world(columns=4, max_batch=2)
    for i, agent in enumerate("abc"):
        of.engine.submit(agent, text_of(i, 250), None, 300)
    assert [one.agent_id for one in of.finish()] == ["a", "b", "c"]
    assert of.engine.preemptions > 0


def test_preempted_requests_are_not_computed_again_and_again() -> None:
    of = world(columns=7)
    for i, agent in enumerate("abc"):
        of.engine.submit(agent, text_of(i, 250), None, 600)
    of.finish()
    assert of.engine.preemptions <= 3
    assert of.backend.prefilled_tokens < 4000


def test_a_preempted_request_is_never_told_twice() -> None:
    of = world(columns=4)
    for i, agent in enumerate("abc"):
        of.engine.submit(agent, text_of(i, 250), None, 300)
    told: dict[str, int] = {}
    preempted = 0
    while of.engine.has_work:
        for event in of.engine.step_once():
            if isinstance(event, TokenEvent):
                told[event.agent_id] = told.get(event.agent_id, 0) + 1
            preempted += isinstance(event, PrefillEvent) and event.done == 0
    assert told == {"a": 300, "b": 300, "c": 300}
    assert preempted == of.engine.preemptions > 0


def test_only_so_many_run_together() -> None:
    of = world(max_batch=2)
    for i in range(5):
        of.engine.submit(f"agent {i}", text_of(i, 9), None, 10)
    while of.engine.has_work:
        events = of.engine.step_once()
        assert len([e for e in events if isinstance(e, TokenEvent)]) <= 2
        assert of.backend.n_open <= 2


def test_a_request_ends_with_an_error_when_others_take_the_pool_before_it_begins() -> None:
    of = world(columns=2, max_batch=1)
    first = of.engine.submit("a", [1, 2], None, 2)
    second = of.engine.submit("b", text_of(0, 300), None, 2)
    theirs = of.pool.allocate(1, 0, "somebody")
    done = {one.uid: one for one in of.finish_beside("somebody")}
    assert done[first].finish_reason in ("stop", "length")
    assert done[second].finish_reason == "error"
    assert (done[second].error or "").startswith("Cannot allocate")
    of.pool.free(theirs, "somebody")
    of.run("c", text_of(0, 300))


@pytest.mark.parametrize("n", [200, 250, 255])
def test_a_request_that_can_never_grow_ends_with_an_error(n: int) -> None:
    of = world(columns=2)
    of.engine.submit("a", text_of(0, n), None, 80)
    for layer in range(of.spec.n_layers):
        of.pool.allocate(1, layer, "somebody")
    (done,) = of.finish_beside("somebody")
    assert done.finish_reason == "error"
    assert (done.error or "").startswith("Cannot allocate")
    assert len(done.tokens) == 256 - n


# Cancelling


@pytest.mark.parametrize("steps", range(8))
def test_a_request_can_be_cancelled_at_any_time(steps: int) -> None:
    of = world(largest_chunk=64)
    prompt = text_of(0, 200)
    uid = of.engine.submit("a", prompt, None, LONG)
    other = of.engine.submit("b", text_of(7, 30), None, LONG)
    for _ in range(steps):
        of.engine.step_once()
    assert of.engine.cancel(uid)
    assert of.engine.cancel(uid), "it runs until the next step"
    (ended,) = completions(of.engine.step_once())
    assert (ended.uid, ended.finish_reason) == (uid, "cancelled")
    assert ended.tokens == expected(of.spec, prompt, LONG).tokens[: len(ended.tokens)]
    assert not of.engine.cancel(uid)
    (done,) = of.finish()
    assert (done.uid, done.tokens) == (other, expected(of.spec, text_of(7, 30), LONG).tokens)


def test_a_waiting_request_can_be_cancelled() -> None:
    of = world(max_batch=1)
    running = of.engine.submit("a", text_of(0, 30), None, LONG)
    waiting = of.engine.submit("b", text_of(1, 30), None, LONG)
    assert of.engine.cancel(waiting)
    (ended,) = completions(of.engine.step_once())
    assert (ended.uid, ended.tokens, ended.blocks) == (waiting, (), None)
    assert [done.uid for done in of.finish()] == [running]


def test_a_preempted_request_can_be_cancelled_and_keeps_its_words() -> None:
    of = world(columns=4)
    first = of.engine.submit("a", text_of(0, 250), None, 300)
    second = of.engine.submit("b", text_of(9, 250), None, 300)
    while not of.engine.preemptions:
        of.engine.step_once()
    assert of.engine.cancel(second)
    (ended,) = completions(of.engine.step_once())
    assert ended.uid == second
    assert len(ended.tokens) > 200
    assert ended.text == CharTokenizer().decode(ended.tokens)
    assert [done.uid for done in of.finish()] == [first]


def test_a_cancelled_request_gives_back_the_cache_it_was_about_to_use() -> None:
    of = world()
    of.run("a", text_of(0, 300))
    uid = of.engine.submit("a", text_of(0, 310), None, 5)
    of.engine.cancel(uid)
    (ended,) = of.finish()
    assert ended.finish_reason == "cancelled"
    assert of.run("a", text_of(0, 320)).cached_tokens >= 300


def test_nobody_else_can_be_cancelled() -> None:
    of = world()
    done = of.run("a", [1, 2])
    assert not of.engine.cancel(done.uid)
    assert not of.engine.cancel("request-99")


# Forgetting


def test_forgetting_drops_the_idle_cache() -> None:
    of = world()
    done = of.run("a", text_of(0, 300))
    assert of.engine.forget("a")
    assert done.blocks is not None
    assert done.blocks.retired
    assert of.pool.used_blocks == 0
    assert of.backend.held_bytes == 0
    assert not of.engine.forget("a")
    assert of.run("a", text_of(0, 300)).cached_tokens == 0


def test_forgetting_lets_running_requests_go_on() -> None:
    of = world()
    root = of.run("a", text_of(0, 300))
    of.engine.submit("b", text_of(0, 310), root.blocks, 10)
    assert of.engine.forget("a")
    assert not of.engine.forget("b")
    (done,) = of.finish()
    assert done.cached_tokens == 300
    assert done.tokens == expected(of.spec, text_of(0, 310), 10).tokens


# Failures


def three_requests(of: World) -> dict[str, Sequence[int]]:
    """Two that decode and one that is half prefilled."""
    prompts: dict[str, Sequence[int]] = {
        "a": text_of(0, 20),
        "b": text_of(9, 30),
        "c": text_of(3, 400),
    }
    for agent in "ab":
        of.engine.submit(agent, prompts[agent], None, LONG)
    for _ in range(4):
        of.engine.step_once()
    of.engine.submit("c", prompts["c"], None, LONG)
    of.engine.step_once()
    return prompts


def outcomes(of: World, prompts: dict[str, Sequence[int]], done: list[Done]) -> dict[str, str]:
    """How each ended; each that did not fail has the right answer."""
    assert sorted(one.agent_id for one in done) == sorted(prompts)
    for one in done:
        answer = expected(of.spec, prompts[one.agent_id], LONG).tokens
        assert one.tokens == answer[: len(one.tokens)]
        assert (one.error is None) == (one.finish_reason != "error")
        assert one.finish_reason == "error" or one.tokens == answer
    return {one.agent_id: one.finish_reason for one in done}


def test_a_failed_prefill_ends_only_its_own_request() -> None:
    of = world(largest_chunk=64)
    prompts = three_requests(of)
    of.backend.fail_next("prefill")
    done = of.finish()
    assert outcomes(of, prompts, done) == {"a": "length", "b": "length", "c": "error"}
    assert {one.error for one in done} == {None, "injected into prefill"}
    of.forget_all()
    assert of.pool.used_blocks == 0


def test_a_failed_step_ends_those_who_took_part_in_it() -> None:
    of = world(largest_chunk=64)
    prompts = three_requests(of)
    of.backend.fail_next("decode")
    done = of.finish()
    assert outcomes(of, prompts, done) == {"a": "error", "b": "error", "c": "length"}
    assert all(one.blocks is None for one in done if one.error)


@pytest.mark.parametrize("method", ["open", "start", "prefill"])
def test_a_sequence_that_fails_at_its_beginning_ends_with_an_error(method: str) -> None:
    of = world()
    of.backend.fail_next(method)
    of.engine.submit("a", text_of(0, 20), None, 5)
    (done,) = of.finish()
    assert (done.finish_reason, done.error) == ("error", f"injected into {method}")
    assert done.blocks is None
    assert of.pool.used_blocks == 0
    of.run("a", text_of(0, 20))


def test_a_failed_restore_ends_its_request() -> None:
    of = world()
    of.run("a", text_of(0, 300))
    of.backend.fail_next("restore")
    of.engine.submit("a", text_of(0, 310), None, 5)
    (done,) = of.finish()
    assert done.finish_reason == "error"
    assert of.pool.used_blocks == 0


@pytest.mark.parametrize("own", [True, False])
def test_a_cache_that_cannot_be_restored_is_computed_again(own: bool) -> None:
    of = world()
    root = of.run("a", text_of(0, 300))
    of.backend.fail_next("restore", CacheReconstructionError)
    of.engine.submit("a" if own else "b", text_of(0, 310), root.blocks, 5)
    (done,) = of.finish()
    assert done.tokens == expected(of.spec, text_of(0, 310), 5).tokens
    assert done.cached_tokens == 0


@pytest.mark.parametrize("method", ["reserve", "extract"])
def test_whatever_fails_in_a_step_ends_at_most_one_request(method: str) -> None:
    of = world(largest_chunk=64)
    prompts = three_requests(of)
    of.backend.fail_next(method)
    done = of.finish()
    ended = outcomes(of, prompts, done)
    assert sorted(ended.values()).count("error") <= 1


def test_a_sequence_that_fails_to_close_is_no_reason_to_stop() -> None:
    of = world(columns=4)
    for i, agent in enumerate("ab"):
        of.engine.submit(agent, text_of(i, 250), None, 300)
    of.backend.fail_next("close")
    assert len(of.finish()) == 2


def taken_in_between(of: World, monkeypatch: pytest.MonkeyPatch) -> list[KVBlock]:
    """Free blocks are taken between the engine's question and its deed, once."""
    asked, taken = of.pool.can_allocate, list[KVBlock]()

    def ask_and_lose(counts: Sequence[int], *, after_eviction: bool = False) -> bool:
        answer = asked(counts, after_eviction=after_eviction)
        if after_eviction:
            return answer
        if answer and any(counts):
            monkeypatch.undo()
            taken.extend(of.pool.allocate(available(of.pool), 0, "somebody"))
        return answer

    monkeypatch.setattr(of.pool, "can_allocate", ask_and_lose)
    return taken


def test_losing_a_block_to_somebody_else_while_growing_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = world(columns=4)
    of.engine.submit("a", text_of(0, 250), None, 20)
    of.engine.step_once()
    taken_in_between(of, monkeypatch)
    (done,) = of.finish_beside("somebody")
    assert done.finish_reason == "error"


def test_losing_a_block_to_somebody_else_while_submitting_queues_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = world(columns=4)
    taken = taken_in_between(of, monkeypatch)
    uid = of.engine.submit("a", [1, 2], None, 3)
    of.pool.free(taken, "somebody")
    assert [done.uid for done in of.finish()] == [uid]


def test_tokens_computed_again_after_a_preemption_are_not_called_cached() -> None:
    of = world(columns=4)
    of.run("b", text_of(5, 250))
    of.engine.submit("a", text_of(0, 250), None, 400)
    of.engine.submit("b", text_of(5, 260), None, 300)
    done = {one.agent_id: one for one in of.finish()}
    assert of.engine.preemptions == 1
    computed = of.backend.prefilled_tokens
    assert computed > 249 + 249 + done["b"].prompt_tokens, "its prompt was computed again"
    assert done["b"].cached_tokens == 0


# Integrity


def test_a_block_that_nobody_knows_is_noticed() -> None:
    of = world()
    of.run("a", text_of(0, 30))
    of.engine.check_integrity()
    of.pool.allocate(1, 0, "a")
    with pytest.raises(IntegrityError, match="agent 'a' holds 3 blocks, expected 2"):
        of.engine.check_integrity()
