"""Answers as pieces of a chat completion: what one chunk of a stream says.

Chunks and whole replies are both made of these, so that they cannot disagree. Knows neither ids
nor server-sent events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import TypedDict

from semantic.adapters.http.openai.choices import IndexedEvent
from semantic.adapters.http.openai.failures import check_ended_well, unreadable_call
from semantic.adapters.http.openai.token_logprobs import ChatTokenLogprob, chat_logprobs
from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerStarted,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFailed,
    ToolCallStarted,
    Usage,
)
from semantic.ports.serving import ServingPort

ChatFinish = Literal["stop", "length", "tool_calls"]


class FunctionDelta(TypedDict, total=False):
    """More of a call: its name once, its arguments piece by piece."""

    name: str
    arguments: str


class CallDelta(TypedDict, total=False):
    """More of call number `index`; its first piece has an id."""

    index: int
    id: str
    type: Literal["function"]
    function: FunctionDelta


class Delta(TypedDict, total=False):
    """What a chunk adds to a message. Thoughts have both names that clients read."""

    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[CallDelta]


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """What is new in choice number `index`. `usage` is the choice's, known at its end."""

    index: int
    delta: Delta = field(default_factory=Delta)
    logprobs: tuple[ChatTokenLogprob, ...] = ()
    finish: ChatFinish | None = None
    usage: Usage | None = None


async def chat_pieces(
    events: AsyncGenerator[IndexedEvent, None], serving: ServingPort
) -> AsyncGenerator[ChatPiece, None]:
    """The pieces of all choices as they come.

    Raises WireError for an answer that fails; `events` are closed in any case.
    """
    choices: dict[int, _Choice] = {}
    async with aclosing(events):
        async for index, event in events:
            choice = choices.setdefault(index, _Choice(index))
            for piece in await choice.pieces(event, serving):
                yield piece


@dataclass(slots=True)
class _Choice:
    """What was written of one choice so far, as far as its end depends on it."""

    index: int
    has_text: bool = False
    has_calls: bool = False

    async def pieces(self, event: AnswerEvent, serving: ServingPort) -> list[ChatPiece]:
        """What `event` adds; nothing for an event that this wire does not tell of."""
        match event:
            case AnswerStarted():
                return [ChatPiece(self.index, {"role": "assistant"})]
            case TextDelta():
                return [await self._text(event, serving)]
            case ReasoningDelta(text):
                return [ChatPiece(self.index, {"reasoning": text, "reasoning_content": text})]
            case ToolCallStarted() | ToolCallDelta():
                return [self._call(event)]
            case ToolCallFailed():
                raise unreadable_call(event)
            case AnswerEnd():
                return self._end(event)
            case _:
                return []

    async def _text(self, event: TextDelta, serving: ServingPort) -> ChatPiece:
        self.has_text = self.has_text or bool(event.text)
        delta: Delta = {"content": event.text} if event.text else {}
        logprobs = await chat_logprobs(serving, event.logprobs) if event.logprobs else ()
        return ChatPiece(self.index, delta, tuple(logprobs))

    def _call(self, event: ToolCallStarted | ToolCallDelta) -> ChatPiece:
        self.has_calls = True
        delta: CallDelta = {"index": event.index}
        if isinstance(event, ToolCallStarted):
            delta |= {"id": event.id, "type": "function"}
            delta["function"] = {"name": event.name, "arguments": ""}
        else:
            delta["function"] = {"arguments": event.arguments}
        return ChatPiece(self.index, {"tool_calls": [delta]})

    def _end(self, end: AnswerEnd) -> list[ChatPiece]:
        check_ended_well(end)
        finish: ChatFinish = "stop"
        if end.reason == "length":
            # Also after calls: the last of them may be cut, and must not be acted on.
            finish = "length"
        elif self.has_calls:
            finish = "tool_calls"
        last = ChatPiece(self.index, finish=finish, usage=end.usage)
        if self.has_text or self.has_calls:
            return [last]
        # An answer of nothing is an empty text; null is what a message of calls has.
        return [ChatPiece(self.index, {"content": ""}), last]
