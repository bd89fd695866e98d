"""Tools of clients as functions: calls in their own form, and back as the model wrote them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.domain.chat import Message, ToolCall, point_after
from semantic_server.http.request_fields.client_tools import (
    ANTHROPIC_TOOLS,
    OPENAI_TOOLS,
    arguments_of,
    custom_call,
    custom_tool,
    item_fields,
    written_call,
    written_id,
)

TEXTS = st.text(max_size=9)
ARGUMENTS = st.one_of(
    TEXTS,
    st.dictionaries(st.sampled_from(["input", "path"]), st.one_of(TEXTS, st.integers())).map(
        json.dumps
    ),
    TEXTS.map(lambda text: json.dumps({"input": text})),
    TEXTS.map(lambda text: json.dumps({"input": json.dumps({"input": text})}, indent=1)),
)


def point(call: ToolCall) -> bytes:
    return point_after(b"", Message("assistant", tool_calls=(call,)))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "ls\\n"}', "ls\n"),
        (' { "input" : "\\u00e9" } ', "é"),
        ('{"input": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"input": ""}', ""),
    ],
)
def test_the_input_of_a_custom_tool_is_its_one_text(arguments: str, text: str) -> None:
    assert custom_call("c1", arguments) == ("c1", text)


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "{}",
        "ls",
        '{"input": "l',
        '{"input": 5}',
        '{"input": null}',
        '{"command": "ls"}',
        '{"input": "ls", "path": "/"}',
        "[" * 100_000,
    ],
)
def test_other_arguments_of_a_custom_tool_are_its_input(arguments: str) -> None:
    call_id, text = custom_call("c1", arguments)
    assert text == arguments
    assert call_id != "c1"
    assert written_id(call_id) == "c1"


@given(ARGUMENTS)
def test_a_custom_call_that_comes_back_is_the_one_that_was_written(arguments: str) -> None:
    call_id, text = custom_call("call_1", arguments)
    back = written_call(call_id, "run", text)
    assert point(back) == point(ToolCall("call_1", "run", arguments))


PATCHES: list[dict[str, object]] = [
    {"type": "create_file", "path": "a", "diff": "+x"},
    {"type": "update_file", "path": "a", "diff": ""},
    {"type": "delete_file", "path": "a"},
]
OWN_FORMS: list[tuple[str, dict[str, object], dict[str, object]]] = [
    (
        "local_shell",
        {"command": ["ls", "-l"]},
        {"action": {"type": "exec", "env": {}, "command": ["ls", "-l"]}},
    ),
    (
        "local_shell",
        {"command": [], "workdir": "/", "env": {"A": "1"}, "timeout_ms": 0, "user": "me"},
        {
            "action": {
                "type": "exec",
                "command": [],
                "working_directory": "/",
                "env": {"A": "1"},
                "timeout_ms": 0,
                "user": "me",
            }
        },
    ),
    ("shell", {"commands": ["ls"]}, {"action": {"commands": ["ls"]}}),
    (
        "shell",
        {"commands": ["ls"], "timeout_ms": 5, "max_output_length": 9},
        {"action": {"commands": ["ls"], "timeout_ms": 5, "max_output_length": 9}},
    ),
    *[("apply_patch", one, dict[str, object](operation=one)) for one in PATCHES],
]


@pytest.mark.parametrize(("kind", "arguments", "fields"), OWN_FORMS)
def test_a_call_in_its_own_form_comes_back_as_its_arguments(
    kind: str, arguments: dict[str, object], fields: dict[str, object]
) -> None:
    assert item_fields(kind, json.dumps(arguments)) == fields
    assert arguments_of(kind, fields) == arguments


@pytest.mark.parametrize("kind", ["local_shell", "shell"])
def test_nulls_that_a_client_adds_are_no_arguments(kind: str) -> None:
    _, arguments, fields = next(one for one in OWN_FORMS if one[0] == kind)
    action = fields["action"]
    assert isinstance(action, dict)
    assert arguments_of(kind, {"action": {**action, "timeout_ms": None}}) == arguments


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("local_shell", '{"command": "ls"}'),
        ("local_shell", '{"command": [1]}'),
        ("local_shell", '{"workdir": "/"}'),
        ("local_shell", '{"command": ["ls"], "env": {"A": 1}}'),
        ("local_shell", '{"command": ["ls"], "timeout_ms": true}'),
        ("local_shell", '{"command": ["ls"], "why": "to see"}'),
        ("local_shell", '{"command": ["ls"]'),
        ("shell", '{"commands": ["ls"], "timeout_ms": 1.5}'),
        ("shell", '{"commands": ["ls"], "timeout_ms": null}'),
        ("shell", "[]"),
        ("shell", ""),
        ("apply_patch", '{"type": "move_file", "path": "a", "diff": ""}'),
        ("apply_patch", '{"type": "create_file", "path": "a"}'),
        ("apply_patch", '{"type": "update_file", "diff": "+x"}'),
    ],
)
def test_arguments_of_another_form_have_no_item(kind: str, arguments: str) -> None:
    assert item_fields(kind, arguments) is None


def test_an_item_without_an_action_is_its_own_arguments() -> None:
    assert arguments_of("shell", {"commands": ["ls"]}) == {"commands": ["ls"]}


def test_every_tool_is_a_function_with_a_whole_schema() -> None:
    tools = [*OPENAI_TOOLS.values(), *ANTHROPIC_TOOLS.values(), custom_tool("run", "Runs.", "Any.")]
    for tool in tools:
        assert tool.description
        properties, required = tool.parameters["properties"], tool.parameters["required"]
        assert isinstance(properties, dict)
        assert isinstance(required, list)
        assert set(required) <= properties.keys()
