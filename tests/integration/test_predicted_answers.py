"""A predicted answer takes fewer steps and stays the same, from the request to the model."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from semantic.adapters.mlx.batch.draft_costs import StepSeconds
from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.model import provider
from semantic.application.serving import Serving
from semantic.composition.engine_settings import Settings
from semantic.domain.answer import AnswerEnd, TextDelta
from semantic.domain.chat import Chat, Message
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask
from semantic.serve import ServeSettings, load_serving

QUESTION = Chat((Message("user", "Tell me a story"),))


async def answered(serving: Serving, predicted: str) -> tuple[str, AnswerEnd]:
    """An answer that later ones know nothing of."""
    ask = Ask(QUESTION, SamplingParams(), 40, keep=False, predicted=predicted)
    text = ""
    async for event in serving.answer(ask):
        text += event.text if isinstance(event, TextDelta) else ""
        if isinstance(event, AnswerEnd):
            return text, event
    raise AssertionError("an answer without an end")


async def answers() -> tuple[tuple[str, AnswerEnd], tuple[str, AnswerEnd]]:
    """An answer without and with its own text as a prediction."""
    serving = await load_serving(ServeSettings(Settings(exact_batch="on"), max_context=512))
    try:
        plain = await answered(serving, "")
        return plain, await answered(serving, plain[0] + " and more")
    finally:
        await serving.close()


@pytest.mark.process
def test_a_predicted_answer_is_the_same_and_takes_fewer_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepSeconds, "of", lambda *_, **__: 1.0)  # drafts always pay
    in_pages = partial(provider.wrapping, attention=lambda _: PortableAttention())
    monkeypatch.setattr(provider, "wrapping", in_pages)
    (plain, usual), (same, ended) = asyncio.run(answers())
    assert same == plain
    assert usual.usage.accepted < 5
    assert ended.usage.accepted > ended.usage.completion // 2
