"""Output items of a response, and the stream events that build them. An item's id contains the
response's id."""

from __future__ import annotations

import base64
import json
import re
import secrets
from binascii import Error as Base64Error
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, Literal

from semantic.ports.store import ResponsesPort
from semantic_server.http.errors import WireError
from semantic_server.http.openai.fields import Json
from semantic_server.http.openai.replies import ChatTokenLogprob
from semantic_server.http.openai.responses.tools import FunctionName
from semantic_server.http.request_fields.client_tools import CUSTOM, custom_call, item_fields

RESPONSE_PREFIX: Final = "resp_"

_ITEM_ID: Final = re.compile(r"[a-z]+_(?P<response>[0-9a-f]+)_[0-9]+")


def item_id(prefix: str, response_id: str, index: int) -> str:
    """Return the id of output item number `index`. `prefix` is the item's type, such as msg."""
    return f"{prefix}_{response_id.removeprefix(RESPONSE_PREFIX)}_{index}"


class KeptItems:
    """The output items of a tenant's stored responses."""

    def __init__(self, store: ResponsesPort, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._read: dict[str, dict[str, Json]] = {}

    def item(self, path: str, given: str) -> Json:
        """Return the item with the id `given`. `path` is the place of the reference in the request.
        Raises WireError for an unknown item, and StoreError for a failed read."""
        match = _ITEM_ID.fullmatch(given)
        found = self._items(RESPONSE_PREFIX + match["response"]).get(given) if match else None
        if found is None:
            message = (
                f"Item with id {given!r:.200} not found. Items stay with their response, "
                "unless store was false"
            )
            raise WireError(HTTPStatus.NOT_FOUND, message, param=path, code="item_not_found")
        return found

    def _items(self, response_id: str) -> dict[str, Json]:
        if response_id not in self._read:
            response = self._store.get(self._tenant, response_id)
            output = [] if response is None else json.loads(response.body)["output"]
            self._read[response_id] = {one["id"]: one for one in output}
        return self._read[response_id]


Status = Literal["in_progress", "completed", "incomplete"]

_CONTENT_INDEX: Final = 0
"""The index of an item's content part. Every item has at most one."""

ID_BYTES: Final = 24
_ENCODED_PREFIX: Final = "semantic.thought."


def new_response_id(route: str = "") -> str:
    """Return a new random id. In a fleet, it ends with the request's `route`."""
    return f"{RESPONSE_PREFIX}{secrets.token_hex(ID_BYTES)}{route}"


def encoded_reasoning(text: str) -> str:
    """Return `text` as the field `encrypted_content`. The text is encoded, not encrypted."""
    data = text.encode("utf-8", "surrogatepass")
    return _ENCODED_PREFIX + base64.urlsafe_b64encode(data).decode("ascii")


def decoded_reasoning(encoded: str) -> str:
    """Invert `encoded_reasoning`. Returns "" for another service's text."""
    if not encoded.startswith(_ENCODED_PREFIX):
        return ""
    try:
        data = base64.urlsafe_b64decode(encoded.removeprefix(_ENCODED_PREFIX))
        return data.decode("utf-8", "surrogatepass")
    except (Base64Error, ValueError):
        return ""


@dataclass(slots=True)
class TextItem:
    """An item of type `message`."""

    index: int
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    def begin(self) -> list[Json]:
        """Return the events that precede the text."""
        return [
            _added(self.index, self.as_object("in_progress") | {"content": []}),
            _part_event("added", self, _text_part("", ())),
        ]

    def grow(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> list[Json]:
        """Return the events for more of the text."""
        found = [_logprob(one) for one in logprobs]
        self.texts.append(text)
        self.logprobs += found
        return [
            {
                "type": "response.output_text.delta",
                **_position(self),
                "delta": text,
                "logprobs": found,
            }
        ]

    def end(self, status: Status) -> list[Json]:
        """Return the events that follow the text."""
        text = "".join(self.texts)
        return [
            {
                "type": "response.output_text.done",
                **_position(self),
                "text": text,
                "logprobs": self.logprobs,
            },
            _part_event("done", self, _text_part(text, self.logprobs)),
            _done(self.index, self.as_object(status)),
        ]

    def as_object(self, status: Status) -> Json:
        """Return the item with its content so far."""
        part = _text_part("".join(self.texts), self.logprobs)
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [part],
        }


@dataclass(slots=True)
class ReasoningItem:
    """An item of type `reasoning`. `encrypted` adds the field `encrypted_content`."""

    index: int
    id: str
    encrypted: bool = False
    texts: list[str] = field(default_factory=list)

    def begin(self) -> list[Json]:
        """Return the events that precede the text."""
        empty = self.as_object("in_progress") | {"content": [], "encrypted_content": None}
        return [_added(self.index, empty), _part_event("added", self, _reasoning_part(""))]

    def grow(self, text: str) -> list[Json]:
        """Return the events for more of the text."""
        self.texts.append(text)
        return [{"type": "response.reasoning_text.delta", **_position(self), "delta": text}]

    def end(self, status: Status) -> list[Json]:
        """Return the events that follow the text."""
        text = "".join(self.texts)
        return [
            {"type": "response.reasoning_text.done", **_position(self), "text": text},
            _part_event("done", self, _reasoning_part(text)),
            _done(self.index, self.as_object(status)),
        ]

    def as_object(self, status: Status) -> Json:
        """Return the item with its content so far."""
        text = "".join(self.texts)
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [_reasoning_part(text)],
            "encrypted_content": encoded_reasoning(text) if self.encrypted else None,
        }


@dataclass(slots=True)
class CallItem:
    """An item of type `function_call`."""

    index: int
    id: str
    call_id: str
    name: FunctionName
    texts: list[str] = field(default_factory=list)

    def begin(self) -> list[Json]:
        """Return the events that precede the arguments."""
        return [_added(self.index, self.as_object("in_progress"))]

    def grow(self, arguments: str) -> list[Json]:
        """Return the events for more of the arguments."""
        self.texts.append(arguments)
        return [
            {
                "type": "response.function_call_arguments.delta",
                "item_id": self.id,
                "output_index": self.index,
                "delta": arguments,
            }
        ]

    def end(self, status: Status) -> list[Json]:
        """Return the events that follow the arguments."""
        return [
            {
                "type": "response.function_call_arguments.done",
                "item_id": self.id,
                "output_index": self.index,
                "name": self.name.name,
                "arguments": "".join(self.texts),
            },
            _done(self.index, self.as_object(status)),
        ]

    def as_object(self, status: Status) -> Json:
        """Return the item with its content so far."""
        item: Json = {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name.name,
            "arguments": "".join(self.texts),
        }
        if self.name.namespace is not None:
            item["namespace"] = self.name.namespace
        return item


@dataclass(slots=True)
class ClientCallItem:
    """A call of a tool whose `kind` is not function. All events come at its end."""

    kind: str
    call: CallItem

    def begin(self) -> list[Json]:
        """Return [], because the item's form is known only at its end."""
        return []

    def grow(self, arguments: str) -> list[Json]:
        """Collect a further piece of the arguments. Returns []."""
        self.call.texts.append(arguments)
        return []

    def end(self, status: Status) -> list[Json]:
        """Return all events of the item."""
        call, item = self.call, self.as_object(status)
        if item["type"] == "function_call":
            arguments, call.texts = "".join(call.texts), []
            return [*call.begin(), *call.grow(arguments), *call.end(status)]
        begun, events = item | {"status": "in_progress"}, []
        if self.kind == CUSTOM:
            begun["input"] = ""
            place = {"item_id": call.id, "output_index": call.index}
            events = [
                {"type": f"{_CUSTOM_INPUT}.delta", **place, "delta": item["input"]},
                {"type": f"{_CUSTOM_INPUT}.done", **place, "input": item["input"]},
            ]
        return [_added(call.index, begun), *events, _done(call.index, item)]

    def as_object(self, status: Status) -> Json:
        """Return the item with its content so far. Invalid arguments make it a function call."""
        item = self.call.as_object(status)
        arguments = str(item["arguments"])
        if self.kind == CUSTOM:
            del item["arguments"]
            call_id, text = custom_call(self.call.call_id, arguments)
            return item | {"type": "custom_tool_call", "call_id": call_id, "input": text}
        own = item_fields(self.kind, arguments) if status == "completed" else None
        if own is None:
            return item
        del item["arguments"], item["name"]
        return item | {"type": f"{self.kind}_call"} | own


_CUSTOM_INPUT: Final = "response.custom_tool_call_input"

OutputItem = TextItem | ReasoningItem | CallItem | ClientCallItem


def _added(index: int, item: Json) -> Json:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def _done(index: int, item: Json) -> Json:
    return {"type": "response.output_item.done", "output_index": index, "item": item}


def _part_event(what: str, item: TextItem | ReasoningItem, part: Json) -> Json:
    return {"type": f"response.content_part.{what}", **_position(item), "part": part}


def _position(item: TextItem | ReasoningItem) -> Json:
    return {"item_id": item.id, "output_index": item.index, "content_index": _CONTENT_INDEX}


def _text_part(text: str, logprobs: Sequence[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _reasoning_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def _logprob(one: ChatTokenLogprob) -> Json:
    top = [{**other, "bytes": other["bytes"] or []} for other in one["top_logprobs"]]
    return {**one, "bytes": one["bytes"] or [], "top_logprobs": top}
