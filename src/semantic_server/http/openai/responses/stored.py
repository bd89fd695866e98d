"""Stores, retrieves and deletes responses, and lists their input items."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Literal

from anyio import to_thread
from fastapi import Request

from semantic.domain.chat import Message
from semantic.domain.errors import StoreError
from semantic.domain.identity import digest
from semantic.domain.responses import StoredResponse
from semantic.ports.store import ResponsesPort
from semantic_server.http.errors import RETRY_SECONDS, FieldError, WireError
from semantic_server.http.identity import tenant_of
from semantic_server.http.openai.fields import Json
from semantic_server.http.openai.responses.input_items import input_of
from semantic_server.http.openai.responses.request import ResponseRequest
from semantic_server.http.openai.responses.writer import ResponseWriter
from semantic_server.http.request_body import on_thread

_ID_CHARACTERS: Final = 48


def store_of(request: Request) -> ResponsesPort:
    found: ResponsesPort = request.app.state.responses
    return found


async def put_response(
    store: ResponsesPort, request: ResponseRequest, writer: ResponseWriter, agent: str
) -> None:
    """Store the input of `request` and the complete response that `agent` gave."""
    await to_thread.run_sync(_put, store, request, writer, agent)


async def get_response(request: Request, response_id: str) -> StoredResponse:
    """Return the tenant's response with this id. Raises WireError for an unknown id."""
    store, tenant = store_of(request), tenant_of(request)
    with store_errors():
        found = await on_thread(request, store.get, tenant, response_id)
    if found is None:
        raise _not_found(response_id)
    return found


async def delete_response(request: Request, response_id: str) -> None:
    """Delete the tenant's response with this id. Raises WireError for an unknown id."""
    store, tenant = store_of(request), tenant_of(request)
    with store_errors():
        deleted = await on_thread(request, store.delete, tenant, response_id)
    if not deleted:
        raise _not_found(response_id)


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn StoreError into a WireError 503. It omits the cause, which may disclose details."""
    try:
        yield
    except StoreError as error:
        raise WireError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "cannot read responses now",
            code="overloaded",
            retry_after=RETRY_SECONDS,
        ) from error


def _put(
    store: ResponsesPort, request: ResponseRequest, writer: ResponseWriter, agent: str
) -> None:
    response = writer.response
    # Store the answer as a parser would read it back from the client.
    output = input_of(response["output"], request.tools)
    store.put(
        request.ask.tenant,
        StoredResponse(
            writer.id,
            agent,
            request.input.messages,
            output.messages,
            json.dumps(response, allow_nan=False),
            request.previous_response_id,
            request.input.tools,
            writer.created,
        ),
    )


def _not_found(response_id: str) -> WireError:
    return WireError(HTTPStatus.NOT_FOUND, f"Response with id {response_id!r:.200} not found.")


# Input items


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list. It has at most `limit` items, which follow the item `after`."""

    after: str | None = None
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"


def input_list(response: StoredResponse, page: Page) -> Json:
    """Return one page of a response's own input items. Their ids are the same in every call. Raises
    FieldError for an unknown `page.after`."""
    items = _items(response)
    if page.order == "desc":
        items.reverse()
    if page.after is not None:
        ids = [item["id"] for item in items]
        if page.after not in ids:
            raise FieldError("after must be the id of an item of this list", param="after")
        items = items[ids.index(page.after) + 1 :]
    shown = items[: page.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > len(shown),
    }


def _items(response: StoredResponse) -> list[Json]:
    found: list[Json] = []
    for message in response.input:
        for prefix, item in _items_of(message):
            number = str(len(found)).encode()
            name = digest("input-item-v1", response.id.encode(), number).hex()[:_ID_CHARACTERS]
            found.append({"id": f"{prefix}_{name}", "status": "completed", **item})
    return found


def _items_of(message: Message) -> Sequence[tuple[str, Json]]:
    if message.role == "tool":
        output: Json = {"call_id": message.tool_call_id, "output": message.content}
        return [("fco", {"type": "function_call_output", **output})]
    if message.role != "assistant":
        part = {"type": "input_text", "text": message.content}
        return [("msg", {"type": "message", "role": message.role, "content": [part]})]
    items: list[tuple[str, Json]] = []
    if message.reasoning:
        reasoning = {"type": "reasoning_text", "text": message.reasoning}
        items.append(("rs", {"type": "reasoning", "summary": [], "content": [reasoning]}))
    if message.content or not (message.reasoning or message.tool_calls):
        text = {"type": "output_text", "text": message.content, "annotations": []}
        items.append(("msg", {"type": "message", "role": "assistant", "content": [text]}))
    for call in message.tool_calls:
        named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        items.append(("fc", {"type": "function_call", **named}))
    return items
