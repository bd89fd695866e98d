"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response
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
from semantic.domain.chat import Chat
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, ServedModel, ServingPort
from semantic_server.http.context import serving_of
from semantic_server.http.errors import FieldError, check_finished
from semantic_server.http.openai.conversation import (
    answer_format_of,
    choice_among,
    messages_of,
    predicted_of,
    template_options,
    tools_of,
)
from semantic_server.http.openai.fields import (
    CHAT_FIELDS,
    CHAT_REASONING_FIELDS,
    Json,
    known_fields,
)
from semantic_server.http.openai.replies import (
    ChatTokenLogprob,
    IndexedEvent,
    Reply,
    ReplyKind,
    chat_logprobs,
    merged_events,
    openai_body,
)
from semantic_server.http.openai.requests import (
    Caller,
    StreamOptions,
    caller_of,
    check_model,
    choices_of,
    constraint_of,
    number_of_choices,
    sampling_of,
    stream_options,
    without_elements,
)
from semantic_server.http.openai.validators import ChatBody, chat_adapter
from semantic_server.http.request_body import on_thread, read_json, validated
from semantic_server.http.request_fields.client_tools import CUSTOM, custom_call
from semantic_server.http.request_fields.table import at_least_one, object_at, tokens_at

FinishReason = Literal["stop", "length", "tool_calls"]


class FunctionDelta(TypedDict, total=False):
    """A piece of a function call. Only the first piece has the name."""

    name: str
    arguments: str


class CustomCall(TypedDict):
    """The call of a custom tool."""

    name: str
    input: str


class CallDelta(TypedDict, total=False):
    """A piece of tool call `index`. Only the first piece has an id."""

    index: int
    id: str
    type: Literal["function", "custom"]
    function: FunctionDelta
    custom: CustomCall


class MessageDelta(TypedDict, total=False):
    """A chunk's addition to a message. Clients use one of two equal fields for reasoning."""

    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[CallDelta]


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """An addition to choice number `index`. Only a choice's last delta has a `usage`."""

    index: int
    message: MessageDelta = field(default_factory=MessageDelta)
    logprobs: tuple[ChatTokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    def as_object(self) -> Json:
        """Return this delta as a member of a chunk's `choices`."""
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
    """Yield the deltas of all choices, in the order of `events`. `custom` has the names of custom
    tools. Raises WireError for a failed answer."""
    choices: dict[int, _Choice] = {}
    async with aclosing(events):
        async for index, event in events:
            choice = choices.setdefault(index, _Choice(index, custom))
            for delta in await choice.deltas(event, serving):
                yield delta


@dataclass(slots=True)
class _Choice:
    """The state of one choice. `held` is the custom tool's call that is still incomplete."""

    index: int
    custom: frozenset[str]
    has_text: bool = False
    has_calls: bool = False
    held: ToolCallStarted | None = None
    arguments: list[str] = field(default_factory=list)

    async def deltas(self, event: AnswerEvent, serving: ServingPort) -> list[ChatDelta]:
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
            # Also after tool calls: the last one may be incomplete, and the client must not execute
            # it. The same holds for a call that a stop string cut.
            reason = "length"
        elif self.has_calls and not (end.reason == "stop" and end.stop_string is not None):
            reason = "tool_calls"
        last = ChatDelta(self.index, finish_reason=reason, usage=end.usage)
        if self.has_text or self.has_calls:
            return [last]
        # The content of an empty answer is ""; null is for a message that has only tool calls.
        return [ChatDelta(self.index, {"content": ""}), last]


# The sum of deltas


@dataclass(slots=True)
class _Call:
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


_MAX_TOP_LOGPROBS: Final = 20
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completion as one engine request per choice."""

    choices: tuple[Ask, ...]
    options: StreamOptions
    custom: frozenset[str] = frozenset()


def chat_request(body: Mapping[str, object], model: ServedModel, caller: Caller) -> ChatRequest:
    """Parse `body`. Raises InvalidRequestError and ModelNotFoundError."""
    known = known_fields(body, CHAT_FIELDS)
    checked = validated(chat_adapter(), without_elements(known))
    check_model(checked["model"], model)
    sampling = _with_logprobs(sampling_of(checked, known.get("stop"), model), checked)
    chat = _chat(checked, known)
    choices = choices_of(
        [chat],
        number_of_choices(checked.get("n")),
        sampling,
        _max_tokens(checked),
        caller,
        _reasoning(known).thinking_tokens,
        predicted_of(known.get("prediction")),
    )
    custom = frozenset(tool.name for tool in chat.tools if tool.kind == CUSTOM)
    return ChatRequest(choices, stream_options(known, force_usage=caller.force_usage), custom)


def conversation_of(body: Mapping[str, object]) -> Chat:
    """Return the conversation in `body`. Raises InvalidRequestError."""
    known = known_fields(body, CHAT_FIELDS)
    return _chat(validated(chat_adapter(), {"model": "", **without_elements(known)}), known)


def _chat(checked: ChatBody, known: Mapping[str, object]) -> Chat:
    tools = tools_of(known.get("tools", []))
    tools, choice = choice_among(tools, known.get("tool_choice"))
    reasoning = _reasoning(known)
    return Chat(
        messages_of(known["messages"]),
        tools,
        choice,
        parallel_tool_calls=checked.get("parallel_tool_calls", True),
        answer_format=constraint_of(known) or answer_format_of(known.get("response_format")),
        template_options=template_options(
            checked.get("reasoning_effort") or reasoning.effort,
            checked.get("chat_template_kwargs", {}),
            reasoning.thinking_tokens,
        ),
    )


class _Reasoning(NamedTuple):
    effort: str | None
    thinking_tokens: int | None


def _reasoning(known: Mapping[str, object]) -> _Reasoning:
    given = object_at("reasoning", known.get("reasoning", {}))
    fields = known_fields(given, CHAT_REASONING_FIELDS, "reasoning.")
    effort = fields.get("effort")
    if effort is not None and effort not in _EFFORTS:
        path = "reasoning.effort"
        raise FieldError(f"{path}: expected one of {', '.join(_EFFORTS)}", param=path)
    if fields.get("enabled") is False:
        return _Reasoning("none", None)
    tokens = tokens_at("reasoning.max_tokens", fields.get("max_tokens"))
    return _Reasoning(effort if isinstance(effort, str) else None, tokens)


def _max_tokens(body: ChatBody) -> int | None:
    older = at_least_one("max_tokens", body.get("max_tokens"))
    newer = at_least_one("max_completion_tokens", body.get("max_completion_tokens"))
    return older if newer is None else newer


def _with_logprobs(sampling: SamplingParams, body: ChatBody) -> SamplingParams:
    top = body.get("top_logprobs")
    if not body.get("logprobs"):
        if top:
            raise FieldError("top_logprobs requires logprobs to be true", param="top_logprobs")
        return sampling
    top = 0 if top is None else top
    if not 0 <= top <= _MAX_TOP_LOGPROBS:
        raise FieldError(
            f"top_logprobs must be between 0 and {_MAX_TOP_LOGPROBS}, got {top}",
            param="top_logprobs",
        )
    return replace(sampling, logprobs=top)


router: Final = APIRouter(tags=["openai"])


@router.post("/api/v0/chat/completions", include_in_schema=False)
@router.post("/v1/chat/completions", openapi_extra=openai_body("messages"))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, as OpenAI's chat completions do."""
    body = await read_json(request)
    serving = serving_of(request, body.get("model"))
    caller = caller_of(request, body)
    parsed = await on_thread(request, chat_request, body, serving.model, caller)
    deltas = chat_deltas(merged_events(serving, parsed.choices), serving, parsed.custom)
    reply = Reply(CHAT_REPLY, serving.model, parsed.options, n=len(parsed.choices))
    return await reply.respond(request, deltas)
