"""Choices of chat completions: converts answer events to deltas, and sums deltas to a message.

The message is the sum of the deltas that a stream's chunks have, so the two cannot differ. Knows
OpenAI's shapes; neither ids nor server-sent events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Literal

from typing_extensions import TypedDict

from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerStarted,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from semantic.ports.serving import ServingPort
from semantic_server.http.errors import check_finished
from semantic_server.http.openai.fields import Json
from semantic_server.http.openai.replies import (
    ChatTokenLogprob,
    IndexedEvent,
    ReplyKind,
    chat_logprobs,
)
from semantic_server.http.request_fields.client_tools import custom_call

FinishReason = Literal["stop", "length", "tool_calls"]


class FunctionDelta(TypedDict, total=False):
    """More of a function call: its name once, then its arguments in fragments."""

    name: str
    arguments: str


class CustomCall(TypedDict):
    """The call of a custom tool."""

    name: str
    input: str


class CallDelta(TypedDict, total=False):
    """More of tool call number `index`; its first delta has the id. A custom tool's is whole."""

    index: int
    id: str
    type: Literal["function", "custom"]
    function: FunctionDelta
    custom: CustomCall


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

    def as_object(self) -> Json:
        """The member of a chunk's `choices`."""
        return {
            "index": self.index,
            "delta": self.message,
            "logprobs": _logprobs(self.logprobs),
            "finish_reason": self.finish_reason,
        }


# Events to deltas


async def chat_deltas(
    events: AsyncGenerator[IndexedEvent, None],
    serving: ServingPort,
    custom: frozenset[str] = frozenset(),
) -> AsyncGenerator[ChatDelta, None]:
    """The deltas of all choices as their events arrive; `custom` are the names of custom tools.

    Raises WireError for an answer that fails; `events` are closed in any case.
    """
    choices: dict[int, _Choice] = {}
    async with aclosing(events):
        async for index, event in events:
            choice = choices.setdefault(index, _Choice(index, custom))
            for delta in await choice.deltas(event, serving):
                yield delta


@dataclass(slots=True)
class _Choice:
    """The state of a choice that its finish reason depends on.

    The call of a custom tool is `held` until it is whole: its input depends on all arguments.
    """

    index: int
    custom: frozenset[str]
    has_text: bool = False
    has_calls: bool = False
    held: ToolCallStarted | None = None
    arguments: list[str] = field(default_factory=list)

    async def deltas(self, event: AnswerEvent, serving: ServingPort) -> list[ChatDelta]:
        """The deltas of `event`; none for an event that this wire does not report."""
        if self.held is not None and isinstance(event, ToolCallDelta):
            self.arguments.append(event.arguments)
            return []
        whole = self._held_call() if isinstance(event, ToolCallStarted | AnswerEnd) else []
        if isinstance(event, ToolCallStarted) and event.name in self.custom:
            self.held, self.has_calls = event, True
            return whole
        return [*whole, *await self._deltas(event, serving)]

    async def _deltas(self, event: AnswerEvent, serving: ServingPort) -> list[ChatDelta]:
        match event:
            case AnswerStarted():
                return [ChatDelta(self.index, {"role": "assistant"})]
            case TextDelta():
                return [await self._text(event, serving)]
            case ReasoningDelta(text):
                return [ChatDelta(self.index, {"reasoning": text, "reasoning_content": text})]
            case ToolCallStarted() | ToolCallDelta():
                return [self._call(event)]
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

    def _held_call(self) -> list[ChatDelta]:
        held = self.held
        if held is None:
            return []
        call_id, text = custom_call(held.id, "".join(self.arguments))
        self.held, self.arguments = None, []
        custom: CustomCall = {"name": held.name, "input": text}
        call: CallDelta = {"index": held.index, "id": call_id, "type": "custom", "custom": custom}
        return [ChatDelta(self.index, {"tool_calls": [call]})]

    def _end(self, end: AnswerEnd) -> list[ChatDelta]:
        check_finished(end)
        reason: FinishReason = "stop"
        if end.reason == "length":
            # Also after tool calls: the last one may be cut, and must not be executed. So may one
            # that a stop string cut.
            reason = "length"
        elif self.has_calls and not (end.reason == "stop" and end.stop_string is not None):
            reason = "tool_calls"
        last = ChatDelta(self.index, finish_reason=reason, usage=end.usage)
        if self.has_text or self.has_calls:
            return [last]
        # The content of an empty answer is ""; null is the content of a message of tool calls.
        return [ChatDelta(self.index, {"content": ""}), last]


# The sum of deltas


@dataclass(slots=True)
class _Call:
    """The sum of a tool call's deltas."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    custom: CustomCall | None = None

    def add(self, delta: CallDelta) -> None:
        self.custom = delta.get("custom")
        function = delta.get("function", FunctionDelta())
        self.id += delta.get("id", "")
        self.name += function.get("name", "")
        self.arguments += function.get("arguments", "")

    def as_object(self) -> Json:
        if self.custom is not None:
            return {"id": self.id, "type": "custom", "custom": self.custom}
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

    def as_object(self, index: int) -> Json:
        """The member of `choices`, without the fields that the message does not have."""
        content = "".join(self.contents) if self.contents else None
        message: Json = {"role": "assistant", "content": content, "refusal": None}
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


def _logprobs(content: Sequence[ChatTokenLogprob]) -> Json | None:
    return {"content": list(content), "refusal": None} if content else None


CHAT_REPLY: Final = ReplyKind("chatcmpl", "chat.completion", "chat.completion.chunk", _Message)
