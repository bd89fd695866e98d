"""What a kept response was asked, as a list of items, page by page.

The items are made of what the model read: their ids are the same every time, their texts as they
were written. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.responses.toolbox import Json
from semantic.domain.chat import Message
from semantic.domain.digest import digest
from semantic.domain.responses import StoredResponse

_ID_CHARACTERS: Final = 48


@dataclass(frozen=True, slots=True)
class Page:
    """At most `limit` items in this order, behind the one with the id `after`."""

    after: str | None = None
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"


def input_list(response: StoredResponse, page: Page) -> Json:
    """What the response's own request said. Raises FieldError for an `after` that is no item."""
    items = _items(response)
    if page.order == "desc":
        items.reverse()
    if page.after is not None:
        ids = [item["id"] for item in items]
        if page.after not in ids:
            raise FieldError("after: expected the id of an item of this list", param="after")
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
    """(what an id begins with, item) of each item that a message stands for."""
    if message.role == "tool":
        output: Json = {"call_id": message.tool_call_id, "output": message.content}
        return [("fco", {"type": "function_call_output", **output})]
    if message.role != "assistant":
        part = {"type": "input_text", "text": message.content}
        return [("msg", {"type": "message", "role": message.role, "content": [part]})]
    items: list[tuple[str, Json]] = []
    if message.reasoning:
        thought = {"type": "reasoning_text", "text": message.reasoning}
        items.append(("rs", {"type": "reasoning", "summary": [], "content": [thought]}))
    if message.content or not (message.reasoning or message.tool_calls):
        text = {"type": "output_text", "text": message.content, "annotations": []}
        items.append(("msg", {"type": "message", "role": "assistant", "content": [text]}))
    for call in message.tool_calls:
        named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        items.append(("fc", {"type": "function_call", **named}))
    return items
