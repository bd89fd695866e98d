"""Answers that run together: all begin, none waits for another, and none outlives its request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from semantic.domain.answer import AnswerEvent, AnswerStarted, TextDelta
from semantic.domain.errors import OverloadedError
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask
from semantic_server.http.openai.replies import merged_events
from tests.support.fake_serving import FakeServing, Script

ASKS = [Ask("Once", SamplingParams(seed=i)) for i in range(3)]


class Gated(FakeServing):
    """The answer with seed 1 waits, where `holds` says, until it is let go."""

    def __init__(self, holds: str) -> None:
        super().__init__(lambda _: Script((TextDelta("a"), TextDelta("b"))))
        self.holds = holds
        self.gate = asyncio.Event()
        self.left: list[int | None] = []

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """See `ServingPort.answer`."""
        held = ask.sampling.seed == 1
        try:
            if held and self.holds == "start":
                await self.gate.wait()
            async with aclosing(super().answer(ask)) as events:
                async for event in events:
                    yield event
                    if held and self.holds == "text":
                        await self.gate.wait()
        finally:
            self.left.append(ask.sampling.seed)


def test_nothing_comes_before_all_have_begun() -> None:
    async def run() -> None:
        serving = Gated("start")
        events = merged_events(serving, ASKS)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.01)
        assert not first.done()
        serving.gate.set()
        index, event = await first
        assert isinstance(event, AnswerStarted)
        rest = [index, *[index async for index, _ in events]]
        assert sorted(rest) == [0] * 5 + [1] * 5 + [2] * 5

    asyncio.run(run())


def test_no_answer_waits_for_a_slower_one() -> None:
    async def run() -> None:
        serving = Gated("text")
        seen: list[int] = []
        async with aclosing(merged_events(serving, ASKS)) as events:
            async for index, event in events:
                if isinstance(event, TextDelta):
                    seen.append(index)
                if len(seen) == 4:
                    break
        assert sorted(seen) == [0, 0, 2, 2]
        assert sorted(serving.left, key=str) == [0, 1, 2]

    asyncio.run(run())


@pytest.mark.parametrize("holds", ["start", "text"])
def test_cancelling_ends_all(holds: str) -> None:
    async def run() -> None:
        serving = Gated(holds)

        async def read() -> None:
            async for _ in merged_events(serving, ASKS):
                pass

        task = asyncio.ensure_future(read())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert sorted(serving.left, key=str) == [0, 1, 2]

    asyncio.run(run())


def test_an_answer_that_cannot_begin_ends_all() -> None:
    async def run() -> None:
        serving = Gated("start")
        busy = OverloadedError("busy", retry_after=1)
        serving.script = lambda ask: Script(failure=busy) if ask.sampling.seed == 2 else Script()
        with pytest.raises(OverloadedError, match="busy"):
            await anext(merged_events(serving, ASKS))
        assert sorted(serving.left, key=str) == [0, 1, 2]

    asyncio.run(run())


def test_closing_before_the_first_event_asks_nothing() -> None:
    async def run() -> None:
        serving = FakeServing()
        await merged_events(serving, ASKS).aclose()
        assert serving.asked == []

    asyncio.run(run())
