"""What agents say of themselves, from the request to the pool: another order, the same tokens."""

from __future__ import annotations

import asyncio

import pytest

from semantic.application.cache.read_ahead import ToolTimes
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.serving import Serving
from semantic.composition.engine_settings import Settings
from semantic.domain.answer import AnswerEnd, TextDelta
from semantic.domain.chat import Chat, Message, Tool, ToolChoice
from semantic.domain.identity import NO_HINTS, Hints
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask
from semantic.serve import ServeSettings, load_serving
from tests.support.fake_clock import FakeClock

pytestmark = pytest.mark.process

LAYERS = 5
COLUMNS = 3
"""Agents that the pool has room for: each needs one block of every layer."""
QUESTIONS = {agent: f"What is {number} plus 4?" for number, agent in enumerate("abcd", 1)}


NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


async def answers(told: dict[str, Hints]) -> tuple[list[str], list[str]]:
    """The answers to all, one after the other, and whose caches are left in the pool."""
    engine = Settings(pool_blocks=COLUMNS * LAYERS)
    serving = await load_serving(ServeSettings(engine, max_context=128))
    try:
        texts = [await _answer(serving, agent, told.get(agent, NO_HINTS)) for agent in QUESTIONS]
        left = serving._thread.call(lambda engine: engine.idle_caches.lru_order())
        return texts, [key.agent_id for key in await asyncio.wrap_future(left)]
    finally:
        await serving.close()


async def evicted_after_calls() -> list[str]:
    """In which order the caches of agents are evicted that have called tools: one is away for
    a minute each time, one for ten, and one says that it is done."""
    serving = await load_serving(ServeSettings(Settings(), max_context=512))
    clock = FakeClock()
    serving._tool_times = ToolTimes(clock)
    try:
        for agent, seconds, n_calls, hints in (
            ("a minute", 60, 4, NO_HINTS),
            ("ten", 600, 4, NO_HINTS),
            ("done", 60, 1, Hints(done=True)),
        ):
            tool = Tool(f"Look for {seconds}", parameters=NOTHING)
            chat = Chat((Message("user", "Look."),), (tool,), ToolChoice("required"))
            for _ in range(n_calls):
                clock.advance(seconds)
                await _finish(serving, Ask(chat, SamplingParams(), 90, agent, hints=hints))
        return await asyncio.wrap_future(serving._thread.call(_evict_all))
    finally:
        await serving.close()


def _evict_all(engine: BlockPoolBatchEngine) -> list[str]:
    """All agents, in the order in which their caches are evicted."""
    idle, order = engine.idle_caches, []
    while before := idle.lru_order():
        idle.evict()
        order += [key.agent_id for key in before if key not in idle.lru_order()]
    return order


async def _finish(serving: Serving, ask: Ask) -> None:
    *_, end = [event async for event in serving.answer(ask)]
    assert isinstance(end, AnswerEnd)
    assert end.reason == "tool_calls"


async def _answer(serving: Serving, agent: str, hints: Hints) -> str:
    chat = Chat((Message("user", QUESTIONS[agent]),))
    ask = Ask(chat, SamplingParams(), 12, agent, hints=hints)
    text = ""
    async for event in serving.answer(ask):
        text += event.text if isinstance(event, TextDelta) else ""
        if isinstance(event, AnswerEnd):
            assert event.error is None
    return text


def test_hints_change_what_is_left_in_the_pool_and_no_token() -> None:
    texts, left = asyncio.run(answers({}))
    assert left == ["b", "c", "d"]
    hints = {"a": Hints(back_in=200), "c": Hints(done=True, priority=3)}
    assert asyncio.run(answers(hints)) == (texts, ["a", "b", "d"])


def test_after_a_call_an_agent_stays_for_the_usual_time_of_the_tool() -> None:
    assert asyncio.run(evicted_after_calls()) == ["done", "ten", "a minute"]
