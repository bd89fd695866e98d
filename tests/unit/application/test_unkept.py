"""A request that is not kept: it reads what is cached, answers as any other, and adds nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from semantic.adapters.stores.memory import MemoryStore
from semantic.domain.value_objects import LayerSpec, ModelCacheSpec
from tests.support.rig import FixedBudget
from tests.support.store_blocks import saved_agents
from tests.unit.application.world import SPECS, World, completions, expected, text_of

every_spec = pytest.mark.parametrize("layers", SPECS.values(), ids=SPECS.keys())
PROMPT = text_of(1, 1000)


def world(layers: Sequence[LayerSpec], columns: int = 100) -> World:
    spec = ModelCacheSpec(tuple(layers))
    return World(spec, columns * spec.n_layers, prefix_store=MemoryStore(1 << 30, secret=bytes(32)))


def kept_of(of: World) -> tuple[object, ...]:
    """All that an engine and its store hold for later requests."""
    store = of.prefix_store
    assert isinstance(store, MemoryStore)
    caches = [cache for key in of.store.lru_order() if (cache := of.store.get(key)) is not None]
    return (
        sorted(map(repr, store._blocks)),
        [(one.agent_id, one.token_ids, one.turns) for one in saved_agents(store)],
        [(one.owner, one.token_ids, [*map(id, one.all_blocks())]) for one in caches],
    )


@every_spec
def test_it_answers_as_any_other_and_nothing_of_it_stays(layers: tuple[LayerSpec, ...]) -> None:
    of = world(layers)
    before = kept_of(of)
    of.engine.submit("ann", PROMPT, None, 300, keep=False)
    (done,) = of.finish()
    assert done.tokens == expected(of.spec, PROMPT, 300).tokens
    assert (done.finish_reason, done.blocks) == ("length", None)
    assert kept_of(of) == before
    assert of.pool.used_blocks == 0
    assert of.run("ben", PROMPT).cached_tokens == 0


@every_spec
def test_its_agent_stays_as_it_was(layers: tuple[LayerSpec, ...]) -> None:
    of = world(layers)
    history = (*PROMPT, *of.run("ann", PROMPT).tokens)
    before = kept_of(of)
    of.engine.submit("ann", (*history, 5, 6), None, 20, keep=False)
    (done,) = of.finish()
    assert done.tokens == expected(of.spec, (*history, 5, 6), 20).tokens
    assert done.cached_tokens >= len(history) - 1  # the agent's own cache is read
    assert kept_of(of) == before
    assert of.run("ann", (*history, 7)).cached_tokens >= len(history) - 1


@every_spec
@pytest.mark.parametrize("first", [True, False])
def test_of_two_that_begin_alike_none_waits_for_the_answer_of_the_other(
    layers: tuple[LayerSpec, ...], first: bool
) -> None:
    of = world(layers)
    prompts = {"a": (*PROMPT, 1, 2), "b": (*PROMPT, 3)}
    for agent, prompt in prompts.items():
        keep = (agent == "a") is not first
        of.engine.submit(agent, prompt, None, 100 if agent == "a" else 3, keep=keep)
    done = of.finish()
    assert [one.agent_id for one in done] == ["b", "a"]
    for one in done:
        answer = expected(of.spec, prompts[one.agent_id], 100 if one.agent_id == "a" else 3)
        assert one.tokens == answer.tokens
    names = {key.agent_id for key in of.store.lru_order()}
    assert names == {"b" if first else "a"}
    # What it has computed is not found, also not by one that ran beside it, and where it parts from
    # that one nothing is saved.
    assert not first or done[0].cached_tokens == 0
    alone = world(layers)
    agent = "b" if first else "a"
    alone.run(agent, prompts[agent], 100 if agent == "a" else 3)
    assert kept_of(of)[:2] == kept_of(alone)[:2]


@every_spec
def test_no_checkpoint_is_taken_for_it_and_it_waits_for_none(layers: tuple[LayerSpec, ...]) -> None:
    of, alone = world(layers), world(layers)
    prompts = {agent: (*PROMPT[:600], *text_of(i, 700)) for i, agent in enumerate("ab", 2)}
    alone.run("a", prompts["a"])
    for agent, prompt in prompts.items():
        of.engine.submit(agent, prompt, None, 5, keep=agent == "a")
    both = [event.agent_id for _ in range(4) for event in of.engine.step_once()]
    assert set(both) == {"a", "b"} or layers == SPECS["full"]
    of.finish()
    assert kept_of(of)[:2] == kept_of(alone)[:2]


def test_it_waits_for_a_block_that_another_computes_and_none_waits_for_it() -> None:
    of = world(SPECS["full"])
    of.engine.submit("a", PROMPT, None, 3, keep=False)
    of.engine.submit("b", PROMPT, None, 3)
    unkept, kept = of.engine.requests
    assert of.engine._prefixes is not None
    shared = of.engine._prefixes.shared
    assert shared.claim(unkept)
    assert shared.claim(kept)
    assert not shared.claim(unkept)
    shared.release(kept)
    assert shared.claim(unkept)


@pytest.mark.parametrize("keep", [True, False])
def test_a_prompt_that_was_computed_in_one_pass_is_not_waited_for_any_longer(keep: bool) -> None:
    of = world(SPECS["full"])
    of.engine._scheduler._budget = FixedBudget(4096)
    of.engine.submit("a", PROMPT[:513], None, 60)
    of.engine.submit("b", PROMPT[:513], None, 3, keep=keep)
    done = of.finish()
    assert [(one.agent_id, one.cached_tokens) for one in done] == [("b", 512), ("a", 0)]


@every_spec
def test_preempted_it_is_computed_again(layers: tuple[LayerSpec, ...]) -> None:
    of = world(layers, columns=3 if SPECS["state"] == layers else 4)
    prompts = {agent: text_of(i, 250) for i, agent in enumerate("ab")}
    for agent, prompt in prompts.items():
        of.engine.submit(agent, prompt, None, 300, keep=agent == "a")
    done = {one.agent_id: one for one in of.finish()}
    if layers in (SPECS["full"], SPECS["window"], SPECS["state"]):
        assert of.engine.preemptions > 0
    for agent, prompt in prompts.items():
        assert done[agent].tokens == expected(of.spec, prompt, 300).tokens
    alone = world(layers)
    alone.run("a", prompts["a"], 300)
    assert kept_of(of)[:2] == kept_of(alone)[:2]


@every_spec
@pytest.mark.parametrize("steps", [0, 2, 6])
def test_cancelled_it_leaves_nothing(layers: tuple[LayerSpec, ...], steps: int) -> None:
    of = world(layers)
    history = (*PROMPT, *of.run("ann", PROMPT).tokens)
    before = kept_of(of)
    uid = of.engine.submit("ann", (*history, *text_of(2, 900)), None, 50, keep=False)
    for _ in range(steps):
        assert not completions(of.engine.step_once())
    assert of.engine.cancel(uid)
    (done,) = of.finish()
    assert done.finish_reason == "cancelled"
    assert kept_of(of) == before
