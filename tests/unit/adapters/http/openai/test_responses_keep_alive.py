"""While a prompt is read, clients that count events with data only see that it goes on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection

import pytest
from starlette.requests import Request

from semantic.application.chat.memory_responses import MemoryResponses
from semantic.domain.answer import AnswerEvent, AnswerStarted, ToolCallDelta, ToolCallStarted
from semantic.domain.errors import OverloadedError
from semantic.domain.responses import StoredResponse
from semantic.ports.serving import Ask
from semantic_server.http.app import create_app
from semantic_server.http.openai.requests import Caller
from semantic_server.http.openai.responses.request import response_request
from semantic_server.http.openai.responses.routes import ResponseReply
from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import FakeServing, Script
from tests.support.http_server import running
from tests.unit.adapters.http.openai.response_wire import RESPONSES, events_of, kinds
from tests.unit.adapters.http.openai.wire import Json, at

QUIET = 0.01


async def be_quiet() -> None:
    """In steps: however slow the machine is, the heartbeat has its turns between them."""
    for _ in range(30):
        await asyncio.sleep(QUIET)


@dataclass
class SlowServing(FakeServing):
    """Takes its time to read its prompt."""

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """See `ServingPort.answer`."""
        async for event in super().answer(ask):
            yield event
            if isinstance(event, AnswerStarted):
                await be_quiet()


@pytest.mark.process
def test_a_stream_that_is_quiet_says_that_it_is_in_progress() -> None:
    with running(SlowServing(), ServerSettings(keep_alive=QUIET)) as server:
        body = {"model": "fake", "input": "Hi", "stream": True}
        events = events_of(server.ask("POST", RESPONSES, body).body.decode())
    named = kinds(events)
    begun = named.index("output_item.added")
    assert named[0] == "created"
    assert set(named[1:begun]) == {"in_progress"}
    assert begun > 4, "more than the one that every stream has"
    assert [name for name in named[begun:] if name != "in_progress"] == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert {at(event, "response", "status") for event in events[:begun]} == {"in_progress"}
    assert len({at(event, "response", "id") for event in events[:begun]}) == 1


@dataclass
class SlowCalls(FakeServing):
    """Takes its time to write a call."""

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """See `ServingPort.answer`."""
        async for event in super().answer(ask):
            yield event
            if isinstance(event, ToolCallDelta):
                await be_quiet()


@pytest.mark.process
def test_a_custom_call_is_not_told_before_it_is_whole() -> None:
    call = (ToolCallStarted(0, "c1", "run"), ToolCallDelta(0, '{"input": ""}'))
    serving = SlowCalls(lambda _: Script(call, "tool_calls"))
    with running(serving, ServerSettings(keep_alive=QUIET)) as server:
        tool = {"type": "custom", "name": "run"}
        body = {"model": "fake", "input": "Hi", "stream": True, "tools": [tool]}
        events = events_of(server.ask("POST", RESPONSES, body).body.decode())
    begun = kinds(events).index("output_item.added")
    assert begun > 4, "signs of life before it"
    assert all(at(event, "response", "output") == [] for event in events[:begun])


@dataclass
class LateServing(FakeServing):
    """Takes its time before a request is taken in, or refused."""

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """See `ServingPort.answer`."""
        await be_quiet()
        async for event in super().answer(ask):
            yield event


def streamed(serving: FakeServing, text: str) -> list[Json]:
    with running(serving, ServerSettings(keep_alive=QUIET)) as server:
        body = {"model": "fake", "input": text, "stream": True}
        return events_of(server.ask("POST", RESPONSES, body).body.decode())


@pytest.mark.process
def test_a_response_is_begun_before_it_is_taken_in_where_that_takes_long() -> None:
    named = kinds(streamed(LateServing(), "Hi"))
    assert named[0] == "created"
    assert named.count("created") == 1
    assert named.count("in_progress") > 4
    assert named[-1] == "completed"


@pytest.mark.process
def test_what_is_refused_late_fails_in_the_stream() -> None:
    """In the words and with the code by which clients know that their history is too long."""
    events = streamed(LateServing(), "x" * 600)
    named = kinds(events)
    assert named[0] == "created"
    assert set(named[1:-1]) == {"in_progress"}
    assert named[-1] == "failed"
    error = at(events[-1], "response", "error")
    assert at(error, "code") == "context_length_exceeded"
    assert str(at(error, "message")).startswith("This model's maximum context length is 512")


def test_nothing_but_comments_follows_the_last_event() -> None:
    async def told() -> list[bytes]:
        serving, kept = FakeServing(), MemoryResponses(1 << 20)
        asked = response_request({"model": "fake", "input": "Hi"}, serving.model, Caller(), kept)
        reply = ResponseReply(asked, serving.answer(asked.ask), serving, kept)
        scope = {"type": "http", "app": create_app(serving), "headers": []}
        found = [reply.heartbeat() async for _ in reply.events(Request(scope))]
        return [one.splitlines()[0] for one in found]

    *before, last = asyncio.run(told())
    assert set(before) == {b"event: response.in_progress"}
    assert last == b": keep-alive"


def test_a_failure_before_anything_was_sent_still_begins_as_clients_expect() -> None:
    async def told() -> list[bytes]:
        full = OverloadedError("full", retry_after=3)
        serving, kept = FakeServing(lambda _: Script(failure=full)), MemoryResponses(1 << 20)
        asked = response_request({"model": "fake", "input": "Hi"}, serving.model, Caller(), kept)
        reply = ResponseReply(asked, serving.answer(asked.ask), serving, kept)
        scope = {"type": "http", "app": create_app(serving), "headers": []}
        return [event.splitlines()[0] async for event in reply.events(Request(scope))]

    assert asyncio.run(told()) == [b"event: response.created", b"event: response.failed"]


class SlowDisk(MemoryResponses):
    """Takes its time to keep a response: until it is let go on."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.go = threading.Event()

    def put(self, tenant: str, response: StoredResponse) -> None:
        assert self.go.wait(60)
        super().put(tenant, response)


def kept_slowly(serving: FakeServing, **fields: object) -> list[Json]:
    """The events of a response that takes six signs of life to be kept."""
    settings, disk = ServerSettings(keep_alive=QUIET), SlowDisk()
    app = create_app(serving, settings, responses=disk)
    body = json.dumps({"model": "fake", "input": "Hi", "stream": True, **fields})
    with running(settings=settings, app=app) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        with closing(connection):
            connection.request("POST", RESPONSES, body)
            response, came = connection.getresponse(), b""
            while came.count(b"event: response.in_progress") < 6:
                line = response.readline()
                assert line, came
                came += line
            disk.go.set()
            return events_of((came + response.read()).decode())


@pytest.mark.process
def test_a_response_that_is_being_kept_is_still_in_progress() -> None:
    *before, last = kept_slowly(FakeServing())
    assert kinds(before).count("in_progress") > 4
    told = [event["response"] for event in before if "response" in event]
    assert {at(one, "status") for one in told} == {"in_progress"}
    assert {at(one, "usage") for one in told} == {None}
    assert at(last, "response", "status") == "completed"


@pytest.mark.process
def test_a_call_is_told_before_its_response_is_kept() -> None:
    call = (ToolCallStarted(0, "c1", "run"), ToolCallDelta(0, '{"input": ""}'))
    tools = [{"type": "custom", "name": "run"}]
    events = kept_slowly(FakeServing(lambda _: Script(call, "tool_calls")), tools=tools)
    begun = kinds(events).index("output_item.added")
    assert all(at(event, "response", "output") == [] for event in events[:begun])
    assert kinds(events[begun + 1 :]).count("in_progress") > 3
