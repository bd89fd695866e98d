"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from semantic.application.chat.object_text import ObjectText
from semantic.application.models.model_names import unknown_model
from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerReason,
    AnswerStarted,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from semantic.domain.errors import ModelNotFoundError, SemanticError
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.serving import Ask, ServedModel
from semantic_server.http.answer_records import usage_extension
from semantic_server.http.anthropic.conversation import signature_of, signature_with_text
from semantic_server.http.anthropic.request import read_chat, read_request
from semantic_server.http.anthropic.validators import validators
from semantic_server.http.context import (
    StartedStream,
    event_stream,
    serving_of,
    start_stream,
    until_disconnect,
)
from semantic_server.http.errors import (
    FieldError,
    WireError,
    anthropic_error,
    check_finished,
    problem_of,
    request_id_of,
    sse_event,
)
from semantic_server.http.identity import tenant_of
from semantic_server.http.logs import WarnOnce
from semantic_server.http.openai.requests import caller_of
from semantic_server.http.request_body import described, on_thread, read_json

_NO_OBJECT = "raw_arguments"
"""The field that holds a tool call's arguments if they are not a JSON object."""

Json = dict[str, object]


class _Input:
    """The input of a tool call, which arrives in parts. Arguments that are not a JSON object become
    one field of an object."""

    def __init__(self) -> None:
        self._object = ObjectText()
        self._written: list[str] = []
        self._held = ""  # the end of the object, which later text may invalidate

    def grow(self, arguments: str) -> str:
        self._written.append(arguments)
        was_closed = self._object.is_closed
        certain = self._object.push(arguments)
        if not was_closed and self._object.is_closed:
            certain, self._held = certain[:-1], certain[-1]
        return certain

    def end(self, *, cut: bool) -> str:
        written = "".join(self._written)
        if self._held and not written[self._object.n_taken :].strip():
            return self._held
        if self._held:
            return self._object.reopening(_NO_OBJECT, written)
        if not written or (cut and not self._object.is_broken):
            return ""
        return self._object.closing(_NO_OBJECT, written)


@dataclass(slots=True)
class _Block:
    kind: Literal["text", "thinking", "tool_use"]
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    input: _Input = field(default_factory=_Input)

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class ResponseStyle:
    """Settings of a reply. If `max_tokens` is 0, the server computes only the prompt."""

    max_tokens: int

    omit_thinking: bool = False
    report_context_edits: bool = False

    @property
    def prompt_only(self) -> bool:
        return self.max_tokens == 0


class MessageWriter:
    """Builds one message. `write` takes an answer's events in order, and returns what to send."""

    def __init__(self, message_id: str, model: str, style: ResponseStyle) -> None:
        self._style = style
        self._blocks: list[_Block] = []
        self._open = False  # True if the last block may still grow
        self._message: Json = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }

    def write(self, event: AnswerEvent) -> list[Json]:
        """Return the events to send for `event`. Raises WireError."""
        match event:
            case AnswerStarted():
                self._message["usage"] = usage_at_start(event.prompt_tokens)
                return [{"type": "message_start", "message": dict(self._message)}]
            case AnswerEnd():
                return self._end(event)
        return [] if self._style.prompt_only else self._piece(event)

    def message(self) -> Json:
        """Return the complete message. Call this after the answer's last event."""
        return {**self._message, "content": [self._content(block) for block in self._blocks]}

    # Content

    def _piece(self, event: AnswerEvent) -> list[Json]:
        match event:
            case TextDelta(text) if text:
                return [*self._block("text"), *self._grow(text, "text_delta", "text")]
            case ReasoningDelta(text) if text:
                opened = self._block("thinking")
                return [*opened, *self._grow(text, "thinking_delta", "thinking")]
            case ToolCallStarted():
                return self._begin(_Block("tool_use", event.id, event.name))
            case ToolCallDelta():
                return self._grow_input(self._blocks[-1].input.grow(event.arguments))
        return []

    def _block(self, kind: Literal["text", "thinking"]) -> list[Json]:
        if self._open and self._blocks[-1].kind == kind:
            return []
        return self._begin(_Block(kind))

    def _begin(self, block: _Block) -> list[Json]:
        stopped = self._stop_block()
        self._blocks.append(block)
        self._open = True
        empty = _empty(block)
        return [*stopped, self._event("content_block_start", content_block=empty)]

    def _grow(self, text: str, delta: str, key: str) -> list[Json]:
        block = self._blocks[-1]
        block.parts.append(text)
        if block.kind == "thinking" and self._style.omit_thinking:
            return []
        return [self._event("content_block_delta", delta={"type": delta, key: text})]

    def _grow_input(self, text: str) -> list[Json]:
        return self._grow(text, "input_json_delta", "partial_json") if text else []

    def _stop_block(self, *, cut: bool = False) -> list[Json]:
        if not self._open:
            return []
        self._open = False
        block, stop = self._blocks[-1], self._event("content_block_stop")
        if block.kind == "tool_use":
            return [*self._grow_input(block.input.end(cut=cut)), stop]
        if block.kind != "thinking":
            return [stop]
        delta = {"type": "signature_delta", "signature": self._signature(self._blocks[-1])}
        return [self._event("content_block_delta", delta=delta), stop]

    def _event(self, kind: str, **fields: object) -> Json:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}

    # The end

    def _end(self, end: AnswerEnd) -> list[Json]:
        check_finished(end)
        stop_reason = self._stop_reason(end)
        stop_sequence = end.stop_string if stop_reason == "stop_sequence" else None
        usage = usage_of(end.usage, answered=not self._style.prompt_only)
        self._message |= {
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }
        delta: Json = {
            "type": "message_delta",
            "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
            "usage": usage,
        }
        if self._style.report_context_edits:
            edits: Json = {"context_management": {"applied_edits": []}}
            self._message |= edits
            delta |= edits
        stopped = self._stop_block(cut=end.reason != "tool_calls")
        return [*stopped, delta, {"type": "message_stop"}]

    def _stop_reason(self, end: AnswerEnd) -> str:
        if self._style.prompt_only:
            return "max_tokens"
        if end.reason == "stop":
            return "end_turn" if end.stop_string is None else "stop_sequence"
        if end.reason == "length" and end.usage.completion < self._style.max_tokens:
            return "model_context_window_exceeded"  # the context was full
        return _STOP_REASONS[end.reason]

    def _content(self, block: _Block) -> Json:
        match block.kind:
            case "text":
                return {"type": "text", "text": block.text}
            case "thinking":
                shown = "" if self._style.omit_thinking else block.text
                signature = self._signature(block)
                return {"type": "thinking", "thinking": shown, "signature": signature}
            case "tool_use":
                # Parse truncated arguments as far as possible, as streaming clients do.
                arguments = from_json(block.text or "{}", allow_partial=True)
                return {**_empty(block), "input": arguments}

    def _signature(self, block: _Block) -> str:
        return (
            signature_with_text(block.text)
            if self._style.omit_thinking
            else signature_of(block.text)
        )


_STOP_REASONS: dict[AnswerReason, str] = {"length": "max_tokens", "tool_calls": "tool_use"}


def _empty(block: _Block) -> Json:
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "tool_use":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def usage_at_start(prompt_tokens: int) -> dict[str, object]:
    """Return the usage object of a stream's first event."""
    return _usage(prompt_tokens, read=0, created=0, output=0, thinking=0)


def usage_of(usage: Usage, *, answered: bool = True) -> dict[str, object]:
    """Return the usage object of a complete answer. `answered` is False if the reply has no
    content. `input_tokens` is at least 1, because some clients treat 0 as missing."""
    whole_blocks = (usage.prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    created = max(0, whole_blocks - usage.cached) if usage.kept else 0
    usage_body = _usage(
        usage.prompt - usage.cached - created,
        read=usage.cached,
        created=created,
        output=usage.completion if answered else 0,
        thinking=usage.reasoning if answered else 0,
    )
    return usage_body | usage_extension(usage)


def _usage(rest: int, *, read: int, created: int, output: int, thinking: int) -> dict[str, object]:
    return {
        "input_tokens": rest,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": created,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": thinking},
    }


logger = logging.getLogger("semantic.server")

router = APIRouter(tags=["Anthropic"])
_warnings = WarnOnce()
_INTERLEAVED = "interleaved-thinking-"


def _described(reply: str, *required: str, streams: bool = False) -> dict[str, object]:
    return described(
        {
            "model": {"type": "string"},
            "messages": {"type": "array", "items": {"type": "object"}, "minItems": 1},
            **{name: {"type": "integer", "minimum": 0} for name in required},
        },
        {},
        reply,
        body="As Anthropic documents it.",
        stream="text/event-stream" if streams else None,
    )


@router.post(
    "/v1/messages",
    openapi_extra=_described("The message, or a stream of events.", "max_tokens", streams=True),
)
async def create_message(request: Request) -> Response:
    """Generate a message, as one reply or, with `stream`, as events."""
    serving_of(request)  # 503 before reading the body
    body = await read_json(request)
    serving = serving_of(request, body.get("model"))
    _require_model(body, serving.model)
    betas = request.headers.getlist("anthropic-beta")
    interleaved = any(_INTERLEAVED in one for one in betas)
    read = partial(read_request, interleaved=interleaved)
    parsed = await on_thread(request, read, validators(), body, serving.model.sampling, _warnings)
    caller = caller_of(request, body)
    ask = Ask(
        parsed.chat,
        parsed.sampling,
        max(1, parsed.max_tokens),
        caller.agent,
        caller.tenant,
        caller.identity,
        parsed.thinking_tokens,
        caller.keep,
        hints=caller.hints,
    )
    stream = await start_stream(request, serving.answer(ask))
    style = ResponseStyle(parsed.max_tokens, parsed.omit_thinking, parsed.report_context_edits)
    writer = MessageWriter(f"msg_{uuid.uuid4().hex}", serving.model.id, style)
    if parsed.stream:
        return event_stream(request, _events(request, stream, writer), _ping)
    return JSONResponse(await until_disconnect(request, _message(stream, writer)))


@router.post("/v1/messages/count_tokens", openapi_extra=_described("Number of tokens."))
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation as a prompt."""
    serving_of(request)  # 503 before reading the body
    body = await read_json(request)
    serving = serving_of(request, body.get("model"))
    _require_model(body, serving.model)
    chat = await on_thread(request, read_chat, validators(), body, _warnings)
    tokens = await until_disconnect(request, serving.tokenize(chat, tenant=tenant_of(request)))
    return JSONResponse({"input_tokens": len(tokens)})


def _require_model(body: Mapping[str, object], model: ServedModel) -> None:
    name = body.get("model")
    if not isinstance(name, str):
        raise FieldError("model must be a model's name", param="model")
    if not model.accepts(name):
        raise ModelNotFoundError(f"model: {unknown_model(name, model.names)}")


async def _message(stream: StartedStream[AnswerEvent], writer: MessageWriter) -> Json:
    async with aclosing(stream):
        async for event in stream:
            writer.write(event)
    return writer.message()


async def _events(
    request: Request, stream: StartedStream[AnswerEvent], writer: MessageWriter
) -> AsyncGenerator[bytes, None]:
    async with aclosing(stream):
        try:
            async for event in _message_events(stream, writer):
                yield sse_event(event, str(event["type"]))
        except (SemanticError, WireError) as error:
            request_id = request_id_of(request.scope)
            logger.warning("request %s failed in its stream: %s", request_id, error)
            yield sse_event(anthropic_error(problem_of(error), request_id), "error")


async def _message_events(
    stream: StartedStream[AnswerEvent], writer: MessageWriter
) -> AsyncIterator[Json]:
    async for answer_event in stream:
        for event in writer.write(answer_event):
            yield event


def _ping() -> bytes:
    return sse_event({"type": "ping"}, "ping")
