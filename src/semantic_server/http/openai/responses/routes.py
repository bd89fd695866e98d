"""/v1/responses: create a response; retrieve, delete and list the input of stored ones."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import JSONResponse, Response

from semantic_server.http.context import serving_of
from semantic_server.http.errors import FieldError, WireError
from semantic_server.http.identity import route_of, tenant_of
from semantic_server.http.openai.requests import Caller, caller_of
from semantic_server.http.openai.responses import stored
from semantic_server.http.openai.responses.reply import ResponseReply
from semantic_server.http.openai.responses.request import response_request
from semantic_server.http.openai.routes import described
from semantic_server.http.request_body import on_thread, read_json
from semantic_server.http.streaming import event_stream, start_stream, until_disconnect

RESPONSES_PATH: Final = "/v1/responses"

router: Final = APIRouter(tags=["openai"], prefix=RESPONSES_PATH)

_NO_COMPACTION: Final = (
    "/v1/responses/compact is not offered: its items are encrypted by OpenAI's servers, and a "
    "summary is an answer of the model. Expected a request for a summary to /v1/responses, whose "
    "text begins the next conversation"
)


class _ResponseIdConvertor(StringConvertor):
    """Any id but the names of routes beside `{response_id}`, whose methods are others."""

    regex = "(?!(?:input_tokens|compact)(?:/|$))[^/]+"


register_url_convertor("response_id", _ResponseIdConvertor())

ResponseId = Annotated[str, Path(description="The response's id, as its body had it.")]


@router.post("", openapi_extra=described("input"))
async def create_response(request: Request) -> Response:
    """Answers a conversation as a response, which can be continued by its id."""
    body = await read_json(request)
    serving, store = serving_of(request, body.get("model")), stored.store_of(request)
    caller = caller_of(request, body)
    with stored.store_errors():
        parsed = await on_thread(request, response_request, body, serving.model, caller, store)
    answer = await start_stream(request, serving.answer(parsed.ask))
    reply = ResponseReply(parsed, answer, serving, store, route_of(request))
    if parsed.stream:
        return event_stream(request, reply.events(request))
    return JSONResponse(await until_disconnect(request, reply.body()))


@router.post("/input_tokens", openapi_extra=described("input"))
async def count_input_tokens(request: Request) -> Response:
    """The tokens of a response's prompt: instructions, tools, and the history it continues."""
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
    """Not offered: an opaque summary would change answers without being seen."""
    serving_of(request)
    raise WireError(HTTPStatus.NOT_FOUND, _NO_COMPACTION, code="not_offered")  # 5xx is repeated


@router.get("/{response_id:response_id}")
async def retrieve_response(
    request: Request,
    response_id: ResponseId,
    stream: Annotated[bool, Query(description="Only false: stored responses are whole.")] = False,
) -> Response:
    """A stored response, as it was returned."""
    if stream:
        raise FieldError("stream: a kept response is whole; expected false", param="stream")
    serving_of(request)  # 503 until the model is loaded
    found = await stored.get_response(request, response_id)
    return Response(found.body, media_type="application/json")


@router.delete("/{response_id:response_id}")
async def delete_response(request: Request, response_id: ResponseId) -> Response:
    """Deletes a stored response. Responses that continue it can no longer be continued."""
    serving_of(request)
    await stored.delete_response(request, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/{response_id:response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: ResponseId,
    after: Annotated[str | None, Query(description="The id of an item.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The input items of the response's own request, without those of previous responses."""
    serving_of(request)
    found = await stored.get_response(request, response_id)
    return JSONResponse(stored.input_list(found, stored.Page(after, limit, order)))
