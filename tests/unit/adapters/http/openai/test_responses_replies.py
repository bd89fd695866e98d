"""What a response looks like: its body, the events of its stream, its end and its failures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from semantic.domain.answer import (
    AnswerReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from semantic.domain.errors import ContextOverflowError, OverloadedError
from semantic.domain.match import CacheMiss, MatchEnd, MatchReport
from semantic.domain.request_parts import Change, Difference, PartKind
from tests.support.fake_serving import Script
from tests.unit.adapters.http.openai.response_wire import kinds, response_wire
from tests.unit.adapters.http.openai.wire import Json, at, spelled

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
EVERYTHING = Script(
    (
        ReasoningDelta("Let me "),
        ReasoningDelta("see."),
        TextDelta("I look. "),
        TextDelta("Now."),
        ToolCallStarted(0, "call_1", "look"),
        ToolCallDelta(0, '{"at": '),
        ToolCallDelta(0, '"it"}'),
        ToolCallStarted(1, "call_2", "look"),
        ToolCallDelta(1, "{}"),
    ),
    "tool_calls",
    cached=3,
    completion=40,
    reasoning=7,
)


def without_names(value: object) -> object:
    """A body without what differs each time."""
    if isinstance(value, dict):
        own = {"id", "item_id", "created_at", "completed_at"}
        return {key: without_names(inner) for key, inner in value.items() if key not in own}
    return [without_names(one) for one in value] if isinstance(value, list) else value


def output(body: Json) -> list[Json]:
    found = body["output"]
    assert isinstance(found, list)
    return found


def test_a_text_is_one_message() -> None:
    body = response_wire().body()
    [item] = output(body)
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}
    ]
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", "fake")
    assert body["error"] is None
    assert body["incomplete_details"] is None
    assert str(body["id"]).startswith("resp_")
    assert str(item["id"]).startswith("msg_")


def test_thoughts_text_and_calls_are_items_of_their_own() -> None:
    thought, message, first, second = output(response_wire(EVERYTHING).body(tools=[LOOK]))
    assert thought["type"] == "reasoning"
    assert thought["summary"] == []
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert str(thought["id"]).startswith("rs_")
    assert at(message, "content", 0, "text") == "I look. Now."
    assert (first["call_id"], first["name"]) == ("call_1", "look")
    assert (first["arguments"], second["arguments"]) == ('{"at": "it"}', "{}")
    assert str(first["id"]).startswith("fc_")
    assert len({item["id"] for item in (thought, message, first, second)}) == 4


def test_usage_is_told_in_full() -> None:
    usage = response_wire(EVERYTHING).body()["usage"]
    assert usage == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 2},
        "output_tokens": 40,
        "output_tokens_details": {"reasoning_tokens": 7},
        "total_tokens": 45,
        "semantic": {"lost": None},
    }


def test_usage_tells_what_was_lost() -> None:
    changed = Difference(PartKind.SYSTEM, Change.CHANGED, 1, "system")
    match = MatchReport(9, 2, MatchEnd.DIVERGED, "pool", 2, 5, 6, 0.5, CacheMiss(6, 0.25, changed))
    usage = response_wire(replace(EVERYTHING, match=match)).body()["usage"]
    assert at(usage, "semantic", "lost", "tokens") == 6
    assert at(usage, "semantic", "lost", "reason") == "The system message changed."
    assert at(usage, "total_tokens") == 45


def test_the_events_of_a_text_come_in_the_official_order() -> None:
    assert kinds(response_wire().events()) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


def called(name: str, *arguments: str) -> Script:
    pieces = [ToolCallDelta(0, one) for one in arguments]
    return Script((ToolCallStarted(0, "call_1", name), *pieces), "tool_calls")


RUN: Json = {"type": "custom", "name": "run"}


def test_a_custom_call_is_an_item_with_its_text() -> None:
    wire = response_wire(called("run", '{"input": "a', '\\n"}'))
    [item] = output(wire.body(tools=[RUN]))
    assert str(item.pop("id")).startswith("ctc_")
    assert item == {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "run",
        "input": "a\n",
    }


def test_the_events_of_a_custom_call() -> None:
    events = response_wire(called("run", '{"input": "a', '\\n"}')).events(tools=[RUN])
    assert kinds(events)[2:] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    added, delta, done, ended, completed = events[2:]
    assert (at(added, "item", "input"), at(added, "item", "status")) == ("", "in_progress")
    assert (delta["delta"], done["input"]) == ("a\n", "a\n")
    assert delta["item_id"] == done["item_id"] == at(ended, "item", "id")
    assert at(completed, "response", "output") == [ended["item"]]


def test_other_arguments_are_the_input_of_a_custom_call() -> None:
    [item] = output(response_wire(called("run", '{"code": "a"}')).body(tools=[RUN]))
    assert (item["type"], item["input"]) == ("custom_tool_call", '{"code": "a"}')


def test_a_custom_call_that_is_cut_is_incomplete() -> None:
    script = replace(called("run", '{"input": "a'), reason="length")
    body = response_wire(script).body(tools=[RUN])
    [item] = output(body)
    assert (body["status"], item["status"]) == ("incomplete", "incomplete")
    assert item["input"] == '{"input": "a'


def test_a_custom_tool_in_a_namespace_is_called_with_it() -> None:
    tool = {"type": "namespace", "name": "code", "description": "Runs.", "tools": [RUN]}
    [item] = output(response_wire(called("run", '{"input": ""}')).body(tools=[tool]))
    assert (item["type"], item["namespace"]) == ("custom_tool_call", "code")


OWN_ITEMS = [
    (
        "local_shell",
        '{"command": ["ls"], "workdir": "/"}',
        {"action": {"type": "exec", "command": ["ls"], "working_directory": "/", "env": {}}},
    ),
    ("shell", '{"commands": ["ls"]}', {"action": {"commands": ["ls"]}}),
    (
        "apply_patch",
        '{"type": "delete_file", "path": "a"}',
        {"operation": {"type": "delete_file", "path": "a"}},
    ),
]


@pytest.mark.parametrize(("kind", "arguments", "fields"), OWN_ITEMS)
def test_a_call_of_a_tool_that_the_client_runs_is_an_item_of_its_own(
    kind: str, arguments: str, fields: Json
) -> None:
    script = called(kind, arguments[:5], arguments[5:])
    [item] = output(response_wire(script).body(tools=[{"type": kind}]))
    del item["id"]
    own = {"type": f"{kind}_call", "status": "completed", "call_id": "call_1"}
    assert item == own | fields
    events = response_wire(script).events(tools=[{"type": kind}])
    assert kinds(events)[2:] == ["output_item.added", "output_item.done", "completed"]
    del events[3]["item"]["id"]  # type: ignore[attr-defined]
    assert events[3]["item"] == item


@pytest.mark.parametrize("kind", ["local_shell", "shell", "apply_patch"])
@pytest.mark.parametrize("reason", ["tool_calls", "length"])
def test_a_call_of_another_form_is_a_function_call(kind: str, reason: AnswerReason) -> None:
    script = replace(called(kind, '{"commands": ', '"ls"}'), reason=reason)
    [item] = output(response_wire(script).body(tools=[{"type": kind}]))
    assert (item["type"], item["name"]) == ("function_call", kind)
    assert item["arguments"] == '{"commands": "ls"}'
    events = response_wire(script).events(tools=[{"type": kind}])
    assert kinds(events)[2:6] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert at(events[2], "item", "arguments") == ""
    assert at(events[4], "arguments") == '{"commands": "ls"}'


def test_a_whole_call_of_an_answer_that_is_cut_is_a_function_call() -> None:
    script = replace(called("shell", '{"commands": ["ls"]}'), reason="length")
    [item] = output(response_wire(script).body(tools=[{"type": "shell"}]))
    assert (item["type"], item["status"]) == ("function_call", "incomplete")


def test_each_item_ends_before_the_next_begins() -> None:
    events = response_wire(EVERYTHING).events(tools=[LOOK])
    assert kinds(events)[2:] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_what_the_events_add_up_to_is_the_last_ones_body() -> None:
    events = response_wire(EVERYTHING).events(tools=[LOOK])
    done = [event["item"] for event in events if kinds([event]) == ["output_item.done"]]
    last = events[-1]["response"]
    assert at(last, "output") == done
    for index, item in enumerate(done):
        deltas = [e["delta"] for e in events if e.get("output_index") == index and "delta" in e]
        whole = at(item, "arguments") if index > 1 else at(item, "content", 0, "text")
        assert "".join(map(str, deltas)) == whole
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {at(item, "id") for item in done}


def test_a_reply_is_what_the_stream_ends_with() -> None:
    streamed = response_wire(EVERYTHING).events(tools=[LOOK])[-1]["response"]
    whole = response_wire(EVERYTHING).body(tools=[LOOK])
    assert without_names(streamed) == without_names(whole)


def test_the_first_events_have_an_empty_response_in_progress() -> None:
    first, second, *_, last = response_wire().events()
    assert at(first, "response", "status") == at(second, "response", "status") == "in_progress"
    assert at(first, "response", "output") == []
    assert at(first, "response", "usage") is None
    assert at(first, "response", "id") == at(last, "response", "id")


def test_an_answer_of_nothing_is_an_empty_text() -> None:
    for script in (Script(()), Script((ReasoningDelta("Hm."),))):
        assert at(output(response_wire(script).body())[-1], "content", 0, "text") == ""
        assert kinds(response_wire(script).events())[-2:] == ["output_item.done", "completed"]


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ((TextDelta("Once upon"),), "message"),
        ((ReasoningDelta("Let me"),), "reasoning"),
        ((ToolCallStarted(0, "c", "look"), ToolCallDelta(0, '{"at')), "function_call"),
    ],
)
def test_an_answer_that_was_cut_says_so(pieces: tuple[TextDelta], kind: str) -> None:
    script = Script(pieces, "length")
    body = response_wire(script).body(max_output_tokens=3)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["completed_at"] is None
    [item] = output(body)
    assert (item["type"], item["status"]) == (kind, "incomplete")
    events = response_wire(script).events(max_output_tokens=3)
    assert kinds(events)[-1] == "incomplete"
    assert at(events[-1], "response", "output", 0, "status") == "incomplete"


FAILURES = [
    (Script((TextDelta("Well"),), "error", error="secret path"), "the model failed"),
    (Script((TextDelta("Well"),), "cancelled"), "cancelled"),
]


@pytest.mark.parametrize(("script", "words"), FAILURES)
def test_a_failure_ends_a_stream(script: Script, words: str) -> None:
    wire = response_wire(script)
    events = wire.events()
    assert kinds(events)[-1] == "failed"
    assert kinds(events).count("failed") == 1
    response = events[-1]["response"]
    assert at(response, "status") == "failed"
    is_repeated = script.reason != "cancelled"  # by Codex
    code = "server_error" if is_repeated else "invalid_prompt"
    assert at(response, "error", "code") == code
    assert words in str(at(response, "error", "message"))
    assert "secret" not in json.dumps(events)
    assert at(response, "usage") is None
    wire.get(str(at(response, "id")), 404)


@pytest.mark.parametrize(("script", "words"), FAILURES)
def test_a_failure_of_a_reply_is_an_error(script: Script, words: str) -> None:
    status = 499 if script.reason == "cancelled" else 500
    error = response_wire(script).error(status)
    assert words in str(error["message"])
    assert error["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused_before_it_begins_is_an_error_of_http(stream: bool) -> None:
    overflow = ContextOverflowError("too long", prompt_tokens=9, limit=8)
    error = response_wire(Script(failure=overflow)).error(400, stream=stream)
    assert error["code"] == "context_length_exceeded"
    full = OverloadedError("full", retry_after=3)
    assert response_wire(Script(failure=full)).error(503, stream=stream)["code"] == "overloaded"


def test_logprobs_are_told_where_they_were_asked_for() -> None:
    script = Script(spelled("hi", 2))
    wire = response_wire(script)
    body = wire.body(include=["message.output_text.logprobs"], top_logprobs=2)
    found = at(body, "output", 0, "content", 0, "logprobs")
    assert isinstance(found, list)
    assert [one["token"] for one in found] == ["h", "i"]
    assert [one["token"] for one in found[0]["top_logprobs"]] == ["z", "y"]
    assert found[0]["bytes"] == [104]
    assert wire.asked[-1].sampling.logprobs == 2
    events = response_wire(script).events(top_logprobs=1)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [at(delta, "logprobs", 0, "token") for delta in deltas] == ["h", "i"]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert len(done["logprobs"]) == 2  # type: ignore[arg-type]


def test_a_part_of_a_character_has_no_bytes_but_no_null() -> None:
    [delta] = spelled("\ufffd", 1)
    body = response_wire(Script((delta,))).body(top_logprobs=1)
    assert at(body, "output", 0, "content", 0, "logprobs", 0, "bytes") == []


def test_thoughts_can_be_carried_unread() -> None:
    """A client that drops the thought itself still gives it back, by what it does not read."""
    wire = response_wire(EVERYTHING)
    thought, *_ = output(wire.body(include=["reasoning.encrypted_content"], store=False))
    carried = {k: v for k, v in thought.items() if k not in ("content", "status")}
    wire.body(input=[{"role": "user", "content": "Hi"}, carried, {"role": "user", "content": "?"}])
    assert wire.messages[1].reasoning == "Let me see."
    plain, *_ = output(response_wire(EVERYTHING).body())
    assert plain["encrypted_content"] is None


def test_what_was_asked_is_repeated() -> None:
    given = {
        "instructions": "Be kind.",
        "max_output_tokens": 50,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "high", "summary": "auto"},
        "safety_identifier": "s",
        "temperature": 0.5,
        "top_p": 0.25,
        "user": "u",
        "tool_choice": {"type": "function", "name": "look"},
        "text": {
            "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}},
            "verbosity": "medium",
        },
    }
    body = response_wire().body(**given, tools=[LOOK, {"type": "web_search"}])
    assert {name: body[name] for name in given} == given
    assert [at(tool, "name") for tool in body["tools"]] == ["look"]  # type: ignore[attr-defined]


def test_what_holds_where_nothing_was_said_is_told() -> None:
    body = response_wire().body()
    assert body["store"] is True
    assert body["tool_choice"] == "auto"
    assert body["tools"] == []
    assert body["parallel_tool_calls"] is True
    assert (body["temperature"], body["top_p"]) == (0, 1)
    assert body["truncation"] == "disabled"
    assert body["metadata"] == {}
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
