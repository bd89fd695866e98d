"""Conversations that say the same are at the same point, however they are written down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semantic.domain.chat import Chat, Message, Tool, ToolCall, Turn, agrees, points, thought_digest

CALL = ToolCall("call_1", "weather", '{"city": "Oslo", "days": 2}')
MESSAGES = (
    Message("system", "Be kind."),
    Message("user", "Weather?"),
    Message("assistant", "I look.", "Hm.", (CALL,)),
    Message("tool", "Rain.", tool_call_id="call_1"),
    Message("assistant", "It rains."),
)
TOOL = Tool("weather", "Tells it.", {"type": "object", "properties": {"a": {}, "b": {}}})
REORDERED = {"properties": {"b": {}, "a": {}}, "type": "object"}
CHAT = Chat(MESSAGES, (TOOL,), template_options={"enable_thinking": True})


def changed(number: int, **changes: object) -> Chat:
    messages = list(MESSAGES)
    messages[number] = replace(messages[number], **changes)  # type: ignore[arg-type]
    return replace(CHAT, messages=tuple(messages))


def test_there_is_a_point_before_and_after_each_message() -> None:
    at = points(CHAT, b"scope")
    assert len(at) == len(set(at)) == len(MESSAGES) + 1
    for n in range(len(MESSAGES)):
        assert points(replace(CHAT, messages=MESSAGES[:n]), b"scope") == at[: n + 1]


@pytest.mark.parametrize(
    "chat",
    [
        changed(2, reasoning=""),
        changed(2, content=" I look.\n"),
        changed(2, tool_calls=(replace(CALL, arguments='{"days":2,"city":"Oslo"}'),)),
        replace(CHAT, tools=(replace(TOOL, parameters=REORDERED),)),
    ],
    ids=["thought left out", "white space", "order of arguments", "order of a schema"],
)
def test_what_clients_vary_without_meaning_it_is_no_difference(chat: Chat) -> None:
    assert points(chat, b"scope") == points(CHAT, b"scope")


@pytest.mark.parametrize(
    ("chat", "same"),
    [
        (replace(CHAT, tools=()), 0),
        (replace(CHAT, template_options={}), 0),
        (changed(0, content="Be kind. "), 1),
        (changed(1, role="developer"), 2),
        (changed(2, content="I looked."), 3),
        (changed(2, tool_calls=()), 3),
        (changed(2, tool_calls=(replace(CALL, arguments='{"city": "Rome", "days": 2}'),)), 3),
        (changed(2, tool_calls=(replace(CALL, arguments='{"city": "Oslo"'),)), 3),
        (changed(3, tool_call_id="call_2"), 4),
        (changed(4, name="ann"), 5),
    ],
)
def test_every_other_difference_counts_from_where_it_is(chat: Chat, same: int) -> None:
    at, other = points(CHAT, b"scope"), points(chat, b"scope")
    assert at[:same] == other[:same]
    assert not set(at[same:]) & set(other[same:])


@pytest.mark.parametrize(
    ("written", "sent_back"),
    [
        ('{"n": 1.0}', '{"n":1}'),
        ('{"n": -0.0}', '{"n":0}'),
        ('{"n": 1e3}', '{"n":1000}'),
        ('{"n": 1E400}', '{"n": 1E400}'),
        ('{"n": 12345678901234567890}', '{"n":12345678901234567000}'),
        ('{"n": 100000000000000000000000}', '{"n":1e+23}'),
    ],
)
def test_a_number_is_the_same_when_javascript_sends_it_back(written: str, sent_back: str) -> None:
    one, other = (
        changed(2, tool_calls=(replace(CALL, arguments=text),)) for text in (written, sent_back)
    )
    assert points(one, b"scope") == points(other, b"scope")


EDIT = Tool(
    "edit",
    parameters={
        "type": "object",
        "properties": {
            "new": {"type": "string"},
            "all": {"type": "boolean", "default": False},
            "limit": {"type": "number", "default": 2000},
            "odd": True,
        },
    },
)


def edits(arguments: str) -> list[bytes]:
    call = ToolCall("call_1", "edit", arguments)
    return points(Chat((Message("assistant", tool_calls=(call,)),), (EDIT,)), b"scope")


@pytest.mark.parametrize(
    ("written", "sent_back", "same"),
    [
        ('{"new": "a  \\n\\tb\\t"}', '{"all": false, "new": "a\\n\\tb"}', True),
        ('{"new": "a\\r\\n"}', '{"limit": 2000.0, "new": "a\\n"}', True),
        ('{"new": ["a "], "o": {"p": "b "}}', '{"new": ["a"], "o": {"p": "b"}}', True),
        ('{"new": "a"}', '{"new": "a", "all": true}', False),
        ('{"new": "a"}', '{"new": "a", "limit": 1}', False),
        ('{"new": "a"}', '{"new": "a", "odd": true}', False),
        ('{"new": " a"}', '{"new": "a"}', False),
        ('{"new": "a\\n\\n"}', '{"new": "a\\n"}', False),
        ('{"new": "a  b"}', '{"new": "a b"}', False),
    ],
)
def test_clients_add_defaults_and_trim_lines(written: str, sent_back: str, same: bool) -> None:
    assert (edits(written) == edits(sent_back)) is same


@pytest.mark.parametrize(
    ("one", "other"),
    [("1", "2"), ("1", "1.5"), ("1", '"1"'), ("1", "true"), ("1e400", "1e401"), ("0.1", "0.2")],
)
def test_other_numbers_are_others(one: str, other: str) -> None:
    chats = (changed(2, tool_calls=(replace(CALL, arguments=text),)) for text in (one, other))
    first, second = (points(chat, b"scope") for chat in chats)
    assert first != second


def test_nothing_is_at_one_point_in_two_scopes() -> None:
    assert not set(points(CHAT, b"one")) & set(points(CHAT, b"two"))


def test_a_thought_agrees_when_it_is_left_out_or_the_same() -> None:
    turn = Turn(b"p", None, 0, (1,), thought_digest("Hm.\n"))
    assert [
        agrees(turn, Message("assistant", "x", reasoning)) for reasoning in ("", "Hm.", "Never.")
    ] == [True, True, False]
