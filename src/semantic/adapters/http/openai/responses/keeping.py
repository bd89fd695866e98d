"""Responses that are kept under their ids: put there when they are whole, found, forgotten.

All that waits for a disk is done beside the event loop. Knows the port; not how it is implemented.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from anyio import to_thread
from fastapi import Request

from semantic.adapters.http.errors import RETRY_SECONDS, WireError
from semantic.adapters.http.identity import tenant_of
from semantic.adapters.http.openai.responses.items import input_of
from semantic.adapters.http.openai.responses.request import ResponseRequest
from semantic.adapters.http.openai.responses.writer import ResponseWriter
from semantic.domain.errors import StoreError
from semantic.domain.responses import StoredResponse
from semantic.ports.responses import ResponsesPort


def responses_of(request: Request) -> ResponsesPort:
    """Where the server of this request keeps responses."""
    found: ResponsesPort = request.app.state.responses
    return found


async def keep(
    responses: ResponsesPort, request: ResponseRequest, writer: ResponseWriter, agent: str
) -> None:
    """Keep what was asked and the whole answer, which `agent` gave."""
    await to_thread.run_sync(_put, responses, request, writer, agent)


async def kept(request: Request, response_id: str) -> StoredResponse:
    """The caller's response of that id. Raises WireError when there is none."""
    found = await to_thread.run_sync(_get, responses_of(request), tenant_of(request), response_id)
    if found is None:
        raise _unknown(response_id)
    return found


async def forget(request: Request, response_id: str) -> None:
    """Delete the caller's response of that id. Raises WireError when there is none."""
    gone = await to_thread.run_sync(_delete, responses_of(request), tenant_of(request), response_id)
    if not gone:
        raise _unknown(response_id)


def not_now(error: StoreError) -> WireError:
    """What a client is told when the disk does not let us know."""
    del error  # it may tell of the machine
    return WireError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "responses cannot be read now",
        code="overloaded",
        retry_after=RETRY_SECONDS,
    )


def _put(
    responses: ResponsesPort, request: ResponseRequest, writer: ResponseWriter, agent: str
) -> None:
    body = writer.body
    # The answer is kept as it would be read when the client sent it back.
    output = input_of(body["output"], request.toolbox)
    responses.put(
        request.ask.tenant,
        StoredResponse(
            writer.id,
            agent,
            request.own.messages,
            output.messages,
            json.dumps(body, allow_nan=False),
            request.previous,
            request.own.tools,
            writer.created,
        ),
    )


def _get(responses: ResponsesPort, tenant: str, response_id: str) -> StoredResponse | None:
    try:
        return responses.get(tenant, response_id)
    except StoreError as error:
        raise not_now(error) from error


def _delete(responses: ResponsesPort, tenant: str, response_id: str) -> bool:
    try:
        return responses.delete(tenant, response_id)
    except StoreError as error:
        raise not_now(error) from error


def _unknown(response_id: str) -> WireError:
    return WireError(HTTPStatus.NOT_FOUND, f"Response with id {response_id!r:.200} not found.")
