"""Requests for responses over a scripted model. Every body and event fits the SDK's types."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from semantic.domain.chat import Chat, Message
from semantic.ports.serving import Ask
from tests.support.fake_serving import Script
from tests.unit.adapters.http.openai.wire import Json, Wire, wire_of

RESPONSES: Final = "/v1/responses"
_EVENT: Final[TypeAdapter[ResponseStreamEvent]] = TypeAdapter(ResponseStreamEvent)


@dataclass
class ResponseWire:
    """A wire under test."""

    wire: Wire

    def body(self, **fields: object) -> Json:
        """The response to a request that succeeds."""
        found = self.wire.post(RESPONSES, {"model": "fake", "input": "Hello", **fields})
        Response.model_validate(found, strict=True)
        return found

    def events(self, **fields: object) -> list[Json]:
        """The events of a stream, in order and numbered."""
        body = {"model": "fake", "input": "Hello", "stream": True, **fields}
        response = self.wire.client.post(RESPONSES, json=body)
        assert response.status_code == 200, response.text
        return events_of(response.text)

    def error(self, status: int = 400, /, **fields: object) -> Json:
        """The error that a request ends with."""
        body = {"model": "fake", "input": "Hello", **fields}
        response = self.wire.client.post(RESPONSES, json=body)
        assert response.status_code == status, response.text
        return cast(Json, response.json()["error"])

    def get(self, path: str, status: int = 200) -> Json:
        """What is at a path below /v1/responses."""
        response = self.wire.client.get(f"{RESPONSES}/{path}")
        assert response.status_code == status, response.text
        return cast(Json, response.json())

    def delete(self, path: str, status: int = 200) -> Json:
        response = self.wire.client.delete(f"{RESPONSES}/{path}")
        assert response.status_code == status, response.text
        return cast(Json, response.json())

    @property
    def asked(self) -> list[Ask]:
        return self.wire.fake.asked

    @property
    def chat(self) -> Chat:
        """The conversation that was asked last."""
        prompt = self.asked[-1].prompt
        assert isinstance(prompt, Chat)
        return prompt

    @property
    def messages(self) -> list[Message]:
        return list(self.chat.messages)


def response_wire(script: Callable[[Ask], Script] | Script | None = None) -> ResponseWire:
    """A wire over a model that answers by `script`."""
    return ResponseWire(wire_of(script))


def events_of(text: str) -> list[Json]:
    """The events of a stream's text; each has its name twice, and the number of its place."""
    found: list[Json] = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        if "data" not in lines:
            continue
        event = json.loads(lines["data"])
        assert event["type"] == lines["event"]
        assert event["sequence_number"] == len(found)
        _EVENT.validate_python(_documented(event))
        found.append(event)
    return found


def _documented(event: Json) -> Json:
    """The event as OpenAI's types know it: they lack one code that OpenAI sends."""
    response = event.get("response")
    if not isinstance(response, dict) or not response.get("error"):
        return event
    error = response["error"]
    known = "invalid_prompt" if error["code"] == "context_length_exceeded" else error["code"]
    return {**event, "response": {**response, "error": {**error, "code": known}}}


def kinds(events: list[Json]) -> list[str]:
    """The events' names, without what all have in common."""
    return [str(event["type"]).removeprefix("response.") for event in events]
