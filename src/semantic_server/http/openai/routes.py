"""/v1/chat/completions and /v1/completions: parse the body, run its choices, reply."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from semantic_server.http.context import serving_of
from semantic_server.http.openai.chat.reply import CHAT_REPLY, chat_deltas
from semantic_server.http.openai.chat.request import chat_request
from semantic_server.http.openai.completions.reply import COMPLETION_REPLY, completion_deltas
from semantic_server.http.openai.completions.request import completion_request
from semantic_server.http.openai.replies import Reply, merged_events
from semantic_server.http.openai.requests import caller_of
from semantic_server.http.request_body import on_thread, read_json

router: Final = APIRouter(tags=["openai"])


def described(required: str, *, streams: bool = True) -> dict[str, object]:
    """The OpenAPI description of a route; its body requires `model` and the field `required`."""
    properties: dict[str, object] = {"model": {"type": "string"}, required: {}}
    content: dict[str, object] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        properties["stream"] = {"type": "boolean"}
        content["text/event-stream"] = {"schema": {"type": "string"}}
    body = {
        "type": "object",
        "description": "As OpenAI documents it; fields that are not supported are a 400.",
        "required": ["model", required],
        "properties": properties,
    }
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": f"The reply{', or a stream of its chunks' if streams else ''}.",
                "content": content,
            }
        },
    }


@router.post("/api/v0/chat/completions", include_in_schema=False)
@router.post("/v1/chat/completions", openapi_extra=described("messages"))
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation, as OpenAI's chat completions do."""
    body = await read_json(request)
    serving = serving_of(request, body.get("model"))
    caller = caller_of(request, body)
    parsed = await on_thread(request, chat_request, body, serving.model, caller)
    deltas = chat_deltas(merged_events(serving, parsed.choices), serving, parsed.custom)
    reply = Reply(CHAT_REPLY, serving.model, parsed.options, n=len(parsed.choices))
    return await reply.respond(request, deltas)


@router.post("/api/v0/completions", include_in_schema=False)
@router.post("/v1/completions", openapi_extra=described("prompt"))
async def create_completion(request: Request) -> Response:
    """Continues a text or token ids, as OpenAI's completions do."""
    body = await read_json(request)
    serving = serving_of(request, body.get("model"))
    caller = caller_of(request, body)
    parsed = await on_thread(request, completion_request, body, serving.model, caller)
    deltas = completion_deltas(merged_events(serving, parsed.choices), serving, parsed)
    reply = Reply(COMPLETION_REPLY, serving.model, parsed.options, n=parsed.n)
    return await reply.respond(request, deltas)
