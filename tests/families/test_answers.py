"""Answers of every family are read as what they say, in any pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantic.application.chat.answer_reader import AnswerMessage, AnswerReader
from semantic.application.chat.families import FAMILIES, Family, Parsers, family_of
from semantic.domain.answer import TextDelta, ToolCallFailed
from semantic.domain.chat import Chat, Message
from semantic.domain.errors import InvalidRequestError
from semantic.ports.chat import CallSpelling, Headers, Marks
from tests.families.answers import ANSWERS, NESTED, TOOLS, Answer
from tests.support.fake_chat_format import FakeChatFormat
from tests.support.lanes import examples

_THOUGHTS = {
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
    "cohere": Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": Marks("<|channel>thought", "<channel|>"),
}
CASES = [(name, case) for name, answers in ANSWERS.items() for case in answers]


@dataclass
class FamilyFormat(FakeChatFormat):
    """The answers of a family, with prompts of no family."""

    family: Family

    def __post_init__(self) -> None:
        name = self.family.names[0]
        thought = self.family.thought or _THOUGHTS.get(name, Marks("<think>", "</think>"))
        super().__init__(thought, self.family.marks)

    @property
    def headers(self) -> Headers | None:
        return self.family.headers

    @property
    def silent_marks(self) -> tuple[str, ...]:
        return self.family.silent

    @property
    def bare_calls(self) -> bool:
        return self.family.bare

    @property
    def call_spelling(self) -> CallSpelling | None:
        return self.family.spelling


def family_named(name: str) -> Family:
    found = family_of("", (), name)
    assert found is not None
    return found


def reader(name: str) -> AnswerReader:
    numbers = itertools.count()
    return AnswerReader(
        FamilyFormat(family_named(name.partition(",")[0])),
        Chat((Message("user", "?"),), TOOLS),
        opens_thought=False,
        new_id=lambda: f"call_{next(numbers)}",
    )


def read(name: str, pieces: Sequence[str]) -> tuple[Message, str]:
    reading = reader(name)
    found = [piece for text in pieces for piece in reading.push(text)]
    rest, reason = reading.finish("stop")
    collected = AnswerMessage()
    for piece in (*found, *rest):
        assert not isinstance(piece, ToolCallFailed), piece.problem
        collected.add(piece)
    return collected.message, reason


def check(answer: Answer, message: Message, reason: str) -> None:
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    assert calls == list(answer.calls)
    assert message.content == answer.content
    assert message.reasoning.strip() == answer.reasoning
    assert reason == ("tool_calls" if answer.calls else "stop")


@pytest.mark.parametrize(("name", "case"), CASES)
def test_an_answer_is_what_it_says(name: str, case: str) -> None:
    answer = ANSWERS[name][case]
    for pieces in ([answer.written], list(answer.written)):
        check(answer, *read(name, pieces))


@given(st.sampled_from(CASES), st.lists(st.integers(0, 999), max_size=9))
@settings(max_examples=examples(150, thorough=20_000))
def test_any_pieces_say_the_same(case: tuple[str, str], places: list[int]) -> None:
    answer = ANSWERS[case[0]][case[1]]
    at = sorted(place % (len(answer.written) + 1) for place in places)
    edges = [0, *at, len(answer.written)]
    pieces = [answer.written[a:b] for a, b in itertools.pairwise(edges)]
    check(answer, *read(case[0], pieces))


@pytest.mark.parametrize(("name", "case"), CASES)
def test_an_answer_that_is_cut_invents_nothing(name: str, case: str) -> None:
    answer = ANSWERS[name][case]
    names = [name for name, _ in answer.calls]
    for size in range(0, len(answer.written), 3):
        reading = reader(name)
        found = [*reading.push(answer.written[:size]), *reading.finish("length")[0]]
        collected = AnswerMessage()
        for piece in found:
            collected.add(piece)
        message = collected.message
        called = [call.name for call in message.tool_calls]
        assert called == names[: len(called)]
        assert answer.reasoning.startswith(message.reasoning.strip())
        if answer.calls or len(answer.content) < 10:
            assert answer.content.startswith(message.content.strip())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "qwen3_coder",
            (
                "<tool_call>\n<function=look>\n<parameter=what>\n{}\n</parameter>\n"
                "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
            ),
        ),
        (
            "minimax_m2",
            (
                '<minimax:tool_call>\n<invoke name="look">\n<parameter name="what">{}</parameter>'
                '\n<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>'
            ),
        ),
    ],
)
@pytest.mark.parametrize("value", [NESTED, "</parameter>", "a</parameter>\n</b>", "</tool_call>"])
def test_a_text_may_contain_what_ends_a_parameter(name: str, text: str, value: str) -> None:
    written = text.format(value)
    for pieces in ([written], list(written)):
        message, _ = read(name, pieces)
        [call] = message.tool_calls
        assert json.loads(call.arguments) == {"what": value, "n": 3}


def test_every_family_has_a_name_of_its_own_and_an_answer_here() -> None:
    firsts = {family.names[0] for family in FAMILIES}
    assert {name.partition(",")[0] for name in ANSWERS} == firsts
    for family in FAMILIES:
        assert family_named(family.names[0]).marks == family.marks
    with pytest.raises(InvalidRequestError, match="tool_call_parser must be one of"):
        Parsers(calls="no such parser")
    with pytest.raises(InvalidRequestError, match="reasoning_parser must be one of"):
        Parsers(reasoning="no such parser")


def test_a_call_of_nothing_that_is_offered_is_shown_once() -> None:
    written = "<|channel|>commentary to=python code<|message|>print(1)<|call|>"
    for pieces in ([written], list(written)):
        reading = reader("openai")
        found = [one for text in pieces for one in reading.push(text)] + reading.finish("stop")[0]
        assert "".join(one.text for one in found if isinstance(one, TextDelta)) == written


def test_a_reasoning_parser_is_named_as_elsewhere() -> None:
    found = Marks("<a>", "</a>")
    assert Parsers().thought(found) is found
    assert Parsers(reasoning="none").thought(found) is None
    assert Parsers(reasoning="qwen3").thought(found) == Marks("<think>", "</think>")
    harmony = Parsers(reasoning="openai_gptoss").thought(None)
    assert harmony is not None
    assert "analysis" in harmony.start
