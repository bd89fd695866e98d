"""/v1/responses: a body becomes an ask, its answer a response; kept ones are found by their ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from anyio import to_thread
from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response

from semantic.adapters.http.context import serving_of
from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.identity import agent_of, identity_of, tenant_of
from semantic.adapters.http.openai.caller import Caller
from semantic.adapters.http.openai.description import described
from semantic.adapters.http.openai.responses.answering import Answering
from semantic.adapters.http.openai.responses.input_list import Page, input_list
from semantic.adapters.http.openai.responses.keeping import forget, kept, not_now, responses_of
from semantic.adapters.http.openai.responses.request import ResponseRequest, response_request
from semantic.adapters.http.request_body import read_json
from semantic.adapters.http.streaming import event_stream, start_stream, until_disconnect
from semantic.domain.errors import StoreError
from semantic.ports.responses import ResponsesPort
from semantic.ports.serving import ServedModel

router: Final = APIRouter(tags=["openai"])

ResponseId = Annotated[str, Path(description="The response's id, as its body had it.")]


@router.post("/v1/responses", openapi_extra=described("input"))
async def create_response(request: Request) -> Response:
    """Answers a conversation as a response, which can be gone on from by its id."""
    body = await read_json(request)
    serving, responses = serving_of(request), responses_of(request)
    caller = Caller(
        agent_of(request, body), tenant_of(request), identity=identity_of(request, body)
    )
    # Beside the event loop, where it holds up nobody: bodies may be large, the first one imports
    # the SDK, and earlier responses may be on a disk.
    asked = await to_thread.run_sync(_read, body, serving.model, caller, responses)
    begun = await start_stream(request, serving.answer(asked.ask))
    answering = Answering(asked, begun, serving, responses)
    if asked.stream:
        return event_stream(request, answering.events(request))
    return JSONResponse(await until_disconnect(request, answering.body()))


@router.get("/v1/responses/{response_id}")
async def retrieve_response(
    request: Request,
    response_id: ResponseId,
    stream: Annotated[bool, Query(description="Only false: what is kept is whole.")] = False,
) -> Response:
    """A response that was kept, as it was given."""
    if stream:
        raise FieldError("stream: a kept response is whole; expected false", param="stream")
    serving_of(request)  # until the model is loaded nothing is known
    found = await kept(request, response_id)
    return Response(found.body, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: ResponseId) -> Response:
    """Forget a response. What went on from it cannot be gone on from any more."""
    serving_of(request)
    await forget(request, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: ResponseId,
    after: Annotated[str | None, Query(description="The id of an item.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """What the response's own request said; not what was said before it."""
    serving_of(request)  # until the model is loaded nothing is known
    found = await kept(request, response_id)
    return JSONResponse(input_list(found, Page(after, limit, order)))


def _read(
    body: Mapping[str, object], model: ServedModel, caller: Caller, responses: ResponsesPort
) -> ResponseRequest:
    try:
        return response_request(body, model, caller, responses)
    except StoreError as error:
        raise not_now(error) from error
