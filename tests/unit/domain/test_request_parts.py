"""The first part of a request that is not as it was; what clients vary freely is no difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.domain import request_parts
from semantic.domain.chat import Chat, Message, Role, Tool, ToolCall
from semantic.domain.request_parts import (
    Answered,
    Change,
    Difference,
    PartKind,
    Parts,
    changed_part,
    parts_of,
    rendered_part,
)

CALL = ToolCall("call_1", "weather", '{"city": "Oslo", "days": 2}')
MESSAGES = (
    Message("system", "Be kind."),
    Message("user", "Weather?"),
    Message("assistant", "I look.", "Hm.", (CALL,)),
    Message("tool", "Rain.", tool_call_id="call_1"),
    Message("assistant", "It rains."),
    Message("user", "Thanks."),
)
TOOLS = tuple(Tool(name, f"Does {name}.", {"type": "object"}) for name in ("Read", "Bash", "Web"))
CHAT = Chat(MESSAGES, TOOLS, template_options={"effort": "low", "thinking": True})
MORE = replace(
    CHAT, messages=(*MESSAGES, Message("assistant", "Welcome.", "Polite."), Message("user", "Bye"))
)


def with_messages(*messages: Message) -> Chat:
    return replace(CHAT, messages=messages)


def with_tools(*tools: Tool) -> Chat:
    return replace(CHAT, tools=tools)


def edited(number: int, **changes: object) -> Chat:
    messages = list(MORE.messages)
    messages[number] = replace(messages[number], **changes)  # type: ignore[arg-type]
    return replace(CHAT, messages=tuple(messages))


def first(now: Chat, kept: int = 0) -> Difference | None:
    return changed_part(parts_of(CHAT), parts_of(now, kept))


@pytest.mark.parametrize(
    "chat",
    [
        CHAT,
        MORE,
        edited(4, content=" It rains.\n"),
        edited(2, tool_calls=(replace(CALL, arguments='{"days":2,"city":"Oslo"}'),)),
        edited(2, reasoning=" Hm.\n"),
        replace(MORE, tools=(replace(TOOLS[0], parameters=dict(TOOLS[0].parameters)), *TOOLS[1:])),
        replace(MORE, template_options={"thinking": True, "effort": "low"}),
    ],
)
def test_nothing_changed(chat: Chat) -> None:
    assert first(chat) is None


SYSTEM = (PartKind.SYSTEM, 1, "system")
NEW = Message("user", "And?")


@pytest.mark.parametrize(
    ("chat", "kind", "change", "number", "name"),
    [
        (replace(CHAT, template_options={"effort": "high", "thinking": True}),
         "option", "changed", None, "effort"),
        (replace(CHAT, template_options={"effort": "low"}), "option", "removed", None, "thinking"),
        (replace(CHAT, template_options={**CHAT.template_options, "a": 1}),
         "option", "added", None, "a"),
        (with_tools(TOOLS[0], replace(TOOLS[1], description="!"), TOOLS[2]),
         "tool", "changed", 2, "Bash"),
        (with_tools(TOOLS[0], replace(TOOLS[1], strict=True), TOOLS[2]),
         "tool", "changed", 2, "Bash"),
        (with_tools(TOOLS[0], TOOLS[2], TOOLS[1]), "tool", "moved", 2, "Web"),
        (with_tools(TOOLS[0], Tool("Edit"), *TOOLS[1:]), "tool", "added", 2, "Edit"),
        (with_tools(*TOOLS, Tool("Edit")), "tool", "added", 4, "Edit"),
        (with_tools(TOOLS[0], TOOLS[2]), "tool", "removed", 2, "Bash"),
        (with_tools(*TOOLS[:2]), "tool", "removed", 3, "Web"),
        (with_tools(), "tool", "removed", 1, "Read"),
        (with_tools(*TOOLS, TOOLS[2]), "tool", "added", 4, "Web"),
        (edited(0, content="Be kind. "), "system", "changed", 1, "system"),
        (with_messages(*MESSAGES[1:]), "system", "removed", 1, "system"),
        (with_messages(MESSAGES[0], Message("developer", "Now."), *MESSAGES[1:]),
         "system", "added", 2, "developer"),
        (with_messages(Message("system", "First."), *MESSAGES), "system", "added", 1, "system"),
        (edited(1, content="Snow?"), "message", "changed", 1, "user"),
        (edited(3, content="Sun."), "message", "changed", 3, "tool"),
        (edited(3, tool_call_id="call_2"), "message", "changed", 3, "tool"),
        (edited(2, tool_calls=()), "message", "changed", 2, "assistant"),
        (with_messages(*MESSAGES[:3], NEW, *MESSAGES[3:]), "message", "added", 3, "user"),
        (with_messages(*MESSAGES[:4], *MESSAGES[5:]), "message", "removed", 4, "assistant"),
        (with_messages(*MESSAGES[:3]), "message", "removed", 3, "tool"),
        (edited(2, reasoning=""), "thinking", "removed", 2, "assistant"),
        (edited(2, reasoning="What?"), "thinking", "changed", 2, "assistant"),
        (edited(4, reasoning="Well."), "thinking", "added", 4, "assistant"),
    ],
)  # fmt: skip
def test_what_changed_is_told(
    chat: Chat, kind: str, change: str, number: int | None, name: str
) -> None:
    assert first(chat) == Difference(PartKind(kind), Change(change), number, name)


def test_what_comes_first_in_a_prompt_is_told() -> None:
    both = replace(edited(0, content="!"), tools=TOOLS[:2])
    assert first(both) == Difference(PartKind.TOOL, Change.REMOVED, 3, "Web")
    thought_and_text = edited(2, content="No.", reasoning="")
    assert first(thought_and_text) == Difference(PartKind.MESSAGE, Change.CHANGED, 2, "assistant")


def test_a_thought_that_is_left_out_where_its_tokens_stand_is_no_difference() -> None:
    assert first(edited(2, reasoning=""), kept=4) is None
    assert first(edited(2, reasoning=""), kept=2) is not None


def rendered(
    now: Chat, *, in_answer: bool, given: Answered = Answered.PLAIN, before: Chat = CHAT
) -> Difference | None:
    answer = len(before.messages)
    return rendered_part(parts_of(before), parts_of(now, 0, {answer: given}), in_answer=in_answer)


@pytest.mark.parametrize(
    ("answered", "expected"),
    [
        (Answered.PLAIN, Difference(PartKind.TEMPLATE, Change.RENDERED)),
        (Answered.THOUGHT, Difference(PartKind.THINKING, Change.RENDERED, 6, "assistant")),
        (Answered.RETHOUGHT, Difference(PartKind.THINKING, Change.CHANGED, 6, "assistant")),
        (Answered.CUT, Difference(PartKind.MESSAGE, Change.CUT, 6, "assistant")),
        (Answered.OTHER, Difference(PartKind.MESSAGE, Change.NOT_ANSWERED, 6, "assistant")),
    ],
)
def test_tokens_that_part_in_an_answer(answered: Answered, expected: Difference) -> None:
    silent = edited(6, reasoning="")
    assert rendered(silent, in_answer=True, given=answered) == expected


def test_a_thought_that_is_sent_back_and_written_in_another_way() -> None:
    found = rendered(MORE, in_answer=True)
    assert found == Difference(PartKind.THINKING, Change.RENDERED, 6, "assistant")


def test_an_answer_that_is_left_out() -> None:
    found = rendered(with_messages(*MESSAGES, NEW), in_answer=True)
    assert found == Difference(PartKind.MESSAGE, Change.REMOVED, 6, "assistant")


def test_tokens_that_part_before_the_answer() -> None:
    assert rendered(MORE, in_answer=False) == Difference(PartKind.THINKING, Change.RENDERED)
    silent = replace(MORE, messages=tuple(replace(m, reasoning="") for m in MORE.messages))
    before = replace(silent, messages=silent.messages[:6])
    template = Difference(PartKind.TEMPLATE, Change.RENDERED)
    assert rendered(silent, in_answer=False, before=before) == template
    late = replace(MORE, messages=(*MORE.messages, Message("system", "Remember.")))
    assert rendered(late, in_answer=False) == template


def test_what_is_not_told_apart_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_parts, "MAX_MESSAGES", 4)
    cut = parts_of(CHAT)
    assert (len(cut.messages), cut.n_messages, cut.is_cut) == (4, 6, True)
    later = parts_of(edited(4, content="changed behind the cut"))
    assert changed_part(cut, later) is None
    assert rendered_part(cut, later, in_answer=False) is None
    earlier = parts_of(edited(3, content="changed"))
    assert changed_part(cut, earlier) == Difference(PartKind.MESSAGE, Change.CHANGED, 3, "tool")
    shorter = parts_of(with_messages(*MESSAGES[:4]))
    assert changed_part(parts_of(MORE), later) is None
    assert shorter.n_messages == 4


def test_very_many_tools_are_one_part_at_the_end() -> None:
    many = [Tool(f"t{n}") for n in range(600)]
    before = parts_of(with_tools(*many))
    assert len(before.tools) == 513
    many[580] = replace(many[580], description="!")
    found = changed_part(before, parts_of(with_tools(*many)))
    assert found == Difference(PartKind.TOOL, Change.CHANGED, 513, "")


def test_a_name_ends_and_can_be_shown() -> None:
    (tool,) = parts_of(with_tools(Tool("a\x1b\ud83d" + "b" * 100))).tools
    assert tool.name == "a??" + "b" * 61


def test_nothing_that_was_said_is_in_the_parts() -> None:
    text = repr(parts_of(MORE))
    for message in MORE.messages:
        assert message.content not in text
    assert "Hm." not in text
    assert "Oslo" not in text


roles: st.SearchStrategy[Role] = st.sampled_from(["system", "user", "assistant", "tool"])
messages = st.builds(Message, roles, st.text(max_size=3), st.just("") | st.text(max_size=2))
conversations = st.lists(messages, max_size=8)


@given(conversations, conversations)
def test_a_conversation_that_goes_on_is_not_changed(
    said: Sequence[Message], more: Sequence[Message]
) -> None:
    before = parts_of(Chat(tuple(said)))
    now = parts_of(Chat((*said, *more)))
    assert changed_part(before, now) is None
    if more:
        shorter = changed_part(now, before)
        assert shorter is not None
        assert shorter.change is Change.REMOVED


@given(conversations.filter(bool), st.data())
def test_an_edit_is_found_where_it_is(said: list[Message], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(said) - 1))
    changed = list(said)
    changed[at] = replace(said[at], content=f"{said[at].content} edited {len(said)}")
    before, now = parts_of(Chat(tuple(said))), parts_of(Chat(tuple(changed)))
    found = changed_part(before, now)
    kind = PartKind.SYSTEM if at < now.n_system else PartKind.MESSAGE
    number = at + 1 if kind is PartKind.SYSTEM else at - now.n_system + 1
    assert found == Difference(kind, Change.CHANGED, number, said[at].role)


@given(conversations, conversations, st.booleans())
def test_there_is_an_answer_for_any_two(
    said: Sequence[Message], other: Sequence[Message], in_answer: bool
) -> None:
    before, now = parts_of(Chat(tuple(said))), parts_of(Chat(tuple(other)))
    found = changed_part(before, now) or rendered_part(before, now, in_answer=in_answer)
    assert found is not None
    assert found.number is None or 1 <= found.number <= max(before.n_messages, now.n_messages) + 1


def test_nothing_at_all() -> None:
    assert changed_part(Parts(), Parts()) is None
