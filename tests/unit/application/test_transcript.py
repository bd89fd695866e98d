"""A conversation as a line of a note: what is written is read again, and anything else is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.cache.agent_notes import Origin, note_of, parts_in
from semantic.application.chat.transcript import (
    MAX_TRANSCRIPT,
    message_of,
    messages_in,
    transcript_of,
)
from semantic.domain.chat import Chat, Message, ToolCall
from semantic.domain.errors import InvalidRequestError
from semantic.domain.identity import Identity
from semantic.domain.request_parts import parts_of

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
CALLS = st.lists(st.builds(ToolCall, TEXT, TEXT, TEXT), max_size=2).map(tuple)
PAST = st.lists(
    st.builds(
        Message,
        st.sampled_from(("system", "user", "assistant", "tool")),
        TEXT,
        TEXT,
        CALLS,
        st.none() | TEXT.filter(bool),
        st.none() | TEXT.filter(bool),
    ),
    max_size=4,
)
PARTS = parts_of(Chat((Message("user", "a"),)), 0, {})
ORIGIN = Origin(Identity("s", "c", None, None), "plain").note()


@given(PAST, st.sampled_from(["user", "tool"]), st.booleans(), st.booleans())
def test_what_is_written_is_read_again(
    past: list[Message], role: str, with_origin: bool, with_parts: bool
) -> None:
    messages = (*past, message_of({"role": role, "content": "last"}))
    parts = PARTS if with_parts else None
    note = note_of(ORIGIN if with_origin else "", parts, transcript_of(messages))
    assert messages_in(note) == messages
    assert parts_in(note) == parts


@pytest.mark.parametrize(
    "note",
    ["", "null", "{", "[]", "{}", ORIGIN, '{"messages": 1}', '{"messages": []}',
     '{"messages": [' + "[" * 100_000, '{"messages": [{"role": "assistant", "content": "a"}]}',
     '{"messages": [{"role": "user", "content": 1}]}', '{"messages": [{"role": "user"}]}',
     '{"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}'],
)  # fmt: skip
def test_any_other_text_has_no_messages(note: str) -> None:
    assert messages_in(note) is None


def test_a_conversation_that_is_too_long_is_not_written() -> None:
    least = len(transcript_of([Message("user", "")]))
    assert transcript_of([Message("user", "a" * (MAX_TRANSCRIPT - least))])
    assert transcript_of([Message("user", "a" * (MAX_TRANSCRIPT - least + 1))]) == ""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, 'expected a Message or an object with "role" and "content"'),
        ({"role": "user"}, 'expected a Message or an object with "role" and "content"'),
        ({"role": "user", "content": "a", "more": 1}, "expected a Message or an object"),
        ({"role": "bot", "content": "a"}, "role must be one of system, developer, user"),
        ({"role": ["user"], "content": "a"}, "role must be one of"),
        ({"role": "user", "content": None}, "content must be a string, got NoneType"),
        ({"role": "assistant", "content": "", "tool_calls": {}}, "tool_calls must be objects"),
    ],
)
def test_a_message_that_is_none_says_what_was_expected(given: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        message_of(given)
