"""Replies of chat completions: answer events to deltas, deltas to chunks or to one object.

The object is the sum of the deltas that a stream's chunks have, so the two cannot differ. Knows
OpenAI's shapes; neither ids nor server-sent events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Literal

from typing_extensions import TypedDict

from semantic.adapters.http.openai.replies import (
    ChunkFactory,
    IndexedEvent,
    ReplyMetadata,
    UsageSum,
    check_finished,
    unreadable_call,
    usage_object,
)
from semantic.adapters.http.openai.requests import StreamOptions
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

_CHUNK: Final = "chat.completion.chunk"
_OBJECT: Final = "chat.completion"

FinishReason = Literal["stop", "length", "tool_calls"]


class FunctionDelta(TypedDict, total=False):
    """More of a function call: its name once, then its arguments in fragments."""

    name: str
    arguments: str


class CallDelta(TypedDict, total=False):
    """More of tool call number `index`; its first delta has the id."""

    index: int
    id: str
    type: Literal["function"]
    function: FunctionDelta


class MessageDelta(TypedDict, total=False):
    """What a chunk adds to a message. Reasoning has both names that clients read."""

    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[CallDelta]


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What is new in choice number `index`. The last delta of a choice has its `usage`."""

    index: int
    message: MessageDelta = field(default_factory=MessageDelta)
    logprobs: tuple[ChatTokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


# Events to deltas


async def chat_deltas(
    events: AsyncGenerator[IndexedEvent, None], serving: ServingPort
) -> AsyncGenerator[ChatDelta, None]:
    """The deltas of all choices as their events arrive.

    Raises WireError for an answer that fails; `events` are closed in any case.
    """
    choices: dict[int, _Choice] = {}
    async with aclosing(events):
        async for index, event in events:
            choice = choices.setdefault(index, _Choice(index))
            for delta in await choice.deltas(event, serving):
                yield delta


@dataclass(slots=True)
class _Choice:
    """The state of a choice that its finish reason depends on."""

    index: int
    has_text: bool = False
    has_calls: bool = False

    async def deltas(self, event: AnswerEvent, serving: ServingPort) -> list[ChatDelta]:
        """The deltas of `event`; none for an event that this wire does not report."""
        match event:
            case AnswerStarted():
                return [ChatDelta(self.index, {"role": "assistant"})]
            case TextDelta():
                return [await self._text(event, serving)]
            case ReasoningDelta(text):
                return [ChatDelta(self.index, {"reasoning": text, "reasoning_content": text})]
            case ToolCallStarted() | ToolCallDelta():
                return [self._call(event)]
            case ToolCallFailed():
                raise unreadable_call(event)
            case AnswerEnd():
                return self._end(event)
            case _:
                return []

    async def _text(self, event: TextDelta, serving: ServingPort) -> ChatDelta:
        self.has_text = self.has_text or bool(event.text)
        message: MessageDelta = {"content": event.text} if event.text else {}
        logprobs = await chat_logprobs(serving, event.logprobs) if event.logprobs else ()
        return ChatDelta(self.index, message, tuple(logprobs))

    def _call(self, event: ToolCallStarted | ToolCallDelta) -> ChatDelta:
        self.has_calls = True
        call: CallDelta = {"index": event.index}
        if isinstance(event, ToolCallStarted):
            call |= {"id": event.id, "type": "function"}
            call["function"] = {"name": event.name, "arguments": ""}
        else:
            call["function"] = {"arguments": event.arguments}
        return ChatDelta(self.index, {"tool_calls": [call]})

    def _end(self, end: AnswerEnd) -> list[ChatDelta]:
        check_finished(end)
        reason: FinishReason = "stop"
        if end.reason == "length":
            # Also after tool calls: the last one may be cut, and must not be executed.
            reason = "length"
        elif self.has_calls:
            reason = "tool_calls"
        last = ChatDelta(self.index, finish_reason=reason, usage=end.usage)
        if self.has_text or self.has_calls:
            return [last]
        # The content of an empty answer is ""; null is the content of a message of tool calls.
        return [ChatDelta(self.index, {"content": ""}), last]


# Deltas to chunks


class ChatChunks:
    """Serializes deltas as the chunks of a stream."""

    def __init__(self, metadata: ReplyMetadata, options: StreamOptions, usage: UsageSum) -> None:
        self._chunks = ChunkFactory(_CHUNK, metadata, options, usage)
        self.last = self._chunks.last

    def chunk(self, delta: ChatDelta) -> dict[str, object]:
        """The chunk with `delta`."""
        choice: dict[str, object] = {
            "index": delta.index,
            "delta": delta.message,
            "logprobs": _logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        return self._chunks.chunk(choice, delta.index, delta.usage)


def _logprobs(content: Sequence[ChatTokenLogprob]) -> dict[str, object] | None:
    return {"content": list(content), "refusal": None} if content else None


# Deltas to one object


async def chat_reply(
    deltas: AsyncIterator[ChatDelta], metadata: ReplyMetadata, usage: UsageSum
) -> dict[str, object]:
    """The chat completion object that `deltas` add up to."""
    messages: dict[int, _Message] = {}
    async for delta in deltas:
        messages.setdefault(delta.index, _Message()).add(delta)
        if delta.usage is not None:
            usage.add(delta.index, delta.usage)
    choices = [messages[index].choice(index) for index in sorted(messages)]
    totals = usage_object(usage.total())
    return metadata.as_object(_OBJECT) | {"choices": choices, "usage": totals}


@dataclass(slots=True)
class _Call:
    """The sum of a tool call's deltas."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def add(self, delta: CallDelta) -> None:
        function = delta["function"]
        self.id += delta.get("id", "")
        self.name += function.get("name", "")
        self.arguments += function.get("arguments", "")

    def as_object(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class _Message:
    """The sum of a choice's deltas."""

    contents: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: ChatDelta) -> None:
        if "content" in delta.message:
            self.contents.append(delta.message["content"])
        if "reasoning" in delta.message:
            self.reasoning.append(delta.message["reasoning"])
        for call in delta.message.get("tool_calls", []):
            self.calls.setdefault(call["index"], _Call()).add(call)
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason

    def choice(self, index: int) -> dict[str, object]:
        """The member of `choices`. Fields that a message does not have are absent, as OpenAI's."""
        content = "".join(self.contents) if self.contents else None
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            reasoning = "".join(self.reasoning)
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if self.calls:
            calls = [self.calls[number].as_object() for number in sorted(self.calls)]
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(self.logprobs),
            "finish_reason": self.finish_reason,
        }
