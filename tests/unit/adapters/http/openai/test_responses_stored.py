"""Responses under their ids: found, gone on from, forgotten; by their own tenant only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import cast

import pytest
from pydantic import SecretStr
from starlette.requests import Request
from starlette.testclient import TestClient

from semantic.application.chat.memory_responses import MemoryResponses
from semantic.domain.answer import (
    AnswerEvent,
    AnswerStarted,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from semantic.domain.chat import Message, ToolCall
from semantic.domain.errors import StoreError
from semantic.domain.responses import StoredResponse
from semantic.ports.serving import Ask
from semantic_server.http.app import create_app
from semantic_server.http.openai.requests import Caller
from semantic_server.http.openai.responses.request import response_request
from semantic_server.http.openai.responses.routes import ResponseReply
from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import FakeServing, Script
from tests.support.http_server import running, until
from tests.unit.adapters.http.openai.response_wire import RESPONSES, response_wire
from tests.unit.adapters.http.openai.wire import Json, at

LOOK = {"type": "function", "name": "look"}
USER = {"role": "user", "content": "Hi"}


def counted(ask: Ask) -> Script:
    """Answers with the number of messages it was given."""
    return Script((TextDelta(f"{len(ask.prompt.messages)}"),))  # type: ignore[union-attr]


def text_of(body: Json) -> object:
    return at(body, "output", 0, "content", 0, "text")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_found_by_its_id(stream: bool) -> None:
    wire = response_wire()
    body = wire.events()[-1]["response"] if stream else wire.body()
    assert wire.get(str(at(body, "id"))) == body


def test_an_incomplete_response_is_kept_as_it_is() -> None:
    wire = response_wire(Script((TextDelta("On"),), "length"))
    body = wire.body(max_output_tokens=1)
    assert wire.get(str(body["id"])) == body


def test_what_is_not_to_be_kept_is_not() -> None:
    wire = response_wire()
    body = wire.body(store=False)
    assert body["store"] is False
    wire.get(str(body["id"]), 404)
    assert wire.error(previous_response_id=body["id"])["code"] == "previous_response_not_found"


THINKS_AND_CALLS = Script(
    (
        ReasoningDelta("Hm."),
        TextDelta("Look."),
        ToolCallStarted(0, "c1", "look"),
        ToolCallDelta(0, "{}"),
    ),
    "tool_calls",
)
FOUND = {"type": "function_call_output", "call_id": "c1", "output": "A tree."}


def references(body: Json, *, named: bool = True) -> list[Json]:
    """References to all output items of a response; the type may be left out."""
    kind: Json = {"type": "item_reference"} if named else {}
    output = body["output"]
    assert isinstance(output, list)
    return [{**kind, "id": item["id"]} for item in output]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_reference_is_the_item_it_refers_to(*, stream: bool, named: bool) -> None:
    wire = response_wire(THINKS_AND_CALLS)
    first = wire.events(tools=[LOOK])[-1]["response"] if stream else wire.body(tools=[LOOK])
    assert isinstance(first, dict)
    output = first["output"]
    assert isinstance(output, list)
    assert len({item["id"] for item in output}) == 3
    wire.body(tools=[LOOK], input=[USER, *output, FOUND])
    sent = wire.messages
    wire.body(tools=[LOOK], input=[USER, *references(first, named=named), FOUND])
    assert wire.messages == sent
    assert sent[1] == Message(
        "assistant", "Look.", reasoning="Hm.", tool_calls=(ToolCall("c1", "look", "{}"),)
    )


def test_references_to_several_responses_keep_their_order() -> None:
    wire = response_wire(counted)
    first, second = wire.body(), wire.body(input=[USER, USER])
    wire.body(input=[*references(second), USER, *references(first)])
    assert [message.content for message in wire.messages] == ["2", "Hi", "1"]


@pytest.mark.parametrize(
    "given",
    ["msg_1", "", "msg_", "resp_00_0", "msg_00_0", "msg_zz_0", "msg_00_99999999999", "\u0000"],
)
def test_a_reference_to_nothing_is_refused_by_name(given: str) -> None:
    wire = response_wire()
    error = wire.error(404, input=[USER, {"type": "item_reference", "id": given}])
    assert error["param"] == "input[1].id"
    assert error["code"] == "item_not_found"
    assert wire.asked == []


def test_items_of_a_response_that_is_not_kept_are_not_found() -> None:
    wire = response_wire()
    unkept, deleted = wire.body(store=False), wire.body()
    wire.delete(str(deleted["id"]))
    for body in (unkept, deleted):
        wire.error(404, input=[USER, *references(body)])


def test_a_deleted_response_is_gone() -> None:
    wire = response_wire()
    name = str(wire.body()["id"])
    assert wire.delete(name) == {"id": name, "object": "response", "deleted": True}
    for error in (wire.get(name, 404), wire.delete(name, 404)):
        assert at(error, "error", "type") == "invalid_request_error"
        assert at(error, "error", "message") == f"Response with id '{name}' not found."
    assert wire.error(previous_response_id=name) == {
        "message": f"Previous response with id '{name}' not found.",
        "type": "invalid_request_error",
        "param": "previous_response_id",
        "code": "previous_response_not_found",
    }
    assert len(wire.asked) == 1


def test_a_conversation_goes_on_from_a_response() -> None:
    wire = response_wire(counted)
    first = wire.body(instructions="Be kind.", input="One")
    second = wire.body(input="Two", previous_response_id=first["id"], instructions="Be brief.")
    assert second["previous_response_id"] == first["id"]
    third = wire.body(input="Three", previous_response_id=second["id"])
    assert wire.messages == [
        Message("user", "One"),
        Message("assistant", "2"),
        Message("user", "Two"),
        Message("assistant", "4"),
        Message("user", "Three"),
    ], "instructions are those of one request"
    assert text_of(third) == "5"


def test_a_response_is_a_point_from_which_there_are_many_ways() -> None:
    wire = response_wire(counted)
    first = wire.body(input="One")["id"]
    for words in ("Two", "Another"):
        wire.body(input=words, previous_response_id=first)
        assert [m.content for m in wire.messages] == ["One", "1", words]


def test_what_was_answered_is_read_as_if_the_client_had_sent_it() -> None:
    """By its id or as items: the same conversation, token for token."""
    pieces = (
        ReasoningDelta("Hm."),
        TextDelta("I look."),
        ToolCallStarted(0, "c1", "look"),
        ToolCallDelta(0, '{"a": 1}'),
        TextDelta(" So."),
    )
    wire = response_wire(Script(pieces, "tool_calls"))
    first = wire.body(tools=[LOOK])
    result = {"type": "function_call_output", "call_id": "c1", "output": "blue"}
    wire.body(tools=[LOOK], input=[result], previous_response_id=first["id"])
    by_id = wire.messages
    items = first["output"]
    assert isinstance(items, list)
    wire.body(tools=[LOOK], input=[{"role": "user", "content": "Hello"}, *items, result])
    assert wire.messages == by_id
    assert by_id[1] == Message(
        "assistant",
        "I look. So.",
        reasoning="Hm.",
        tool_calls=(ToolCall("c1", "look", '{"a": 1}'),),
    )


CUSTOM = {"type": "custom", "name": "run"}


@pytest.mark.parametrize(
    ("tool", "name", "arguments"),
    [
        (CUSTOM, "run", '{"input": "ls"}'),
        (CUSTOM, "run", '{"input": "{\\"input\\": 1}"}'),
        (CUSTOM, "run", '{"command": "ls"}'),
        (CUSTOM, "run", '{"input": "l'),
        ({"type": "local_shell"}, "local_shell", '{"command": ["ls"], "workdir": "/"}'),
        ({"type": "shell"}, "shell", '{"commands": ["ls"]}'),
        ({"type": "apply_patch"}, "apply_patch", '{"type": "delete_file", "path": "a"}'),
        ({"type": "apply_patch"}, "apply_patch", '{"path": "a"}'),
    ],
)
def test_a_call_of_any_tool_comes_back_as_it_was_written(
    tool: Json, name: str, arguments: str
) -> None:
    """By id and with the items sent back, also after the tool is gone."""
    script = Script((ToolCallStarted(0, "c1", name), ToolCallDelta(0, arguments)), "tool_calls")
    wire = response_wire(script)
    body = wire.body(input=[USER], tools=[tool])
    item = cast("list[Json]", body["output"])[0]
    kind = str(item["type"]).removesuffix("_call") + "_call_output"
    result = {"type": kind, "call_id": item["call_id"], "output": "done"}
    wire.body(input=[result], previous_response_id=body["id"])
    by_id = wire.messages
    wire.body(input=[USER, item, result])
    assert wire.messages == by_id
    assert by_id[1:] == [
        Message("assistant", tool_calls=(ToolCall("c1", name, arguments),)),
        Message("tool", "done", tool_call_id="c1"),
    ]


def test_a_custom_tool_that_an_item_loaded_stays_one() -> None:
    script = Script((ToolCallStarted(0, "c1", "run"), ToolCallDelta(0, '{"input": ""}')), "stop")
    wire = response_wire(script)
    first = wire.body(input=[{"type": "additional_tools", "tools": [CUSTOM]}, USER])
    second = wire.body(input=[USER], previous_response_id=first["id"])
    kinds = [at(body, "output", 0, "type") for body in (first, second)]
    assert kinds == ["custom_tool_call", "custom_tool_call"]


def test_the_agent_is_the_one_that_gave_the_response() -> None:
    wire = response_wire()
    first = wire.body()
    wire.body(previous_response_id=first["id"])
    assert wire.asked[-1].agent == "auto-request-0"
    wire.body(previous_response_id=first["id"], agent_id="ada")
    assert wire.asked[-1].agent == "ada"
    named = wire.body(agent_id="bob")
    wire.body(previous_response_id=named["id"])
    assert wire.asked[-1].agent == "bob"


def test_a_history_with_a_hole_is_none() -> None:
    wire = response_wire()
    first = wire.body()["id"]
    second = wire.body(previous_response_id=first)["id"]
    wire.delete(str(first))
    error = wire.error(previous_response_id=second)
    assert error["code"] == "previous_response_not_found"
    assert str(first) in str(error["message"])
    assert len(wire.asked) == 2
    assert wire.get(str(second))["id"] == second


def test_new_input_may_be_nothing_behind_a_history() -> None:
    wire = response_wire()
    first = wire.body()["id"]
    wire.body(previous_response_id=first, input=[])
    assert [m.role for m in wire.messages] == ["user", "assistant"]


@pytest.mark.parametrize("name", ["resp_x", "é" * 300, "a b", "resp_%00"])
def test_any_id_may_be_asked_for(name: str) -> None:
    wire = response_wire()
    wire.get(name, 404)
    wire.delete(name, 404)
    assert len(str(wire.error(previous_response_id=name)["message"])) < 400


def test_a_kept_response_is_no_stream() -> None:
    wire = response_wire()
    name = wire.body()["id"]
    assert at(wire.get(f"{name}?stream=true", 400), "error", "param") == "stream"
    assert wire.get(f"{name}?stream=false&include=x")["id"] == name


# --- tenants ----------------------------------------------------------------------------------


def test_another_tenants_response_is_not_there() -> None:
    """It is refused in the very words of one that does not exist."""
    keys = (SecretStr("key-a"), SecretStr("key-b"))
    app = create_app(FakeServing(), ServerSettings(api_keys=keys))
    mine, theirs = (
        TestClient(app, "http://127.0.0.1:8000", headers={"Authorization": f"Bearer key-{one}"})
        for one in "ab"
    )
    body = {"model": "fake", "input": "Hello"}
    name = mine.post(RESPONSES, json=body).json()["id"]
    for path in (name, "resp_nobody"):
        for status, error in (
            answered(theirs.get(f"{RESPONSES}/{path}"), path),
            answered(theirs.get(f"{RESPONSES}/{path}/input_items"), path),
            answered(theirs.delete(f"{RESPONSES}/{path}"), path),
        ):
            assert status == 404
            assert error == "Response with id '?' not found."
        item = "msg_" + path.removeprefix("resp_") + "_0"
        refers = {**body, "input": [{"type": "item_reference", "id": item}]}
        status, error = answered(theirs.post(RESPONSES, json=refers), item)
        assert status == 404
        assert error.startswith("Item with id '?' not found.")
        status, error = answered(
            theirs.post(RESPONSES, json={**body, "previous_response_id": path}), path
        )
        assert (status, error) == (400, "Previous response with id '?' not found.")
    assert mine.get(f"{RESPONSES}/{name}").status_code == 200


def answered(response: object, name: str) -> tuple[int, str]:
    """Status and message, without the name that was asked for."""
    status, found = response.status_code, response.json()  # type: ignore[attr-defined]
    return status, found["error"]["message"].replace(name, "?")


# --- input items ------------------------------------------------------------------------------


def test_what_was_asked_can_be_listed() -> None:
    wire = response_wire()
    given = [
        {"role": "developer", "content": "Rules."},
        USER,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "H"}]},
        {"role": "assistant", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "blue"},
    ]
    name = wire.body(input=given)["id"]
    page = wire.get(f"{name}/input_items?order=asc")
    data = page["data"]
    assert isinstance(data, list)
    assert [item["type"] for item in data] == [
        "message",
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert at(data, 1, "content", 0) == {"type": "input_text", "text": "Hi"}
    assert (page["first_id"], page["last_id"]) == (data[0]["id"], data[-1]["id"])
    assert page["has_more"] is False
    assert wire.get(f"{name}/input_items")["data"] == data[::-1]
    assert wire.get(f"{name}/input_items?order=asc") == page, "ids stay"


def test_a_list_comes_in_pages() -> None:
    wire = response_wire()
    name = wire.body(input=[{"role": "user", "content": str(i)} for i in range(5)])["id"]
    texts: list[object] = []
    after = ""
    while True:
        page = wire.get(f"{name}/input_items?order=asc&limit=2{after}")
        data = page["data"]
        assert isinstance(data, list)
        texts += [at(item, "content", 0, "text") for item in data]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert texts == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "order=up", "after=x", "limit=a"])
def test_a_page_that_cannot_be_is_refused(query: str) -> None:
    wire = response_wire()
    name = wire.body()["id"]
    assert at(wire.get(f"{name}/input_items?{query}", 400), "error", "param") == query[:5].strip(
        "="
    )


# --- what ends early, and where it is kept ------------------------------------------------------


@pytest.mark.process
def test_the_answer_of_a_client_that_left_is_not_kept() -> None:
    """Nor is what it wrote so far taken for a point in the agent's history."""
    fake, kept = EndlessServing(), Remembering()
    with running(app=create_app(fake, responses=kept)) as server:
        with server.connect() as connection:
            body = json.dumps({"model": "fake", "input": "Hi", "stream": True}).encode()
            head = f"POST {RESPONSES} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}"
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            received = b""
            while b"output_text.delta" not in received:
                received += connection.recv(65536)
        until(lambda: fake.left)
    assert kept.ids == []


@dataclass
class EndlessServing(FakeServing):
    """Writes until the client reads no more."""

    left: bool = False

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """See `ServingPort.answer`."""
        yield AnswerStarted("request-0", ask.agent or "somebody", 1)
        try:
            while True:
                yield TextDelta("word ")
                await asyncio.sleep(0.001)
        finally:
            self.left = True


@dataclass
class Remembering(MemoryResponses):
    """Remembers what was kept, in order."""

    ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(1 << 20)

    def put(self, tenant: str, response: StoredResponse) -> None:
        self.ids.append(response.id)
        super().put(tenant, response)


def test_a_response_is_kept_before_its_end_is_told() -> None:
    """Who has read the last event may go on from it."""

    async def kept_at_each_event() -> list[tuple[bytes, bool]]:
        serving, kept = FakeServing(), Remembering()
        asked = response_request({"model": "fake", "input": "Hi"}, serving.model, Caller(), kept)
        reply = ResponseReply(asked, serving.answer(asked.ask), serving, kept)
        scope = {"type": "http", "app": create_app(serving), "headers": []}
        events = reply.events(Request(scope))
        return [(event.splitlines()[0], bool(kept.ids)) async for event in events]

    found = asyncio.run(kept_at_each_event())
    assert found[0] == (b"event: response.created", False)
    assert found[-1] == (b"event: response.completed", True)


class Failing(MemoryResponses):
    """A place that cannot be read now."""

    def __init__(self) -> None:
        super().__init__(1 << 20)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        del tenant, response_id
        raise StoreError("cannot read secret path")

    def delete(self, tenant: str, response_id: str) -> bool:
        del tenant, response_id
        raise StoreError("cannot read secret path")


def test_a_disk_that_does_not_answer_is_no_unknown_response() -> None:
    app = create_app(FakeServing(), responses=Failing())
    client = TestClient(app, "http://127.0.0.1:8000")
    body = {"model": "fake", "input": "Hi", "previous_response_id": "resp_1"}
    for response in (
        client.get(f"{RESPONSES}/resp_1"),
        client.delete(f"{RESPONSES}/resp_1"),
        client.post(RESPONSES, json=body),
    ):
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert "secret" not in response.text


def test_until_the_model_is_loaded_nothing_is_known() -> None:
    client = TestClient(create_app(), "http://127.0.0.1:8000")
    for response in (
        client.get(f"{RESPONSES}/resp_1"),
        client.delete(f"{RESPONSES}/resp_1"),
        client.get(f"{RESPONSES}/resp_1/input_items"),
        client.post(RESPONSES, json={"model": "fake", "input": "Hi"}),
    ):
        assert response.status_code == 503
