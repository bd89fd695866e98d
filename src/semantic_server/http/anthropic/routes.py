"""POST /v1/messages and /v1/messages/count_tokens.

Parses the request, lets the served model answer, and replies in Anthropic's format.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from semantic.application.models.model_names import unknown_model
from semantic.domain.answer import AnswerEvent
from semantic.domain.errors import ModelNotFoundError, SemanticError
from semantic.ports.serving import Ask, ServedModel
from semantic_server.http.anthropic.reply import Json, MessageWriter, ResponseStyle
from semantic_server.http.anthropic.request import read_chat, read_request
from semantic_server.http.anthropic.validators import validators
from semantic_server.http.context import serving_of
from semantic_server.http.errors import (
    FieldError,
    WireError,
    anthropic_error,
    problem_of,
    request_id_of,
)
from semantic_server.http.identity import tenant_of
from semantic_server.http.logs import WarnOnce
from semantic_server.http.openai.requests import caller_of
from semantic_server.http.request_body import on_thread, read_json
from semantic_server.http.streaming import (
    StartedStream,
    event_stream,
    sse_event,
    start_stream,
    until_disconnect,
)

logger = logging.getLogger("semantic.server")

router = APIRouter(tags=["Anthropic"])
_warnings = WarnOnce()
_INTERLEAVED = "interleaved-thinking-"


def _described(reply: str, *required: str, streams: bool = False) -> dict[str, object]:
    """The OpenAPI description of a route; `required` are integers."""
    body = {
        "type": "object",
        "description": "As Anthropic documents it.",
        "required": ["model", "messages", *required],
        "properties": {
            "model": {"type": "string"},
            "messages": {"type": "array", "items": {"type": "object"}, "minItems": 1},
            **{name: {"type": "integer", "minimum": 0} for name in required},
        },
    }
    replies = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        replies["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": reply, "content": replies}},
    }


@router.post(
    "/v1/messages",
    openapi_extra=_described("The message, or a stream of events.", "max_tokens", streams=True),
)
async def create_message(request: Request) -> Response:
    """Generate a message, as one reply or, with `stream`, as events."""
    serving_of(request)  # 503 before the body is read
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


@router.post("/v1/messages/count_tokens", openapi_extra=_described("How many tokens."))
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation as a prompt."""
    serving_of(request)  # 503 before the body is read
    body = await read_json(request)
    serving = serving_of(request, body.get("model"))
    _require_model(body, serving.model)
    chat = await on_thread(request, read_chat, validators(), body, _warnings)
    tokens = await until_disconnect(request, serving.tokenize(chat, tenant=tenant_of(request)))
    return JSONResponse({"input_tokens": len(tokens)})


def _require_model(body: Mapping[str, object], model: ServedModel) -> None:
    name = body.get("model")
    if not isinstance(name, str):
        raise FieldError("model: expected a model's name", param="model")
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
