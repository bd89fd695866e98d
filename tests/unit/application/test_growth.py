"""What a call costs does not depend on how many other agents there are: counted, not timed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace

import pytest

from semantic.adapters.stores.memory import MemoryStore
from semantic.application.agents.finder import AgentFinder
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.domain.entities import AgentBlocks
from semantic.domain.value_objects import CacheKey, ModelCacheSpec
from semantic.ports.agents import Branch
from tests.support.fake_backend import FULL
from tests.support.served_agents import AgentsWorld
from tests.support.steps import steps_of
from tests.support.store_blocks import saved_agents
from tests.unit.application.world import World, text_of

FEW, MANY = 10, 300
FEWER_STEPS = 1.05
"""Searches in sorted lists, of which many have one more step than few."""


def add_idle(engine: BlockPoolBatchEngine, model_id: str, agent: str, n: int) -> None:
    """An idle cache of one block, as a turn leaves it."""
    tokens = text_of(n, 20)
    cache = AgentBlocks(agent, token_ids=tokens, model_id=model_id)
    for layer in range(engine.pool.spec.n_layers):
        (one,) = engine.pool.allocate(1, layer, agent)
        one.token_count = len(tokens)
        cache.add_block(one)
    engine.idle_caches.put(CacheKey(model_id, agent), cache)


def engine_with(n: int, *, room: int) -> World:
    """An engine with `n` idle agents, and `room` blocks more than they hold."""
    of = World(ModelCacheSpec((FULL,)), total_blocks=n + room)
    for number in range(n):
        add_idle(of.engine, of.backend.model_id, f"agent {number}", number)
    return of


def submit_new(of: World) -> None:
    of.engine.submit("new", text_of(1, 30), max_tokens=4)


def submit_known(of: World) -> None:
    of.engine.submit("agent 3", text_of(3, 40), max_tokens=4)


def submit_too_much(of: World) -> None:
    with pytest.raises(Exception, match="Cannot allocate"):
        of.engine.submit("new", text_of(1, 30), max_tokens=10**9)


@pytest.mark.parametrize("submit", [submit_new, submit_known, submit_too_much])
@pytest.mark.parametrize("room", [0, 8])
def test_a_submission(submit: Callable[[World], None], room: int) -> None:
    """With free blocks, and when an idle cache must be evicted."""
    few, many = (engine_with(n, room=room) for n in (FEW, MANY))
    assert steps_of(lambda: submit(many)) == steps_of(lambda: submit(few))


def test_a_submission_beside_blocks_that_are_not_the_engines() -> None:
    few, many = (engine_with(n, room=4) for n in (FEW, MANY))
    for of in (few, many):
        of.pool.allocate(4, 0, "somebody")
        of.engine.submit("busy", text_of(1, 300), max_tokens=4)
    assert steps_of(lambda: submit_new(many)) == steps_of(lambda: submit_new(few))


def test_a_turn_of_a_new_agent() -> None:
    def turn(of: World) -> None:
        of.engine.submit("new", text_of(2, 30), max_tokens=4)
        (done,) = of.engine.step()
        assert len(done.tokens) == 4

    few, many = (engine_with(n, room=0) for n in (FEW, MANY))
    assert steps_of(lambda: turn(many)) == steps_of(lambda: turn(few))


def served_with(n: int) -> AgentsWorld:
    """`n` saved agents in the pool and a store in memory."""
    served = AgentsWorld(MemoryStore(64 << 20), total_blocks=2 * n + 100)
    served.turn("agent", 20)
    (agent,) = saved_agents(served.store)
    for number in range(n):
        name, tokens = f"agent {number:03}", (*agent.token_ids, number)
        one = replace(agent, agent_id=name, token_ids=tokens, saved_at=number, parent="agent")
        assert served.store.agents.save(replace(one, parent=f"agent {number - 1:03}"))
        add_idle(served.engine, served.world.backend.model_id, name, number)
    return served


CALLS: dict[str, Callable[[AgentsWorld], object]] = {
    "page": lambda of: asyncio.run(of.agents.page("", 5)),
    "next page": lambda of: asyncio.run(of.agents.page("", 3, "agent 007")),
    "show": lambda of: asyncio.run(of.agents.show("agent 005", "")),
    "pin": lambda of: asyncio.run(of.agents.pin("agent 005", "", pinned=True)),
    "fork": lambda of: asyncio.run(of.agents.fork(Branch("agent 005"), ["copy"], "")),
    "forget": lambda of: asyncio.run(of.agents.forget("agent 005", "")),
    "figures": lambda of: of.agents.stores(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_about_agents(name: str) -> None:
    few, many = (served_with(n) for n in (FEW, MANY))
    assert steps_of(lambda: CALLS[name](many)) <= FEWER_STEPS * steps_of(lambda: CALLS[name](few))


def test_finding_the_agent_of_a_request_without_a_name() -> None:
    def finder_with(n: int) -> AgentFinder:
        finder = AgentFinder(str.encode)
        for number in range(n):
            finder.remember(f"auto-{number:012x}", [number, 1, 2, 3], "")
        return finder

    few, many = (finder_with(n) for n in (FEW, MANY))
    found = [finder.find([5, 1, 2, 3, 4], "") for finder in (few, many)]
    assert found == [f"auto-{5:012x}"] * 2
    find = [functools.partial(finder.find, [5, 1, 2, 3, 4], "") for finder in (few, many)]
    assert steps_of(find[0]) == steps_of(find[1])
