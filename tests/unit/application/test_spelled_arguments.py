"""Arguments that are not in JSON become JSON while they are written, and equal what is read of the
whole."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.chat.answer_text import CallText
from semantic.application.chat.argument_types import ArgumentTypes
from semantic.application.chat.spelled_arguments import ListedArguments
from semantic.application.chat.streamed_calls import CallSyntax
from semantic.application.chat.tagged_arguments import TaggedArguments
from semantic.domain.chat import Tool
from semantic.ports.chat import CallHead, CallList, CallSpelling, CallTags, Marks

TAGS = CallTags("<arg ", re.compile(r"(?P<key>\w+)"), ">", "</arg>", "</call>", trims="line")
HEAD = CallHead(("<call ",), re.compile(r"(?P<name>\w+)"), re.compile(r"\w*"), ((">",),))
MARKS = Marks("<calls>", "</calls>")


TYPES = ArgumentTypes({"properties": {"n": {"type": "integer"}, "a": {"type": "string"}}})


def arguments_of(pieces: Sequence[str]) -> str:
    reading = TaggedArguments(TAGS, TYPES)
    return "".join(map(reading.push, pieces))


WHOLE = '<arg a>\none "two"\n</arg>\n<arg n>3</arg><arg b></arg>\n</call>'


def test_a_text_is_passed_on_as_it_is_written_and_a_number_when_it_is_complete() -> None:
    reading = TaggedArguments(TAGS, TYPES)
    gave = [reading.push(character) for character in WHOLE]
    assert "".join(gave) == '{"a": "one \\"two\\"", "n": 3, "b": ""}'
    at = WHOLE.index("one")
    assert gave[0] == "{"
    assert gave[at : at + 8] == ['"a": "o', "n", "e", " ", '\\"', "t", "w", "o"]
    assert gave[WHOLE.index("n>3") + 1] == '"'  # another argument follows
    assert gave[WHOLE.index("b></arg>") + 1] == ', "n": 3'


@pytest.mark.parametrize("word", ["null", "NULL", "Nu", "nullable", "null\n", " null ", ""])
def test_a_word_is_the_text_of_a_string(word: str) -> None:
    source = f"<arg a>{word}</arg></call>"
    assert json.loads(arguments_of(list(source))) == {"a": word.removesuffix("\n")}


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("<arg n>three</arg></call>", '{"n": "three"}'),
        ("<arg a>x</arg><arg a>y</arg></call>", '{"a": "x</arg><arg a>y"}'),
        ("noise <a> <arg a>x</arg> </call>", '{"a": "x"}'),
        ("<arg a>x</arg> </arg> \\n<arg n>1</arg></call>", '{"a": "x</arg> ", "n": 1}'),
        ("<arg a><a>1</arg>\n</a></arg></call>", '{"a": "<a>1</arg>\\n</a>"}'),
        ("<arg a>a</call>b</arg></call>", '{"a": "a</call>b"}'),
        ("<arg a>a</call>\n</arg></call>", '{"a": "a</call>"}'),
        ("<arg a>x", '{"a": "x'),
        ("<arg a>x\n", '{"a": "x'),
        ("<arg a>x</ar", '{"a": "x'),
        ("<arg a>x</call>", '{"a": "x'),
        ("<arg n>3", "{"),
        ("<arg", "{"),
        ("<arg !>x</arg></call>", "{}"),
        ("</call><arg a>x</arg>", "{}"),
    ],
)
def test_what_else_may_be_written(source: str, arguments: str) -> None:
    for pieces in ([source], list(source)):
        assert arguments_of(pieces) == arguments


PARTS = [
    "<arg a>", "<arg b>", "<arg n>", "</arg>", "</call>", "<arg", ">", "</ar", "\n", " ", "null",
    "12", '"', "\\", "é😀", "\x07", "<arg " + 300 * "k" + ">", "text",
]  # fmt: skip


@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=12))
def test_any_pieces_give_the_same(parts: list[str]) -> None:
    source = "".join(parts)
    assert arguments_of(["", *parts]) == arguments_of(["", *source]) == arguments_of([source])


# --- lists ------------------------------------------------------------------------------------

LIST = CallList(
    re.compile(r"(?P<key>\w+)"), "=", ('"', "'"), ")", opening="([{", closing=")]}", escapes=True
)
LIST_HEAD = CallHead((), re.compile(r"(?P<name>\w+)"), re.compile(r"\w*"), (("(",),))


def list_of(pieces: Sequence[str]) -> str:
    reading = ListedArguments(LIST)
    return "".join(map(reading.push, pieces))


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("", "{"),
        (")", "{}"),
        (' a = "one, (two" , b=[1, ")"])', '{"a": "one, (two", "b": [1, ")"]}'),
        (r'a="\n\t\"\x41\u00e9\d\\")', r'{"a": "\n\t\"Aé\\d\\"}'),
        (r'a="x\101\U0001f600\N{BULLET}")', '{"a": "xA😀•"}'),
        ('a="",b=3,)', '{"a": "", "b": 3}'),
        ('a="x" "y")', '{"a": "xy"}'),
        ("a='it\"s')", '{"a": "it\\"s"}'),
        ("a=Oslo now)", '{"a": "Oslo now"}'),
        ('a="x", a="y")', '{"a": "x", "a": "y"}'),
        ('a="x\ny")', '{"a": "x\\ny"}'),
        ('a="x', '{"a": "x'),
        ('a="x"', '{"a": "x'),
        ("a=3", "{"),
        ('a="x"y)', '{"a": "x'),
        ('"x")', "{"),
        ("=3)", "{"),
        (300 * "k" + "=3)", "{"),
    ],
)
def test_what_may_be_written_in_a_list(source: str, arguments: str) -> None:
    for pieces in (["", source], ["", *source]):
        assert list_of(pieces) == arguments


LISTED_PARTS = [
    'a="', "b=3", "c=[", "]", '"', "'", ",", ")", "(", "=", "\\", "\\n", "\\u", "\\ud83d", "00e9",
    "x", "\\x4", "\n", " ", "{", "}", "a=", "é",
]  # fmt: skip


@given(st.lists(st.sampled_from(LISTED_PARTS) | st.text(max_size=3), max_size=12))
def test_any_pieces_of_a_list_give_the_same(parts: list[str]) -> None:
    source = "".join(parts)
    assert list_of(["", *parts]) == list_of(["", *source]) == list_of([source])


# --- linear -----------------------------------------------------------------------------------


@contextmanager
def counting() -> Iterator[list[int]]:
    """Counts calls, and the characters of the strings whose methods are called."""
    counted = [0]

    def count(_: FrameType, event: str, function: object) -> None:
        if event == "c_call":
            text = getattr(function, "__self__", None)
            counted[0] += 1 + (len(text) if isinstance(text, str) else 0)
        elif event == "call":
            counted[0] += 1

    sys.setprofile(count)
    try:
        yield counted
    finally:
        sys.setprofile(None)


IN_TAGS, IN_LIST = CallSpelling(HEAD, TAGS), CallSpelling(LIST_HEAD, LIST, in_list=True)


def work(body: str, spelling: CallSpelling = IN_TAGS) -> int:
    call = CallText(CallSyntax(MARKS, {"go": Tool("go")}, spelling))
    pieces = [body[at : at + 4] for at in range(0, len(body), 4)]
    with counting() as counted:
        for piece in pieces:
            call.push(piece)
            call.next()
            call.certain()
        call.finish(cut=True)
    return counted[0]


@pytest.mark.parametrize(
    "repeated",
    [
        "text of a file\n",
        "\n\n",
        "</calls>",
        "</calls> x ",
        "</call>\n",
        "</ar",
        "</arg><arg a>x",
        "</arg><arg n>1",
        "</arg></call><call go><arg a>",
    ],
)
@pytest.mark.parametrize("before", ["<call go><arg a>", "<call go><arg n>", "go ", "[", "{"])
def test_the_work_grows_with_the_answer_and_not_faster(before: str, repeated: str) -> None:
    once, twice = work(before + 100 * repeated), work(before + 200 * repeated)
    assert twice < 2.5 * once


@pytest.mark.parametrize(
    ("before", "repeated"),
    [
        ('[go(a="', "a b"),
        ('[go(a="', "\\n"),
        ('[go(a="', "</calls>"),
        ('[go(a="', '",a="'),
        ("[go(a=", "[</calls>"),
        ("[go(a=", "1,b=2,a="),
        ("[go(a=", "',a='"),
        ("[go(", 5 * "["),
        ("[go(", 5 * " "),
    ],
)
def test_the_work_for_a_list_grows_no_faster(before: str, repeated: str) -> None:
    once = work(before + 100 * repeated, IN_LIST)
    assert work(before + 200 * repeated, IN_LIST) < 2.5 * once
