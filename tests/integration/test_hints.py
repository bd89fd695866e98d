"""What agents say of themselves, from the request to the pool: another order, the same tokens."""

from __future__ import annotations

import asyncio

from semantic.application.serving import Serving
from semantic.bootstrap import Settings
from semantic.domain.answer import AnswerEnd, TextDelta
from semantic.domain.chat import Chat, Message
from semantic.domain.identity import NO_HINTS, Hints
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask
from semantic.serve import ServeSettings, load_serving

LAYERS = 5
COLUMNS = 3
"""Agents that the pool has room for: each needs one block of every layer."""
QUESTIONS = {agent: f"What is {number} plus 4?" for number, agent in enumerate("abcd", 1)}


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
