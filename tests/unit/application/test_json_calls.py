"""Calls in JSON, as a whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.chat.json_calls import WrittenCall, read_calls
from semantic.domain.errors import ToolCallError

CALL = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}'
NAMES = ("get_weather", "stop", "a tool")


def test_a_call_is_read() -> None:
    expected = WrittenCall("get_weather", '{"city": "Oslo", "days": 2}')
    assert read_calls(f"\n{CALL}\n", NAMES) == [expected]


def test_several_calls_are_read_in_order() -> None:
    calls = read_calls(f'[{CALL}, {{"tool_name": "stop", "parameters": {{}}}}]', NAMES)
    assert [call.name for call in calls] == ["get_weather", "stop"]


@pytest.mark.parametrize(
    "text",
    [
        "", "no call at all", "{", "[]", "{}", "[[1]]", "3", '{"name": 3, "arguments": {}}',
        "[" * 100_000, '{"name": "get_weather", "arguments": {"a": ' + "[" * 100_000,
        '{"name": "stop", "arguments": {"a": NaN}}', '{"name": "stop", "arguments": {"a": 1e999}}',
        '{"name": "no tool", "arguments": {}}',
        "__import__('sys').exit()",
    ],
)  # fmt: skip
def test_what_is_no_call_is_an_error_that_says_so(text: str) -> None:
    with pytest.raises(ToolCallError) as caught:
        read_calls(text, NAMES)
    assert str(caught.value)


@pytest.mark.parametrize(
    ("written", "name", "arguments"),
    [
        ('{"name": "fly", "arguments": {}}', "fly", "{}"),
        ('{"name": "a tool"}', "a tool", "{}"),
        ('{"name": "get_weather", "arguments": [1]}', "get_weather", "[1]"),
        ('{"name": "get_weather", "arguments": 1}', "get_weather", "1"),
        ('{"name": "get_weather", "arguments": "Oslo"}', "get_weather", "Oslo"),
        ('{"name": "get_weather", "arguments": "{\\"a\\": 1}"}', "get_weather", '{"a": 1}'),
    ],
)
def test_a_call_that_no_tool_takes_is_returned_as_it_was_written(
    written: str, name: str, arguments: str
) -> None:
    assert read_calls(written, NAMES) == [WrittenCall(name, arguments)]


@given(st.text(max_size=60))
def test_any_text_is_a_call_or_an_error(text: str) -> None:
    try:
        calls = read_calls(text, NAMES)
    except ToolCallError:
        return
    assert calls
    for call in calls:
        assert call.name.strip()


def test_half_a_surrogate_pair_is_none_that_every_client_reads() -> None:
    text = '{"name": "stop", "arguments": {"x": "\\ud800", "y": "\\ud83d\\udc09"}}'
    (call,) = read_calls(text, NAMES)
    assert call.arguments == '{"x": "\ufffd", "y": "\U0001f409"}'


@pytest.mark.parametrize("depth", [51, 300, 700])
def test_a_call_that_no_body_could_bring_back_is_refused(depth: int) -> None:
    def read(levels: int) -> None:
        inside = "[" * (levels - 1) + "]" * (levels - 1)
        read_calls(f'{{"name": "stop", "arguments": {{"x": {inside}}}}}', NAMES)

    read(50)
    with pytest.raises(ToolCallError, match="must have at most 50 levels"):
        read(depth)
