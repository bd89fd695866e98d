"""What a request for a response asks: its fields, its input, its tools; what is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import pytest
from openai.types.responses import response_create_params as params
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.response_text_config_param import ResponseTextConfigParam
from openai.types.responses.tool_choice_function_param import ToolChoiceFunctionParam
from openai.types.shared_params import Reasoning

from semantic.domain.answer import ToolCallDelta, ToolCallStarted
from semantic.domain.chat import AnswerFormat, Message, Tool, ToolCall, ToolChoice
from semantic_server.http.logs import WarnOnce
from semantic_server.http.openai import conversation, fields
from semantic_server.http.openai.responses import input_items
from semantic_server.http.openai.responses.request import (
    CACHE_OPTION_FIELDS,
    REASONING_FIELDS,
    RESPONSE_FIELDS,
    STREAM_OPTION_FIELDS,
    TEXT_FIELDS,
)
from semantic_server.http.request_fields.table import Field
from tests.support.fake_serving import Script
from tests.unit.adapters.http.openai.response_wire import RESPONSES, response_wire
from tests.unit.adapters.http.openai.wire import Json, at

OURS = {
    "agent_id",
    "chat_template_kwargs",
    "client_metadata",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "semantic",
    "seed",
    "stop",
    "top_k",
}
TABLES = [
    (RESPONSE_FIELDS, params.ResponseCreateParamsNonStreaming, OURS),
    (REASONING_FIELDS, Reasoning, {"max_tokens"}),
    (TEXT_FIELDS, ResponseTextConfigParam, set()),
    (CACHE_OPTION_FIELDS, params.PromptCacheOptions, set()),
    (STREAM_OPTION_FIELDS, params.StreamOptions, set()),
]
USER = {"role": "user", "content": "Hi"}
OBJECT = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK = {"type": "function", "name": "look", "parameters": OBJECT, "strict": True}
SPAWN: Json = {"type": "function", "name": "spawn", "description": "Spawns."}


@pytest.mark.parametrize(("table", "documented", "ours"), TABLES)
def test_every_documented_field_is_in_the_table(
    table: Mapping[str, Field], documented: type, ours: set[str]
) -> None:
    known = set(documented.__annotations__)
    assert set(table) - ours == known
    assert not known & ours


def test_every_documented_item_is_read_left_out_or_refused() -> None:
    """Fails when the SDK has a new one, which needs a decision."""
    documented = {
        at_least_one_type(kind)
        for kind in ResponseInputItemParam.__args__  # type: ignore[attr-defined]
    }
    known = {*input_items._READERS, *input_items._REFUSED, input_items._REFERENCE, *LEFT_OUT}
    assert documented == known


def at_least_one_type(kind: type) -> str:
    """The value of a TypedDict's field `type`."""
    annotation = str(kind.__annotations__["type"])
    return annotation.split("Literal[")[1].split("]", maxsplit=1)[0].strip("'\"")


LEFT_OUT = {
    "code_interpreter_call",
    "compaction_trigger",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "web_search_call",
}

REFUSED = {
    "access_programs": {"cyber": "standard"},
    "background": True,
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "min_tokens": 4,
    "moderation": {"model": "omni"},
    "prompt": {"id": "pmpt_1"},
    "truncation": "auto",
}


def test_the_refusals_below_are_all_there_are() -> None:
    assert set(REFUSED) == {name for name, one in RESPONSE_FIELDS.items() if one.refusal}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    wire = response_wire()
    error = wire.error(**{name: REFUSED[name]})
    assert error["param"] == name
    assert str(error["message"]).startswith(f"{name}: ")
    assert wire.asked == []


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"context": "current_turn"}}, "reasoning.context"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": []}, "metadata"),
        ({"store": "yes"}, "store"),
        ({"stream": "yes"}, "stream"),
        ({"instructions": 5}, "instructions"),
        ({"instructions": [USER]}, "instructions"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": "high"}, "reasoning"),
        ({"include": "x"}, "include"),
        ({"include": [5]}, "include[0]"),
        ({"agent_id": ""}, "agent_id"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": []}, "text"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "look"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": 5}]}, "tools[0].parameters"),
        ({"tools": [LOOK, LOOK]}, "tools[1].name"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
         "tools[0].tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "some", "tools": []}},
         "tool_choice.mode"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "required",
                                            "tools": []}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "auto",
                                            "tools": [{"type": "function", "name": "x"}]}},
         "tool_choice.tools[0].name"),
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [USER, {"role": "user"}]}, "input[1].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
         "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "other"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "arguments": "{}", "name": "n"}]},
         "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c",
                     "output": [{"type": "other"}]}]}, "input[0].output[0].type"),
        ({"input": [{"type": "reasoning", "summary": 5}]}, "input[0].summary"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "n"}]}, "input[0].input"),
        ({"input": [{"type": "additional_tools", "tools": 5}]}, "input[0].tools"),
        ({"input": [{"type": "tool_search_output", "call_id": "c"}]}, "input[0].tools"),
        ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "configuration_update"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call_output", "call_id": "c"}]}, "input[0].output"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(given: dict[str, object], param: str) -> None:
    wire = response_wire()
    error = wire.error(**given)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert wire.asked == []


@pytest.mark.parametrize(
    "given",
    [
        {"background": False, "service_tier": "flex", "truncation": "disabled"},
        {"context_management": [], "min_tokens": 0, "image": {"context_compression": "auto"}},
        {"user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "max_tool_calls": 3},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"mode": "implicit", "ttl": "30m", "prewarm": False}},
        {"client_metadata": {"x": "y"}, "store": False},
        {"reasoning": {"summary": "auto", "context": "auto", "mode": "standard"}},
        {"text": {"verbosity": "medium", "format": {"type": "text"}}},
        {"include": ["reasoning.encrypted_content", "file_search_call.results", "new.one"]},
        {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True},
        dict.fromkeys(RESPONSE_FIELDS.keys() - {"model", "input"}),
    ],
)
def test_accepted_values_change_nothing(given: dict[str, object]) -> None:
    plain, other = response_wire(), response_wire()
    plain.body()
    other.body(**given)
    [asked] = other.asked
    assert [replace(asked, identity=None)] == plain.asked, "who asks is another matter"


def test_an_unknown_model_is_a_404() -> None:
    assert response_wire().error(404, model="gpt-6")["code"] == "model_not_found"
    assert response_wire().error(model=None)["param"] == "model"


def test_sampling_is_as_asked() -> None:
    wire = response_wire()
    wire.body(temperature=0.5, top_p=0.9, top_k=3, seed=7, stop="end", max_output_tokens=9)
    ask = wire.asked[-1]
    sampling = ask.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    assert (sampling.seed, sampling.stop, ask.max_tokens) == (7, ("end",), 9)


@pytest.mark.parametrize(("effort", "thinks"), [("high", True), ("none", False)])
def test_effort_goes_to_the_template(effort: str, thinks: bool) -> None:
    wire = response_wire()
    wire.body(reasoning={"effort": effort}, chat_template_kwargs={"depth": 2})
    assert wire.chat.template_options == {
        "reasoning_effort": effort,
        "enable_thinking": thinks,
        "depth": 2,
    }


def test_a_format_becomes_a_grammar() -> None:
    wire = response_wire()
    wire.body(text={"format": {"type": "json_schema", "name": "n", "schema": OBJECT}})
    assert wire.chat.answer_format == AnswerFormat(OBJECT)
    wire.body(text={"format": {"type": "json_object"}})
    assert wire.chat.answer_format == AnswerFormat()


def test_the_agent_may_be_named() -> None:
    wire = response_wire()
    wire.body(agent_id="ada")
    assert wire.asked[-1].agent == "ada"
    body: Json = {"model": "fake", "input": "Hi"}
    wire.wire.post(RESPONSES, body, {"X-Agent-ID": "bob"})
    assert wire.asked[-1].agent == "bob"


# --- input ------------------------------------------------------------------------------------


def test_a_text_is_a_users_message_behind_the_instructions() -> None:
    wire = response_wire()
    wire.body(instructions="Be kind.")
    assert wire.messages == [Message("system", "Be kind."), Message("user", "Hello")]


def test_messages_stay_where_they_stand() -> None:
    wire = response_wire()
    wire.body(
        input=[
            {"type": "message", "role": "developer", "content": "Rules."},
            {"role": "user", "content": [{"type": "input_text", "text": "One"},
                                         {"type": "input_text", "text": "two"}]},
            {"role": "system", "content": "Now this."},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Go."},
        ]
    )  # fmt: skip
    assert wire.messages == [
        Message("developer", "Rules."),
        Message("user", "One\ntwo"),
        Message("system", "Now this."),
        Message("assistant", "Yes."),
        Message("user", "Go."),
    ]


CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": "{}"}
OTHER = {**CALL, "id": "fc_2", "call_id": "c2"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "blue"}


def said(text: str, **more: object) -> dict[str, object]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], **more}


def thought(text: str, **more: object) -> dict[str, object]:
    return {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        **more,
    }


def test_the_items_of_an_answer_are_one_message() -> None:
    wire = response_wire()
    wire.body(
        input=[
            USER,
            thought("Hm.", id="rs_1"),
            said("I look.", id="msg_1", status="completed"),
            CALL,
            OTHER,
            RESULT,
            {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "green"}]},
        ]
    )
    calls = (ToolCall("c1", "look", "{}"), ToolCall("c2", "look", "{}"))
    assert wire.messages[1:] == [
        Message("assistant", "I look.", reasoning="Hm.", tool_calls=calls),
        Message("tool", "blue", tool_call_id="c1"),
        Message("tool", "green", tool_call_id="c2"),
    ]


def test_items_without_ids_are_put_together_as_far_as_one_answer_goes() -> None:
    wire = response_wire()
    call = {key: value for key, value in CALL.items() if key != "id"}
    wire.body(input=[USER, thought("A"), said("1"), call, said("2"), thought("B"), said("3")])
    assert wire.messages[1:] == [
        Message("assistant", "1", reasoning="A", tool_calls=(ToolCall("c1", "look", "{}"),)),
        Message("assistant", "2"),
        Message("assistant", "3", reasoning="B"),
    ]


def test_text_behind_a_call_of_the_same_answer_stays_in_its_message() -> None:
    wire = response_wire()
    wire.body(input=[USER, said("1", id="msg_1"), CALL, said("2", id="msg_2"), RESULT])
    assert wire.messages[1].content == "12"
    assert len(wire.messages) == 3


@pytest.mark.parametrize(
    ("item", "found"),
    [
        (thought("deep"), "deep"),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}, "short"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, ""),
        ({"type": "reasoning", "summary": [], "encrypted_content": "semantic.thought.***"}, ""),
        ({"type": "reasoning", "id": None, "content": None, "summary": []}, ""),
    ],
)
def test_thoughts_come_back(item: dict[str, object], found: str) -> None:
    wire = response_wire()
    wire.body(input=[USER, item, said("Yes."), USER])
    assert wire.messages[1] == Message("assistant", "Yes.", reasoning=found)


def test_calls_of_other_tools_are_told_as_calls() -> None:
    wire = response_wire()
    wire.body(
        input=[
            USER,
            {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Add"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
            {"type": "shell_call", "call_id": "c2", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c2", "output": [{"stdout": "a"}]},
            {"type": "local_shell_call", "id": "c3", "status": "completed",
             "action": {"type": "exec", "command": ["ls"], "env": {}}},
            {"type": "local_shell_call_output", "id": "c3", "output": "b"},
            {"type": "apply_patch_call", "call_id": "c4", "status": "completed",
             "operation": {"type": "delete_file", "path": "p"}},
            {"type": "apply_patch_call_output", "call_id": "c4", "status": "completed"},
        ]
    )  # fmt: skip
    said_now = wire.messages[1:]
    assert [m.tool_calls[0] for m in said_now[::2]] == [
        ToolCall("c1", "patch", '{"input": "*** Add"}'),
        ToolCall("c2", "shell", '{"commands": ["ls"]}'),
        ToolCall("c3", "local_shell", '{"command": ["ls"]}'),
        ToolCall("c4", "apply_patch", '{"type": "delete_file", "path": "p"}'),
    ]
    assert [(m.tool_call_id, m.content) for m in said_now[1::2]] == [
        ("c1", "done"),
        ("c2", '[{"stdout": "a"}]'),
        ("c3", "b"),
        ("c4", "{}"),
    ]


@pytest.mark.parametrize("kind", [*sorted(LEFT_OUT), "something_new"])
def test_what_a_service_did_is_left_out_with_one_warning(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_items, "warnings", WarnOnce())
    wire = response_wire()
    with caplog.at_level(logging.WARNING, "semantic.server"):
        for _ in range(2):
            wire.body(input=[USER, {"type": kind, "id": "x"}])
    assert wire.messages == [Message("user", "Hi")]
    assert caplog.messages == [f"dropped input items of type '{kind}'"]


# --- tools ------------------------------------------------------------------------------------


def test_functions_are_tools() -> None:
    wire = response_wire()
    wire.body(tools=[LOOK, SPAWN])
    assert wire.chat.tools == (Tool("look", "", OBJECT, strict=True), Tool("spawn", "Spawns."))


@pytest.mark.parametrize("kind", ["web_search", "tool_search", "mcp", "something_new"])
def test_other_tools_are_left_out_with_one_warning(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "warnings", WarnOnce())
    wire = response_wire()
    with caplog.at_level(logging.WARNING, "semantic.server"):
        for _ in range(2):
            wire.body(tools=[{"type": kind, "name": "x"}, SPAWN])
    assert [tool.name for tool in wire.chat.tools] == ["spawn"]
    assert caplog.messages == [f"dropped tools of type '{kind}': only clients run tools"]


LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
PATCH: Json = {"type": "custom", "name": "patch", "description": "Edits.", "format": LARK}


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    wire = response_wire()
    body = wire.body(tools=[PATCH, {"type": "custom", "name": "run"}])
    patch, run = wire.chat.tools
    assert (patch.name, patch.description, run.name) == ("patch", "Edits.", "run")
    assert at(dict(patch.parameters), "properties", "input", "description") == (
        "A text that matches this lark:\nstart: /.+/s"
    )
    assert body["tools"] == [PATCH, {"type": "custom", "name": "run"}]


def test_tools_that_the_client_runs_are_functions() -> None:
    wire = response_wire()
    kinds = ["local_shell", "shell", "apply_patch"]
    body = wire.body(tools=[{"type": kind} for kind in kinds])
    assert [tool.name for tool in wire.chat.tools] == kinds
    assert body["tools"] == [{"type": kind} for kind in kinds]


def test_a_shell_in_a_container_of_openais_is_left_out() -> None:
    wire = response_wire()
    wire.body(tools=[{"type": "shell", "environment": {"type": "container_auto"}}])
    assert not wire.chat.tools
    wire.body(tools=[{"type": "shell", "environment": {"type": "local"}}])
    assert [tool.name for tool in wire.chat.tools] == ["shell"]


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "shell"}, "shell"),
        ({"type": "function", "name": "spawn"}, "spawn"),
    ],
)
def test_a_tool_of_any_kind_can_be_chosen(choice: Json, name: str) -> None:
    wire = response_wire()
    given = [PATCH, {"type": "shell"}, SPAWN]
    body = wire.body(tools=given, tool_choice=choice)
    assert wire.chat.tool_choice == ToolChoice("required", name)
    assert body["tool_choice"] == choice
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice, {"type": "mcp"}]}
    body = wire.body(tools=given, tool_choice=allowed)
    assert [tool.name for tool in wire.chat.tools] == [name]
    assert at(body, "tool_choice", "tools") == [choice]


def test_a_choice_that_openais_types_lack_is_told_as_a_function() -> None:
    wire = response_wire()
    body = wire.body(tools=[{"type": "local_shell"}], tool_choice={"type": "local_shell"})
    assert wire.chat.tool_choice == ToolChoice("required", "local_shell")
    assert body["tool_choice"] == {"type": "function", "name": "local_shell"}


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "custom", "name": "x"}, "tool_choice.name"),
        ({"type": "custom"}, "tool_choice.name"),
        ({"type": "shell"}, "tool_choice"),
        ({"type": "web_search_preview"}, "tool_choice.type"),
        ({"type": []}, "tool_choice.type"),
    ],
)
def test_a_choice_of_an_unknown_tool_is_refused_by_place(choice: Json, param: str) -> None:
    assert response_wire().error(tools=[PATCH], tool_choice=choice)["param"] == param


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([{"type": "custom"}], "tools[0].name"),
        ([{"type": "custom", "name": ""}], "tools[0].name"),
        ([{"type": "custom", "name": "x", "description": 5}], "tools[0].description"),
        ([{"type": "custom", "name": "x", "format": {"type": "x"}}], "tools[0].format.type"),
        ([PATCH, PATCH], "tools[1].name"),
        ([PATCH, {**SPAWN, "name": "patch"}], "tools[1].name"),
        ([{"type": "shell"}, {**SPAWN, "name": "shell"}], "tools[1].name"),
    ],
)
def test_a_wrong_custom_tool_is_refused_by_place(given: list[Json], param: str) -> None:
    assert response_wire().error(tools=given)["param"] == param


def namespace(name: str, *tools: Json) -> dict[str, object]:
    return {"type": "namespace", "name": name, "description": "Agents.", "tools": list(tools)}


def test_a_namespace_is_its_functions() -> None:
    script = Script((ToolCallStarted(0, "c1", "spawn"), ToolCallDelta(0, "{}")), "tool_calls")
    wire = response_wire(script)
    given = namespace("agents", SPAWN, {"type": "custom", "name": "x"}, {"type": "mcp"})
    body = wire.body(tools=[LOOK, given])
    assert [tool.name for tool in wire.chat.tools] == ["look", "spawn", "x"]
    assert (at(body, "output", 0, "name"), at(body, "output", 0, "namespace")) == (
        "spawn",
        "agents",
    )
    assert at(body, "tools", 1, "tools", 0, "name") == "spawn"


def test_functions_of_the_same_name_are_told_apart_by_their_namespaces() -> None:
    script = Script((ToolCallStarted(0, "c1", "b__spawn"), ToolCallDelta(0, "{}")), "tool_calls")
    wire = response_wire(script)
    tools = [namespace("a", SPAWN), namespace("b", SPAWN)]
    body = wire.body(tools=tools)
    assert [tool.name for tool in wire.chat.tools] == ["spawn", "b__spawn"]
    item = at(body, "output", 0)
    assert (at(item, "name"), at(item, "namespace")) == ("spawn", "b")
    wire.body(tools=tools, input=[USER, item])
    assert wire.messages[1].tool_calls[0].name == "b__spawn"


def test_functions_outside_keep_their_names() -> None:
    wire = response_wire()
    wire.body(tools=[namespace("a", SPAWN), SPAWN])
    assert [tool.name for tool in wire.chat.tools] == ["spawn", "a__spawn"]


@pytest.mark.parametrize(
    ("given", "choice", "names"),
    [
        ("auto", ToolChoice(), ["look", "spawn"]),
        ("none", ToolChoice("none"), ["look", "spawn"]),
        ("required", ToolChoice("required"), ["look", "spawn"]),
        ({"type": "function", "name": "look"}, ToolChoice("required", "look"), ["look", "spawn"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"},
             {"type": "function", "name": "spawn"}]},
            ToolChoice(),
            ["spawn"],
        ),
        (
            {"type": "allowed_tools", "mode": "required",
             "tools": [{"type": "function", "name": "spawn"}]},
            ToolChoice("required"),
            ["spawn"],
        ),
    ],
)  # fmt: skip
def test_the_choice_among_tools(given: object, choice: ToolChoice, names: list[str]) -> None:
    wire = response_wire()
    wire.body(tools=[LOOK, SPAWN], tool_choice=given)
    assert wire.chat.tool_choice == choice
    assert [tool.name for tool in wire.chat.tools] == names


def test_calls_may_be_one_at_a_time() -> None:
    wire = response_wire()
    wire.body(tools=[LOOK], parallel_tool_calls=False)
    assert wire.chat.parallel_tool_calls is False


def test_tools_may_come_in_the_midst_of_a_conversation() -> None:
    wire = response_wire()
    first = wire.body(
        tools=[LOOK],
        input=[
            USER,
            {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "agents"}},
            {"type": "tool_search_output", "call_id": "c", "tools": [namespace("agents", SPAWN)]},
            {"type": "additional_tools", "role": "developer", "tools": [{**LOOK, "name": "hear"}]},
        ],
    )
    assert [tool.name for tool in wire.chat.tools] == ["look", "spawn", "hear"]
    assert wire.messages[1:] == [
        Message("assistant", tool_calls=(ToolCall("c", "tool_search", '{"query": "agents"}'),)),
        Message("tool", '{"tools": ["agents"]}', tool_call_id="c"),
    ]
    wire.body(previous_response_id=first["id"], tools=[LOOK])
    assert [tool.name for tool in wire.chat.tools] == ["look", "spawn", "hear"]


def test_a_choice_in_the_sdks_shape_is_read() -> None:
    given: ToolChoiceFunctionParam = {"type": "function", "name": "look"}
    wire = response_wire()
    assert wire.body(tools=[LOOK], tool_choice=given)["tool_choice"] == given


def test_an_unknown_field_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "warnings", WarnOnce())
    wire = response_wire()
    with caplog.at_level(logging.WARNING, "semantic.server"):
        for _ in range(2):
            wire.body(typo=1, reasoning={"depth": 2})
    assert sorted(caplog.messages) == [
        "unknown field 'reasoning.depth' has no effect",
        "unknown field 'typo' has no effect",
    ]
