"""A note gives back what was written in it, and believes nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.cache.agent_notes import Origin, note_of, origin_in, parts_in
from semantic.domain.chat import Chat, Message, Tool
from semantic.domain.identity import Identity
from semantic.domain.request_parts import MAX_MESSAGES, Answered, Parts, parts_of

ORIGIN = Origin(Identity("ses_1", "opencode", None, None), "tools")
CHAT = Chat(
    (Message("developer", "D"), Message("user", "U"), Message("assistant", "A", "T")),
    (Tool("Bash"), Tool('"\n,')),
    template_options={"effort": "low"},
)
PARTS = parts_of(CHAT, 1, {2: Answered.OTHER})

names = st.text(max_size=70)
chats = st.builds(
    Chat,
    st.lists(
        st.builds(
            Message,
            st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
            st.text(max_size=3),
            st.text(max_size=3),
        )
    ).map(tuple),
    st.lists(st.builds(Tool, names)).map(tuple),
    template_options=st.dictionaries(names, st.integers() | st.text()),
)


@given(chats, st.dictionaries(st.integers(0, 9), st.sampled_from(list(Answered))), st.booleans())
def test_parts_come_back(chat: Chat, given_: dict[int, Answered], with_origin: bool) -> None:
    parts = parts_of(chat, len(chat.messages) // 2, given_)
    note = note_of(ORIGIN.note() if with_origin else "", parts)
    assert parts_in(note) == parts
    assert origin_in(note) == (ORIGIN if with_origin else None)


def test_notes_without_parts_are_read_as_before() -> None:
    assert note_of("", None) == ""
    assert note_of(ORIGIN.note(), None) == ORIGIN.note()
    assert origin_in(ORIGIN.note()) == ORIGIN
    assert parts_in(ORIGIN.note()) is None
    assert parts_in("") is None


NOTE = json.loads(note_of("", PARTS))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "hello\nworld",
        '{"parts": 2}',
        '{"parts": 1}',
        '{"parts": 1, "n_messages": ' + "[" * 100_000,
        *(
            json.dumps(NOTE | change)
            for change in (
                {"messages": ["x"]},
                {"messages": ["u?abc"]},
                {"messages": [3]},
                {"messages": None},
                {"tools": [["a"]]},
                {"tools": [["a", 1]]},
                {"options": {"a": "b"}},
                {"n_messages": 2},
                {"n_messages": "3"},
                {"kept": -1},
                {"kept": 4},
            )
        ),
    ],
)
def test_any_other_text_tells_nothing(text: str) -> None:
    assert parts_in(text) is None


def test_a_name_that_somebody_else_wrote_can_be_shown() -> None:
    found = parts_in(json.dumps(NOTE | {"tools": [["\x1b[31m\ud83d" + "x" * 99, "d"]]}))
    assert found is not None
    assert found.tools[0].name == "?[31m?" + "x" * 58


def test_a_note_of_the_longest_conversation_is_small() -> None:
    messages = tuple(Message("assistant", f"a{n}", "t") for n in range(MAX_MESSAGES + 5000))
    tools = tuple(Tool("n" * 100 + str(n)) for n in range(2000))
    note = note_of(ORIGIN.note(), parts_of(Chat(messages, tools, template_options={})))
    assert len(note) < 150_000
    found = parts_in(note)
    assert isinstance(found, Parts)
    assert found.is_cut
