"""Answers of the library, whole or as streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Self

from semantic.application.cache.agent_notes import cache_miss_reason
from semantic.domain.answer import AnswerEvent, AnswerReason, TextDelta, Usage
from semantic.domain.chat import Message, ToolCall
from semantic.domain.errors import BackendError


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of `agent`. `finish_reason` is "stop", "length", "tool_calls" or "cancelled".
    `stop_string` is the stop text that ended the answer, or None."""

    agent: str
    message: Message
    finish_reason: AnswerReason
    usage: Usage
    stop_string: str | None = None

    @property
    def text(self) -> str:
        """The text of the answer, without reasoning and tool calls."""
        return self.message.content

    @property
    def reasoning(self) -> str:
        """The model's reasoning before the answer, or ""."""
        return self.message.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls in the answer. The `arguments` of a call are a JSON text."""
        return self.message.tool_calls

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens in the prompt."""
        return self.usage.prompt

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens that came from a cache."""
        return self.usage.cached

    @property
    def why(self) -> str:
        """A sentence that says why the cache had no more of the prompt."""
        match = self.usage.match
        return "" if match is None else cache_miss_reason(match)

    def __str__(self) -> str:
        return self.text


class AsyncAnswerStream:
    """An answer as it arrives. Iterate over the stream for the answer's text, or over `events` for
    all events. See `AnswerStream` for the methods."""

    def __init__(
        self,
        started: AnswerEvent,
        events: AsyncGenerator[AnswerEvent, None],
        answer: Callable[[], Answer | None],
        cancel: Callable[[], Awaitable[object]],
    ) -> None:
        """`started` is the first event, and `events` yields the later ones. `answer` returns the
        whole answer after the last event. `cancel` ends `events`."""
        self._started: AnswerEvent | None = started
        self._events = events
        self._answer = answer
        self._cancel = cancel

    @property
    def answer(self) -> Answer:
        found = self._answer()
        if found is None:
            raise BackendError("the answer has not finished: iterate over its stream first")
        return found

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        if self._started is not None:
            started, self._started = self._started, None
            yield started
        async for event in self._events:
            yield event

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        async for event in self._events:
            if isinstance(event, TextDelta) and event.text:
                yield event.text

    async def cancel(self) -> None:
        await self._cancel()

    async def close(self) -> None:
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()


async def whole(stream: AsyncAnswerStream) -> Answer:
    """Read a stream to its end and return the answer. Raises BackendError if the stream fails."""
    async with stream:
        async for _ in stream.events():
            pass
    return stream.answer
