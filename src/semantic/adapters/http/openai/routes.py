"""/v1/chat/completions and /v1/completions: a body becomes asks, their answers become a reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from semantic.adapters.http.context import serving_of, settings_of
from semantic.adapters.http.identity import agent_of, identity_of, tenant_of
from semantic.adapters.http.openai.caller import Caller
from semantic.adapters.http.openai.chat_pieces import chat_pieces
from semantic.adapters.http.openai.chat_reply import ChatChunks, chat_reply
from semantic.adapters.http.openai.chat_request import chat_request
from semantic.adapters.http.openai.choices import together
from semantic.adapters.http.openai.completion_pieces import completion_pieces
from semantic.adapters.http.openai.completion_reply import CompletionChunks, completion_reply
from semantic.adapters.http.openai.completion_request import completion_request
from semantic.adapters.http.openai.description import described
from semantic.adapters.http.openai.reply_head import new_head
from semantic.adapters.http.openai.replying import streamed
from semantic.adapters.http.openai.usage import UsageSum
from semantic.adapters.http.request_body import read_json
from semantic.adapters.http.streaming import until_disconnect
from semantic.ports.serving import ServedModel

router: Final = APIRouter(tags=["openai"])

R = TypeVar("R")


@router.post("/v1/chat/completions", openapi_extra=described("messages"))
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation, as OpenAI's chat completions do."""
    body = await read_json(request)
    serving = serving_of(request)
    asked = await _read(chat_request, request, body, serving.model)
    head, usage = new_head("chatcmpl", serving.model), UsageSum(n=len(asked.asks))
    pieces = chat_pieces(together(serving, asked.asks), serving)
    if asked.options.stream:
        return await streamed(request, pieces, ChatChunks(head, asked.options, usage))
    return JSONResponse(await until_disconnect(request, chat_reply(pieces, head, usage)))


@router.post("/v1/completions", openapi_extra=described("prompt"))
async def create_completion(request: Request) -> Response:
    """Goes on with a text or with tokens, as OpenAI's completions do."""
    body = await read_json(request)
    serving = serving_of(request)
    asked = await _read(completion_request, request, body, serving.model)
    head, usage = new_head("cmpl", serving.model), UsageSum(asked.n)
    pieces = completion_pieces(together(serving, asked.asks), serving, asked)
    if asked.options.stream:
        return await streamed(request, pieces, CompletionChunks(head, asked.options, usage))
    return JSONResponse(await until_disconnect(request, completion_reply(pieces, head, usage)))


async def _read(
    read: Callable[[Mapping[str, object], ServedModel, Caller], R],
    request: Request,
    body: Mapping[str, object],
    model: ServedModel,
) -> R:
    """What `body` asks. It is read beside the event loop, where it holds up nobody: bodies may be
    large, and the first one imports the SDK."""
    caller = Caller(
        agent_of(request, body),
        tenant_of(request),
        settings_of(request).force_usage,
        identity_of(request, body),
    )
    return await to_thread.run_sync(read, body, model, caller)
