"""The items that a response is made of, each with the events by which a stream tells of it.

Raw thoughts are the `content` of a reasoning item: a `summary` would be another text, which this
server does not write. Knows OpenAI's shapes; not where pieces come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from semantic.adapters.http.openai.responses.ids import new_id
from semantic.adapters.http.openai.responses.sealed import sealed
from semantic.adapters.http.openai.responses.toolbox import CallName, Json
from semantic.adapters.http.openai.token_logprobs import ChatTokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]

_CONTENT: Final = 0
"""Every item has one part at most."""


@dataclass(slots=True)
class TextItem:
    """A message of the assistant."""

    index: int
    id: str = field(default_factory=lambda: new_id("msg"))
    texts: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    def begin(self) -> list[Json]:
        """The events before its text."""
        return [
            _added(self.index, self.body("in_progress") | {"content": []}),
            _part_event("added", self, _text_part("", ())),
        ]

    def grow(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> list[Json]:
        """The events for more of its text."""
        found = [_logprob(one) for one in logprobs]
        self.texts.append(text)
        self.logprobs += found
        return [
            {
                "type": "response.output_text.delta",
                **_place(self),
                "delta": text,
                "logprobs": found,
            }
        ]

    def end(self, status: Status) -> list[Json]:
        """The events after its text."""
        text = "".join(self.texts)
        return [
            {
                "type": "response.output_text.done",
                **_place(self),
                "text": text,
                "logprobs": self.logprobs,
            },
            _part_event("done", self, _text_part(text, self.logprobs)),
            _done(self.index, self.body(status)),
        ]

    def body(self, status: Status) -> Json:
        """The item as far as it has come."""
        part = _text_part("".join(self.texts), self.logprobs)
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [part],
        }


@dataclass(slots=True)
class ThoughtItem:
    """What the model thought. With `carried` the client can send it back unread."""

    index: int
    carried: bool = False
    id: str = field(default_factory=lambda: new_id("rs"))
    texts: list[str] = field(default_factory=list)

    def begin(self) -> list[Json]:
        """The events before its text."""
        empty = self.body("in_progress") | {"content": [], "encrypted_content": None}
        return [_added(self.index, empty), _part_event("added", self, _thought_part(""))]

    def grow(self, text: str) -> list[Json]:
        """The events for more of its text."""
        self.texts.append(text)
        return [{"type": "response.reasoning_text.delta", **_place(self), "delta": text}]

    def end(self, status: Status) -> list[Json]:
        """The events after its text."""
        text = "".join(self.texts)
        return [
            {"type": "response.reasoning_text.done", **_place(self), "text": text},
            _part_event("done", self, _thought_part(text)),
            _done(self.index, self.body(status)),
        ]

    def body(self, status: Status) -> Json:
        """The item as far as it has come."""
        text = "".join(self.texts)
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [_thought_part(text)],
            "encrypted_content": sealed(text) if self.carried else None,
        }


@dataclass(slots=True)
class CallItem:
    """A call of the function `name`."""

    index: int
    call_id: str
    name: CallName
    id: str = field(default_factory=lambda: new_id("fc"))
    texts: list[str] = field(default_factory=list)

    def begin(self) -> list[Json]:
        """The events before its arguments."""
        return [_added(self.index, self.body("in_progress"))]

    def grow(self, arguments: str) -> list[Json]:
        """The events for more of its arguments."""
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
        """The events after its arguments."""
        return [
            {
                "type": "response.function_call_arguments.done",
                "item_id": self.id,
                "output_index": self.index,
                "name": self.name.name,
                "arguments": "".join(self.texts),
            },
            _done(self.index, self.body(status)),
        ]

    def body(self, status: Status) -> Json:
        """The item as far as it has come."""
        body: Json = {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name.name,
            "arguments": "".join(self.texts),
        }
        if self.name.namespace is not None:
            body["namespace"] = self.name.namespace
        return body


OutputItem = TextItem | ThoughtItem | CallItem


def _added(index: int, item: Json) -> Json:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def _done(index: int, item: Json) -> Json:
    return {"type": "response.output_item.done", "output_index": index, "item": item}


def _part_event(what: str, item: TextItem | ThoughtItem, part: Json) -> Json:
    return {"type": f"response.content_part.{what}", **_place(item), "part": part}


def _place(item: TextItem | ThoughtItem) -> Json:
    return {"item_id": item.id, "output_index": item.index, "content_index": _CONTENT}


def _text_part(text: str, logprobs: Sequence[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _thought_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def _logprob(one: ChatTokenLogprob) -> Json:
    """In this wire's shape: a part of a character has no bytes, not null."""
    top = [{**other, "bytes": other["bytes"] or []} for other in one["top_logprobs"]]
    return {**one, "bytes": one["bytes"] or [], "top_logprobs": top}
