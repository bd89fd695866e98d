"""What every `ServingPort` promises: the real one on a model, and the fake that wires are tested
with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path

import pytest

from semantic.composition.engine_settings import Settings
from semantic.domain.answer import AnswerEnd, AnswerEvent, AnswerStarted, PromptProgress, TextDelta
from semantic.domain.chat import Chat, Message
from semantic.domain.errors import ContextOverflowError, InvalidRequestError
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, Prompt, ServingPort
from semantic.serve import ServeSettings, load_serving
from tests.support.fake_serving import FakeServing

pytestmark = pytest.mark.process

CHAT = Chat((Message("user", "Hello"),))
GREEDY = SamplingParams()

Run = Callable[[Callable[[ServingPort], Coroutine[None, None, None]]], None]


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.mlx)])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Runs a test with a served model."""
    if request.param == "fake":
        yield lambda test: asyncio.run(test(FakeServing()))
        return
    real = asyncio.run(load_serving(ServeSettings(Settings(pool_blocks=400), max_context=512)))
    yield lambda test: asyncio.run(test(real))
    asyncio.run(real.close())


async def collect(events: AsyncGenerator[AnswerEvent, None]) -> list[AnswerEvent]:
    return [event async for event in events]


@pytest.mark.parametrize("prompt", [CHAT, "Hello", (65, 66, 67)], ids=["chat", "text", "tokens"])
def test_an_answer_has_a_start_pieces_and_an_end(run: Run, prompt: Prompt) -> None:
    async def test(serving: ServingPort) -> None:
        events = await collect(serving.answer(Ask(prompt, GREEDY, max_tokens=6)))
        start, *middle, end = events
        tokens = await serving.tokenize(prompt)
        assert isinstance(start, AnswerStarted)
        assert start.prompt_tokens == len(tokens)
        assert start.agent_id
        assert isinstance(end, AnswerEnd)
        assert end.reason in ("stop", "length")
        assert end.usage.prompt == len(tokens)
        assert end.usage.cached + end.usage.written == end.usage.prompt
        assert end.usage.completion > 0
        assert any(isinstance(event, TextDelta) for event in middle)
        progress = [event.done for event in middle if isinstance(event, PromptProgress)]
        assert progress == sorted(progress)

    run(test)


def test_an_agent_keeps_the_name_it_was_given(run: Run) -> None:
    async def test(serving: ServingPort) -> None:
        start, *_ = await collect(serving.answer(Ask("Hi", GREEDY, max_tokens=2, agent="ann/1")))
        assert isinstance(start, AnswerStarted)
        assert start.agent_id == "ann/1"

    run(test)


def test_what_cannot_be_answered_is_refused_before_the_first_event(run: Run) -> None:
    async def test(serving: ServingPort) -> None:
        for prompt in ("", ()):
            with pytest.raises(InvalidRequestError, match="empty"):
                await anext(serving.answer(Ask(prompt, GREEDY)))
        limit = serving.model.context_tokens
        with pytest.raises(ContextOverflowError) as caught:
            await anext(serving.answer(Ask((65,) * limit, GREEDY)))
        assert (caught.value.prompt_tokens, caught.value.limit) == (limit, limit)
        with pytest.raises(ContextOverflowError) as caught:
            await anext(serving.answer(Ask((65,) * 9, GREEDY, context_tokens=9)))
        assert (caught.value.prompt_tokens, caught.value.limit) == (9, 9)

    run(test)


def test_an_answer_that_nobody_reads_on_is_cancelled_and_others_go_on(run: Run) -> None:
    async def test(serving: ServingPort) -> None:
        left = serving.answer(Ask("Hello", GREEDY, max_tokens=200))
        assert isinstance(await anext(left), AnswerStarted)
        await left.aclose()
        *_, end = await collect(serving.answer(Ask("Hello", GREEDY, max_tokens=3)))
        assert isinstance(end, AnswerEnd)
        assert end.reason in ("stop", "length")

    run(test)


def test_tokens_and_texts_belong_together(run: Run) -> None:
    async def test(serving: ServingPort) -> None:
        tokens = await serving.tokenize("Hello, wörld")
        assert await serving.detokenize(tokens) == "Hello, wörld"
        assert len(await serving.token_texts(tokens)) == len(tokens)
        assert len(await serving.token_texts(tokens * 200)) == 200 * len(tokens)
        with pytest.raises(InvalidRequestError, match="token id"):
            await serving.detokenize([serving.model.vocab_size])
        most = serving.model.context_tokens
        with pytest.raises(InvalidRequestError, match=f"tokens must have at most {most}"):
            await serving.detokenize(tokens[:1] * (most + 1))

    run(test)


def test_the_model_has_a_name_and_a_default_one(run: Run) -> None:
    async def test(serving: ServingPort) -> None:
        assert serving.model.id == serving.model.names[0]
        assert "default" in serving.model.names
        assert serving.model.context_tokens > 0

    run(test)


def test_nothing_is_left_of_an_answer_that_was_refused(run: Run, home: Path) -> None:
    del home

    async def test(serving: ServingPort) -> None:
        for _ in range(3):
            with pytest.raises(ContextOverflowError):
                await anext(serving.answer(Ask((65,) * 600, GREEDY, agent="big")))
        *_, end = await collect(serving.answer(Ask("Hello", GREEDY, max_tokens=2, agent="big")))
        assert isinstance(end, AnswerEnd)

    run(test)
