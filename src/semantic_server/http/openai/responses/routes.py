"""/v1/responses: create, retrieve and delete responses, or list their input."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import JSONResponse, Response

from semantic.domain.answer import AnswerEnd, AnswerEvent, AnswerStarted, TextDelta
from semantic.domain.errors import SemanticError
from semantic.ports.serving import ServingPort
from semantic.ports.store import ResponsesPort
from semantic_server.http.context import (
    StartedStream,
    event_stream,
    heartbeat,
    serving_of,
    start_stream,
    until_disconnect,
)
from semantic_server.http.errors import FieldError, WireError, problem_of, request_id_of, sse_event
from semantic_server.http.identity import route_of, tenant_of
from semantic_server.http.openai.fields import Json
from semantic_server.http.openai.replies import ChatTokenLogprob, chat_logprobs, openai_body
from semantic_server.http.openai.requests import Caller, caller_of
from semantic_server.http.openai.responses import stored
from semantic_server.http.openai.responses.request import ResponseRequest, response_request
from semantic_server.http.openai.responses.stored import put_response
from semantic_server.http.openai.responses.writer import ResponseWriter
from semantic_server.http.request_body import on_thread, read_json

logger = logging.getLogger("semantic.server")

_LAST: Final = ("response.completed", "response.incomplete", "response.failed")


class ResponseReply:
    """The reply to one request. Call either `events` or `body`, and only once."""

    def __init__(
        self,
        parsed: ResponseRequest,
        answer: StartedStream[AnswerEvent] | AsyncGenerator[AnswerEvent, None],
        serving: ServingPort,
        store: ResponsesPort,
        route: str = "",
    ) -> None:
        """`route` is the routing key of a fleet."""
        self._parsed = parsed
        self._answer = answer
        self._serving = serving
        self._store = store
        self._writer = ResponseWriter(parsed, serving.model.id, route)
        self._agent = ""
        self._sequence_number = 0
        self._is_over = False

    async def body(self) -> Json:
        """Return the complete response object. Raises WireError if the answer failed."""
        async with aclosing(self._written()) as written:
            async for _ in written:
                pass
        return self._writer.response

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream. An error is the last event."""
        try:
            async with aclosing(self._written()) as written:
                async for event in written:
                    yield self._numbered(event)
        except (SemanticError, WireError) as error:
            request_id = request_id_of(request.scope)
            logger.warning("request %s failed in its stream: %s", request_id, type(error).__name__)
            for event in self._writer.failed(problem_of(error)):
                yield self._numbered(event)
        finally:
            await self._answer.aclose()

    def heartbeat(self) -> bytes:
        """Return what keeps the connection alive: an event, or a comment after the last event."""
        return heartbeat() if self._is_over else self._numbered(self._writer.heartbeat())

    async def _written(self) -> AsyncGenerator[Json, None]:
        async with aclosing(self._answer):
            async for event in self._answer:
                if isinstance(event, AnswerStarted):
                    self._agent = event.agent_id
                events = self._writer.write(event, await self._logprobs(event))
                # Store after all events but the last: a heartbeat meanwhile shows their items, and
                # the client may continue from the response after the last one.
                last = events[-1:] if isinstance(event, AnswerEnd) else []
                for one in events[: len(events) - len(last)]:
                    yield one
                if last and self._parsed.store:
                    await put_response(self._store, self._parsed, self._writer, self._agent)
                for one in last:
                    yield one

    async def _logprobs(self, event: AnswerEvent) -> list[ChatTokenLogprob]:
        if not (self._parsed.logprobs and isinstance(event, TextDelta) and event.logprobs):
            return []
        return await chat_logprobs(self._serving, event.logprobs)

    def _numbered(self, event: Json) -> bytes:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        self._is_over = event["type"] in _LAST
        return sse_event({**event, "sequence_number": number}, str(event["type"]))


RESPONSES_PATH: Final = "/v1/responses"

router: Final = APIRouter(tags=["openai"], prefix=RESPONSES_PATH)

_NO_COMPACTION: Final = (
    "this server has no /v1/responses/compact: OpenAI's servers encrypt its items, and a "
    "summary is an answer of the model. Request a summary from /v1/responses, and begin the "
    "next conversation with its text"
)


class _ResponseIdConvertor(StringConvertor):
    """Matches any id except `input_tokens` and `compact`, which have routes of their own."""

    regex = "(?!(?:input_tokens|compact)(?:/|$))[^/]+"


register_url_convertor("response_id", _ResponseIdConvertor())

ResponseId = Annotated[str, Path(description="Id of the response, from its body.")]


@router.post("", openapi_extra=openai_body("input"))
async def create_response(request: Request) -> Response:
    """Answer a conversation as a response, which later requests can continue by its id."""
    body = await read_json(request)
    serving, store = serving_of(request, body.get("model")), stored.store_of(request)
    caller = caller_of(request, body)
    with stored.store_errors():
        parsed = await on_thread(request, response_request, body, serving.model, caller, store)
    answer = await start_stream(request, serving.answer(parsed.ask))
    reply = ResponseReply(parsed, answer, serving, store, route_of(request))
    if parsed.stream:
        return event_stream(request, reply.events(request), reply.heartbeat)
    return JSONResponse(await until_disconnect(request, reply.body()))


@router.post("/input_tokens", openapi_extra=openai_body("input"))
async def count_input_tokens(request: Request) -> Response:
    """Return the prompt tokens of a response: of instructions, tools, and the continued history."""
    body = await read_json(request)
    serving, store = serving_of(request, body.get("model")), stored.store_of(request)
    body = {"model": serving.model.id, **body}
    caller = Caller(tenant=tenant_of(request))
    with stored.store_errors():
        parsed = await on_thread(request, response_request, body, serving.model, caller, store)
    counting = serving.tokenize(parsed.ask.prompt, tenant=caller.tenant)
    tokens = await until_disconnect(request, counting)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(tokens)})


@router.post("/compact", include_in_schema=False)
async def compact_response(request: Request) -> Response:
    """Refuse: an opaque summary would change answers invisibly."""
    serving_of(request)
    raise WireError(HTTPStatus.NOT_FOUND, _NO_COMPACTION, code="not_offered")  # not a 5xx


@router.get("/{response_id:response_id}")
async def retrieve_response(
    request: Request,
    response_id: ResponseId,
    stream: Annotated[bool, Query(description="Only false: a stored one is complete.")] = False,
) -> Response:
    """Return a stored response as its request received it."""
    if stream:
        raise FieldError("stream must be false: a stored response is complete", param="stream")
    serving_of(request)  # 503 until the model loads
    found = await stored.get_response(request, response_id)
    return Response(found.body, media_type="application/json")


@router.delete("/{response_id:response_id}")
async def delete_response(request: Request, response_id: ResponseId) -> Response:
    """Delete a stored response. Responses that continue it can no longer be continued."""
    serving_of(request)
    await stored.delete_response(request, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/{response_id:response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: ResponseId,
    after: Annotated[str | None, Query(description="Id of an item.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """Return the input items of the response's own request, without those of previous responses."""
    serving_of(request)
    found = await stored.get_response(request, response_id)
    return JSONResponse(stored.input_list(found, stored.Page(after, limit, order)))
