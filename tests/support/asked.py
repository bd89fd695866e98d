"""One greedy answer of a serving, to its end."""

from __future__ import annotations

import pytest

from semantic.domain.answer import AnswerEnd, TextDelta, Usage
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, ServingPort


async def ask(
    serving: ServingPort, agent: str, prompt: tuple[int, ...], n: int
) -> tuple[str, Usage]:
    """The text of `n` greedy tokens, and the answer's usage."""
    text = ""
    async for event in serving.answer(Ask(prompt, SamplingParams(ignore_eos=True), n, agent)):
        if isinstance(event, TextDelta):
            text += event.text
        if isinstance(event, AnswerEnd):
            assert event.error is None, event.error
            return text, event.usage
    pytest.fail("the answer has no end")
