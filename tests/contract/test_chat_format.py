"""What every `ChatFormat` does: conversations to tokens, and calls out of answers."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.application.chat.answer_reader import AnswerMessage, AnswerReader
from semantic.domain.answer import TextDelta
from semantic.domain.chat import AnswerFormat, Chat, Message, Tool, ToolCall, ToolChoice
from semantic.domain.errors import InvalidRequestError
from semantic.ports.chat import ChatFormat, Marks
from tests.support.chat_templates import FORMATS, TOOLS, WEATHER, chat_format
from tests.support.fake_chat_format import FakeChatFormat


@functools.cache
def of_template(name: str) -> ChatFormat:
    with tempfile.TemporaryDirectory() as folder:
        return chat_format(FORMATS[name], Path(folder))


@functools.cache
def embedded() -> ChatFormat:
    from semantic.adapters.mlx.model.provider import load_tokenizer
    from semantic.adapters.mlx.text.chat_format import MLXChatFormat

    return MLXChatFormat(load_tokenizer("semantic-tiny"))


CHAT_FORMATS: dict[str, Callable[[], ChatFormat]] = {
    "fake": FakeChatFormat,
    "fake that thinks": lambda: FakeChatFormat(Marks("<think>", "</think>")),
    "embedded model": embedded,
    **{name: functools.partial(of_template, name) for name in FORMATS if name != "no_template"},
}
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}'
TALK = (
    Message("system", "Be brief."),
    Message("user", "How is the weather?"),
    Message(
        "assistant", "I look.", tool_calls=(ToolCall("call_1", "get_weather", '{"city": "Oslo"}'),)
    ),
    Message("tool", "Sunny.", tool_call_id="call_1"),
    Message("assistant", "It is sunny."),
    Message("user", "Thanks."),
)


@pytest.fixture(params=list(CHAT_FORMATS))
def speaks(request: pytest.FixtureRequest) -> ChatFormat:
    return CHAT_FORMATS[str(request.param)]()


def test_marks_are_fixed_and_begin_with_something(speaks: ChatFormat) -> None:
    assert speaks.call_marks == speaks.call_marks
    assert speaks.call_marks.start
    thought = speaks.thought_marks
    assert thought is None or (thought.start and thought.end)


@pytest.mark.parametrize("size", range(1, len(TALK) + 1))
def test_the_same_chat_always_gives_the_same_tokens(speaks: ChatFormat, size: int) -> None:
    chat = Chat(TALK[:size], TOOLS)
    first = speaks.render(chat)
    speaks.render(Chat((Message("user", "Something else."),)))
    assert speaks.render(chat) == first
    assert all(type(token) is int and token >= 0 for token in first.tokens)


def test_a_chat_of_nothing_is_refused(speaks: ChatFormat) -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        speaks.render(Chat(()))


def test_a_free_answer_has_no_grammar(speaks: ChatFormat) -> None:
    for chat in (Chat(TALK), Chat(TALK, TOOLS), Chat(TALK, TOOLS, ToolChoice("none"))):
        assert speaks.call_grammar(chat, opens_thought=False) is None


def test_what_asks_for_a_form_has_a_grammar(speaks: ChatFormat) -> None:
    strict = (replace(WEATHER, strict=True),)
    for chat in (
        Chat(TALK, answer_format=AnswerFormat()),
        Chat(TALK, TOOLS, ToolChoice("required")),
        Chat(TALK, TOOLS, ToolChoice("required", "stop")),
        Chat(TALK, strict),
        Chat(TALK, TOOLS, answer_format=AnswerFormat({"type": "object"})),
    ):
        grammar = speaks.call_grammar(chat, opens_thought=False)
        assert grammar is not None
        assert grammar.after is None
        assert grammar.text


def test_a_grammar_waits_for_the_end_of_a_thought(speaks: ChatFormat) -> None:
    if speaks.thought_marks is None:
        return
    grammar = speaks.call_grammar(Chat(TALK, answer_format=AnswerFormat()), opens_thought=True)
    assert grammar is not None
    assert grammar.after == speaks.thought_marks.end
    chat = Chat(TALK, TOOLS, ToolChoice("required"))
    grammar = speaks.call_grammar(chat, opens_thought=True)
    assert grammar is not None
    assert grammar.after is None, "a call may end the thought"


def test_a_call_that_nothing_offers_is_refused(speaks: ChatFormat) -> None:
    with pytest.raises(InvalidRequestError, match="tool_choice"):
        speaks.call_grammar(Chat(TALK, (), ToolChoice("required")), opens_thought=False)


def test_an_answer_with_a_call_is_read_in_any_pieces(speaks: ChatFormat) -> None:
    marks = speaks.call_marks
    for text in (f"So: {marks.start}{CALL}{marks.end}",):
        for pieces in ([text], list(text)):
            reading = AnswerReader(
                speaks, Chat(TALK, TOOLS), opens_thought=False, new_id=lambda: "c"
            )
            read = [piece for part in pieces for piece in reading.push(part)]
            rest, reason = reading.finish("stop")
            read += rest
            said = "".join(piece.text for piece in read if isinstance(piece, TextDelta))
            written = AnswerMessage()
            for piece in read:
                written.add(piece)
            arguments = '{"city": "Oslo", "days": 2}'
            assert (said.strip(), reason) == ("So:", "tool_calls")
            assert written.message.tool_calls == (ToolCall("c", "get_weather", arguments),)


def test_tools_change_what_is_rendered(speaks: ChatFormat) -> None:
    plain = speaks.render(Chat(TALK[1:2]))
    assert speaks.render(Chat(TALK[1:2], TOOLS)).tokens != plain.tokens
    assert speaks.render(Chat(TALK[1:2], (Tool("other"),))).tokens != plain.tokens
