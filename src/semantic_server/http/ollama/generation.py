"""POST /api/chat and /api/generate: parse the body, let the served model answer, reply in lines."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from semantic.domain.answer import AnswerEvent, TextDelta
from semantic.domain.errors import SemanticError
from semantic.ports.serving import ServedModel, ServingPort
from semantic_server.http.context import context_of, serving_of, settings_of
from semantic_server.http.errors import WireError, ollama_error, problem_of, request_id_of
from semantic_server.http.ollama.reply import LoadReason, ReplyWriter, Route
from semantic_server.http.ollama.request import (
    OllamaRequest,
    chat_request,
    generate_request,
    untagged,
)
from semantic_server.http.openai.fields import Json
from semantic_server.http.openai.replies import ChatTokenLogprob, chat_logprobs
from semantic_server.http.openai.requests import Caller, caller_of
from semantic_server.http.request_body import on_thread, read_json
from semantic_server.http.streaming import (
    NDJSON,
    StartedStream,
    event_stream,
    json_line,
    start_stream,
    until_disconnect,
)

logger = logging.getLogger("semantic.server")

router: Final = APIRouter(tags=["Ollama"])

Parse = Callable[[Mapping[str, object], ServedModel, Caller], OllamaRequest]


def described(required: str, optional: str) -> dict[str, object]:
    """The OpenAPI description of a route, whose body may have the field `optional`."""
    body = {
        "type": "object",
        "description": "As Ollama documents it; fields that are not supported are a 400.",
        "required": [required],
        "properties": {required: {"type": "string"}, optional: {}, "stream": {"type": "boolean"}},
    }
    content = {
        "application/json": {"schema": {"type": "object"}},
        NDJSON: {"schema": {"type": "string"}},
    }
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "The reply, or its parts.", "content": content}},
    }


@router.post("/api/chat", openapi_extra=described("model", "messages"))
async def chat(request: Request) -> Response:
    """Answers a conversation, as Ollama does; a stream unless `stream` is false."""
    return await _respond(request, "chat", chat_request)


@router.post("/api/generate", openapi_extra=described("model", "prompt"))
async def generate(request: Request) -> Response:
    """Answers a prompt, as Ollama does; a stream unless `stream` is false."""
    return await _respond(request, "generate", generate_request)


async def _respond(request: Request, route: Route, parse: Parse) -> Response:
    began = time.perf_counter_ns()
    body = await read_json(request)
    name = untagged(body.get("model"))
    serving = serving_of(request, name)
    parsed = await on_thread(request, parse, body, serving.model, caller_of(request, body))
    if parsed.keep_alive is not None:
        _keep(request, name, parsed.keep_alive)
    messages = parsed.messages
    writer = ReplyWriter(route, parsed.model, time.perf_counter_ns, began, messages=messages)
    if parsed.ask is None:
        reason = await until_disconnect(request, _loaded(request, name, parsed.keep_alive))
        return _without_answer(writer.loaded(reason), stream=parsed.stream)
    events = await start_stream(request, serving.answer(parsed.ask))
    if not parsed.stream:
        return JSONResponse(await until_disconnect(request, _whole(events, writer, serving)))
    lines = _lines(request, events, writer, serving)
    return event_stream(request, lines, lambda: json_line(writer.idle()), NDJSON)


def _keep(request: Request, name: str, seconds: float) -> None:
    """Unload the model, if it is one of several, after so many seconds without a request.

    On a server with keys models are all tenants': how long they stay is a setting.
    """
    models = context_of(request).models
    if models is not None and not settings_of(request).api_keys:
        models.keep(name, None if math.isinf(seconds) else seconds)


async def _loaded(request: Request, name: str, keep_alive: float | None) -> LoadReason:
    """Load the model that a request without a prompt names, or unload it with a `keep_alive` of 0.

    One that a server has alone stays loaded.
    """
    models = context_of(request).models
    if models is None:
        return "load"
    if keep_alive == 0 and not settings_of(request).api_keys:
        await models.unload(name)
        return "unload"
    await models.load(name)
    return "load"


def _without_answer(reply: Json, *, stream: bool) -> Response:
    return Response(json_line(reply), media_type=NDJSON) if stream else JSONResponse(reply)


async def _whole(
    events: StartedStream[AnswerEvent], writer: ReplyWriter, serving: ServingPort
) -> Json:
    async with aclosing(events):
        async for event in events:
            writer.write(event, await _logprobs(event, serving))
    return writer.reply()


async def _lines(
    request: Request, events: StartedStream[AnswerEvent], writer: ReplyWriter, serving: ServingPort
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            async for event in events:
                for part in writer.write(event, await _logprobs(event, serving)):
                    yield json_line(part)
        except (SemanticError, WireError) as error:
            logger.warning(
                "request %s failed in its stream: %s", request_id_of(request.scope), error
            )
            yield json_line(ollama_error(problem_of(error)))


async def _logprobs(event: AnswerEvent, serving: ServingPort) -> list[ChatTokenLogprob]:
    if not isinstance(event, TextDelta) or not event.logprobs:
        return []
    return await chat_logprobs(serving, event.logprobs)
