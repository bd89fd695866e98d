"""Arguments in a model's own spelling are passed on as they are written, on every wire, and are
what the model wrote."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import anthropic
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semantic.adapters.mlx.text.chat_format import MLXChatFormat
from semantic.application.chat.answer_reader import AnswerMessage, AnswerReader
from semantic.application.chat.argument_types import ArgumentTypes
from semantic.domain.answer import (
    AnswerPiece,
    AnswerReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFailed,
    ToolCallStarted,
)
from semantic.domain.chat import Chat, Message, Tool
from semantic.ports.chat import CallList, CallTags
from semantic.ports.serving import Ask
from tests.support.chat_templates import FORMATS, chat_format, load_format
from tests.support.fake_serving import FakeServing, Script
from tests.support.http_server import running
from tests.support.lanes import examples

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "on": {"type": "boolean"},
        "list": {"type": "array"},
        "object": {"type": "object"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "any": {},
    },
}
TOOLS = (Tool("write", "Writes.", SCHEMA), Tool("stop", "Stops.", {"type": "object"}))
ASKED = (Message("user", "?"),)


@dataclass(frozen=True)
class Written:
    """How a format writes a call and an argument; `end` ends a call within the marks."""

    call: str
    argument: str
    end: str = ""

    def body(self, name: str, arguments: Sequence[tuple[str, str]], space: str = "") -> str:
        inner = space.join(self.argument.format(*argument) for argument in arguments)
        return space + self.call.format(name) + space + inner + space + self.end


WRITTEN = {
    "qwen3_coder": Written("<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>"),
    "glm47": Written("{}", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
    "laguna": Written("{}\n", "<arg_key>{}</arg_key><arg_value>{}</arg_value>"),
    "longcat": Written(
        "{}", "<longcat_arg_key>{}</longcat_arg_key><longcat_arg_value>{}</longcat_arg_value>"
    ),
    "minimax_m2": Written(
        '<invoke name="{}">\n', '<parameter name="{}">{}</parameter>\n', "</invoke>"
    ),
    "minicpm5": Written('"{}">', '<param name="{}">{}</param>'),
    "muse_spark": Written(
        '<atem:invoke name="{}">', '<atem:parameter name="{}">{}</atem:parameter>', "</atem:invoke>"
    ),
    "kimi_k3": Written(
        '<|open|>call tool="{}" index="1"<|sep|>',
        '<|open|>argument key="{}" type="string"<|sep|>{}<|close|>argument<|sep|>',
        "<|close|>call<|sep|>",
    ),
}
STREAMED = list(WRITTEN)


@cache
def format_of(name: str) -> MLXChatFormat:
    with tempfile.TemporaryDirectory() as folder:
        return chat_format(FORMATS[name], Path(folder))


def marked(name: str, body: str) -> str:
    marks = format_of(name).call_marks
    return f"{marks.start}{body}{marks.end}"


def pieces_of(
    name: str,
    texts: Sequence[str],
    reason: AnswerReason = "stop",
    *,
    stopped: bool = False,
    many: bool = True,
    opens: bool = False,
) -> tuple[list[list[AnswerPiece]], AnswerReason]:
    """What each of `texts` gives, and at last the end."""
    numbers = itertools.count()
    chat = Chat(ASKED, TOOLS, parallel_tool_calls=many)
    reading = AnswerReader(
        format_of(name), chat, opens_thought=opens, new_id=lambda: f"call_{next(numbers)}"
    )
    gave = [reading.push(text) for text in texts]
    rest, ended = reading.finish("cancelled" if reading.done else reason, stopped=stopped)
    return [*gave, rest], ended


def message_of(gave: Sequence[Sequence[AnswerPiece]]) -> Message:
    collected = AnswerMessage()
    for piece in itertools.chain.from_iterable(gave):
        collected.add(piece)
    return collected.message


def calls_of(name: str, text: str) -> list[tuple[str, str]]:
    gave, reason = pieces_of(name, list(text))
    assert reason == "tool_calls"
    return [(call.name, call.arguments) for call in message_of(gave).tool_calls]


# --- as it is written -------------------------------------------------------------------------

FILE = "def f():\n\treturn \"a < b </\" + 'é😀'  \n\n# end"


@pytest.mark.parametrize("name", STREAMED)
def test_every_character_of_a_text_is_passed_on_once_it_is_certain(name: str) -> None:
    text = marked(name, WRITTEN[name].body("write", [("text", FILE), ("n", "3")]))
    gave, reason = pieces_of(name, list(text))
    assert reason == "tool_calls"
    begin = text.index(FILE)
    for at in range(1, len(FILE)):
        if FILE[at - 1].isspace() or FILE[:at].endswith(("<", "</")):
            continue  # it may be no part of the value, or begin a tag
        certain = "".join(
            piece.arguments
            for piece in itertools.chain.from_iterable(gave[: begin + at])
            if isinstance(piece, ToolCallDelta)
        )
        assert certain == '{"text": ' + json.dumps(FILE[:at], ensure_ascii=False)[:-1]
    [call] = message_of(gave).tool_calls
    n = '"3"' if name == "kimi_k3" else "3"  # its types are in the tags
    assert call.arguments == f'{{"text": {json.dumps(FILE, ensure_ascii=False)}, "n": {n}}}'


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2"])
def test_a_character_may_be_divided_between_tokens(name: str) -> None:
    text = marked(name, WRITTEN[name].body("write", [("text", "漢字 😀 é"), ("unknown", "😀")]))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_format(FORMATS[name], Path(folder))
    detokenizer = tokenizer.detokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    texts = [*map(detokenizer.push, tokens), detokenizer.flush()]
    assert "" in texts[:-1]
    gave, _ = pieces_of(name, texts)
    [call] = message_of(gave).tool_calls
    assert json.loads(call.arguments) == {"text": "漢字 😀 é", "unknown": "😀"}


@pytest.mark.parametrize("name", [*STREAMED, "gemma4", "function_gemma", "pythonic"])
def test_the_spelling_of_every_format_that_is_not_json_is_known(name: str) -> None:
    spelling = format_of(name).call_spelling
    assert spelling is not None
    assert isinstance(spelling.arguments, CallTags if name in STREAMED else CallList)


# --- as the model wrote it ---------------------------------------------------------------------

VALUES = [
    "", " ", "\n", "\n\n", "  padded ", "\nlines\n\n", "\t", "null", "None", "nil", "nullable", "n",
    "true", "True", "yes", "0", "12", "-3.5", "1e999", "NaN", "Infinity", "0x10", "1_0", "12 men",
    "9" * 5000, "[1, 2]", "[[", "[" * 60 + "]" * 60, '{"a": "b"}', "{'a': 1}", "{", '"quoted"', '"',
    "'s'", "set()", "b'x'", "...", "1+2j", "a \\n \\u0041 \\", "é😀漢", "\u2028", "\u00a0x\u00a0",
    "\x07\x00", "<", "</", "<b>x</b>", "&lt;", "</parameter", "</arg_val", "<![CDATA[x]]>",
    "<![CDATA[", "<think>x</think>", "<tool_call>", "</function", "x" * 300,
]  # fmt: skip
KEYS = ["text", "n", "x", "on", "list", "object", "maybe", "any", "unknown"]
values = st.lists(st.sampled_from(VALUES) | st.text(max_size=4), min_size=1, max_size=3).map(
    "".join
)
arguments = st.lists(st.tuples(st.sampled_from(KEYS), values), max_size=4)
cuts = st.lists(st.integers(0, 600), max_size=12)


def cut(text: str, places: Sequence[int]) -> list[str]:
    at = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(at)]


@given(
    st.sampled_from(STREAMED),
    arguments,
    st.sampled_from(["write", "stop", "fly"]),
    st.sampled_from(["", "\n"]),
    cuts,
)
@settings(max_examples=examples(200, thorough=20_000))
def test_the_pieces_add_up_to_what_was_written(
    name: str, given_arguments: list[tuple[str, str]], tool: str, space: str, places: list[int]
) -> None:
    written = WRITTEN[name]
    given_arguments = list(dict(given_arguments).items())
    body = written.body(tool, given_arguments, space)
    if is_ambiguous(name, given_arguments):
        return
    gave, reason = pieces_of(name, cut(marked(name, body), places))
    [call] = message_of(gave).tool_calls
    assert (call.name, reason) == (tool, "tool_calls")
    members = ", ".join(
        f"{json.dumps(key)}: {value_of(name, tool, key, value)}" for key, value in given_arguments
    )
    assert call.arguments == f"{{{members}}}"


def is_ambiguous(name: str, given_arguments: Sequence[tuple[str, str]]) -> bool:
    """Whether a value says what may as well end it."""
    written, marks = WRITTEN[name], format_of(name).call_marks
    end = written.argument.rpartition("{}")[2]
    ends = [one for one in (end.strip(), written.end, marks.start, marks.end) if one]
    parts = [one[: len(one) // 2 + 1] for one in ends]
    return any(part in value for part in parts for _, value in given_arguments)


def value_of(name: str, tool: str, key: str, value: str) -> str:
    """The JSON of a value that is written as `value`."""
    if name == "kimi_k3":
        return json.dumps(value, ensure_ascii=False)
    inner = value.strip()
    if name == "minicpm5" and inner.startswith("<![CDATA[") and inner.endswith("]]>"):
        value = inner.removeprefix("<![CDATA[").removesuffix("]]>")
    spelling = format_of(name).call_spelling
    assert spelling is not None
    assert isinstance(spelling.arguments, CallTags)
    schema = SCHEMA if tool == "write" else {}
    untyped_is_text = spelling.arguments.untyped_is_text
    return ArgumentTypes(schema, untyped_is_text=untyped_is_text).value(key, value)


# --- lists ------------------------------------------------------------------------------------

LISTED = {
    "gemma4": ("call:write{{{}}}", ":", '<|"|>'),
    "function_gemma": ("call:write{{{}}}", ":", "<escape>"),
    "pythonic": ("[write({})]", "=", '"'),
}
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
strings = st.lists(st.sampled_from(VALUES) | st.text(max_size=6), max_size=3).map("".join)
nested = st.recursive(
    plain | st.text(alphabet="ab ,", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("k"), inner),
    max_leaves=4,
)


def listed(name: str, value: object) -> str:
    """`value` as the format writes it."""
    quote = LISTED[name][2]
    match value:
        case str() if quote == '"':
            return json.dumps(value, ensure_ascii=len(value) % 2 == 0)
        case str():
            return f"{quote}{value}{quote}"
        case list():
            return f"[{','.join(listed(name, item) for item in value)}]"
        case dict() if name == "pythonic":
            return repr(value)
        case dict():
            return f"{{{','.join(f'{key}:{listed(name, item)}' for key, item in value.items())}}}"
        case _:
            return repr(value) if name == "pythonic" else json.dumps(value)


@given(
    st.sampled_from(list(LISTED)),
    st.dictionaries(st.sampled_from(["text", "n", "list"]), strings | plain | nested),
    st.sampled_from([",", ", "]),
    cuts,
)
@example("gemma4", {"text": {"k": None}}, ",", [])
@settings(max_examples=examples(120, thorough=20_000))
def test_the_pieces_of_a_list_add_up_to_what_was_written(
    name: str, written: dict[str, object], comma: str, places: list[int]
) -> None:
    form, separator, quote = LISTED[name]
    if name == "function_gemma":
        written = {key: each for key, each in written.items() if not isinstance(each, list | dict)}
    comma = comma if name == "pythonic" else ","
    if any(quote in each or "<|" in each for each in written.values() if isinstance(each, str)):
        return
    members = comma.join(f"{key}{separator}{listed(name, each)}" for key, each in written.items())
    body = form.format(members)
    expected = json.dumps(written, ensure_ascii=False)
    gave, reason = pieces_of(name, cut(marked(name, body), places))
    [call] = message_of(gave).tool_calls
    assert (call.name, reason) == ("write", "tool_calls")
    # A value that is JSON by itself keeps the model's spaces.
    assert json.dumps(json.loads(call.arguments), ensure_ascii=False) == expected


@pytest.mark.parametrize("name", list(LISTED))
def test_a_string_in_a_list_is_passed_on_as_it_is_written(name: str) -> None:
    form, separator, _ = LISTED[name]
    text = marked(name, form.format(f"n{separator}3,text{separator}{listed(name, FILE)}"))
    gave, reason = pieces_of(name, list(text))
    assert reason == "tool_calls"
    [call] = message_of(gave).tool_calls
    assert call.arguments == json.dumps({"n": 3, "text": FILE}, ensure_ascii=False)
    grown = [pieces for pieces in gave if any(isinstance(each, ToolCallDelta) for each in pieces)]
    assert len(grown) > len(FILE)


SOUP = [
    "So. ", "\n", "<think>", "</think>", '{"name": "write", "arguments": {"text": "x', '"}}',
    "write",
]  # fmt: skip


def soup(name: str) -> list[str]:
    """What hostile answers in a format are made of."""
    marks = format_of(name).call_marks
    if name in LISTED:
        form, separator, quote = LISTED[name]
        start, end = form.format("\0").split("\0")
        members = [f"text{separator}{quote}x y{quote}", f"n{separator}3", f"text{separator}{quote}"]
        parts = [marks.start, marks.end, start, end, quote, ",", "\\", "\\u", *members, *SOUP]
        return [*parts, *(part[: len(part) // 2] for part in parts), *VALUES[:24]]
    written = WRITTEN[name]
    tags = [
        tag
        for key in ("text", "n", "unknown")
        for tag in written.argument.format(key, "\0").split("\0")
    ]
    call = written.call.format("write")
    whole = marked(name, written.body("write", [("text", "one two"), ("n", "3")]))
    parts = [marks.start, marks.end, written.end, call, *tags, whole, *SOUP]
    return [*parts, *(part[: len(part) // 2] for part in parts), *VALUES[:24]]


@given(st.data(), st.sampled_from([*STREAMED, *LISTED]), cuts, st.booleans(), st.booleans())
@settings(max_examples=examples(200, thorough=20_000))
def test_any_pieces_of_any_answer_give_the_same(
    data: st.DataObject, name: str, places: list[int], many: bool, opens: bool
) -> None:
    parts = data.draw(st.lists(st.sampled_from(soup(name)), max_size=14))
    reason: AnswerReason = "stop" if data.draw(st.booleans()) else "length"
    stopped = reason == "stop" and data.draw(st.booleans())
    text = "".join(parts)
    whole = None
    for texts in ([text], list(text), parts, cut(text, places)):
        gave, ended = pieces_of(name, texts, reason, stopped=stopped, many=many, opens=opens)
        found = (joined(itertools.chain.from_iterable(gave)), ended)
        assert whole in (None, found)
        whole = found


def joined(pieces: Iterator[AnswerPiece]) -> list[tuple[object, ...]]:
    """The pieces with neighbours that continue each other as one."""
    whole: list[tuple[object, ...]] = []
    for piece in pieces:
        kind, *content = _shown(piece)
        if whole and whole[-1][:-1] == (kind, *content[:-1]) and kind not in ("call", "failed"):
            whole[-1] = (*whole[-1][:-1], f"{whole[-1][-1]}{content[-1]}")
        else:
            whole.append((kind, *content))
    return whole


def _shown(piece: AnswerPiece) -> tuple[object, ...]:
    match piece:
        case TextDelta():
            return ("text", piece.text)
        case ReasoningDelta():
            return ("thought", piece.text)
        case ToolCallStarted():
            return ("call", piece.index, piece.id, piece.name)
        case ToolCallDelta():
            return ("arguments", piece.index, piece.arguments)
        case ToolCallFailed():
            return ("failed", piece.problem)


# --- what may be wrong ------------------------------------------------------------------------


@pytest.mark.parametrize("name", STREAMED)
def test_a_value_may_hold_marks_and_ends_of_calls(name: str) -> None:
    marks = format_of(name).call_marks
    for mark in (marks.end, WRITTEN[name].end, f"{WRITTEN[name].end}\n{marks.end} x"):
        value = f"a {mark} b"
        body = WRITTEN[name].body("write", [("text", value), ("on", "false")])
        [(_, written)] = calls_of(name, marked(name, body))
        assert json.loads(written)["text"] == value


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2", "muse_spark", "kimi_k3"])
def test_an_argument_that_never_ends_goes_up_to_the_first_end_mark(name: str) -> None:
    """What follows is text. In an argument that ends later the mark was a part of the value."""
    marks, written = format_of(name).call_marks, WRITTEN[name]
    tag = written.argument.format("text", "\0").partition("\0")[0]
    text = f"{marks.start}{written.call.format('write')}{tag}a b{marks.end} c"
    whole = written.body("write", [("text", f"a {marks.end} b")]).removesuffix(written.end)
    for texts in ([text], list(text)):
        message = message_of(pieces_of(name, texts)[0])
        assert [call.arguments for call in message.tool_calls] == ['{"text": "a b']
        assert message.content == "c"
    another = written.argument.format("unknown", "\0").partition("\0")[0]
    longer = f"{marks.start}{whole}{another}c d"
    for texts in ([longer], list(longer)):
        message = message_of(pieces_of(name, texts)[0])
        arguments = json.dumps({"text": f"a {marks.end} b"})[:-1]
        arguments += ', "unknown": "c d' * (name != "muse_spark")  # JSON until it ends
        assert [call.arguments for call in message.tool_calls] == [arguments]
    message = message_of(pieces_of(name, [20 * f"{text} "])[0])
    assert [call.arguments for call in message.tool_calls] == 9 * ['{"text": "a b']
    assert message.content.split() == 8 * ["c"]


@pytest.mark.parametrize("name", STREAMED)
def test_several_calls_are_several(name: str) -> None:
    body = WRITTEN[name].body("write", [("text", "one")])
    other = WRITTEN[name].body("stop", [])
    text = marked(name, body) + "\n" + marked(name, body)
    called = [("write", '{"text": "one"}')] * 2
    assert calls_of(name, text) == called
    if WRITTEN[name].end:
        text = marked(name, f"{body}\n{other}\n{body}")
        found = calls_of(name, text)
        assert found == ([called[0], ("stop", "{}"), called[0]])
    assert calls_of(name, marked(name, other)) == [("stop", "{}")]


@pytest.mark.parametrize("name", STREAMED)
def test_a_call_within_a_thought_ends_it_and_one_in_json_is_read(name: str) -> None:
    """A grammar makes calls in JSON, whatever the spelling of the model is."""
    written = marked(name, WRITTEN[name].body("write", [("text", "<think>x</think>")]))
    forced = marked(name, '{"name": "write", "arguments": {"text": "y"}}')
    gave, reason = pieces_of(name, list(f"Hm. {written}{forced}"), opens=True)
    message = message_of(gave)
    assert (message.reasoning, reason) == ("Hm.", "tool_calls")
    texts = [json.loads(call.arguments)["text"] for call in message.tool_calls]
    assert texts == ["<think>x</think>", "y"]


@pytest.mark.parametrize("value", ["three", "", "1e999", "[1"])
@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2"])
def test_a_value_that_is_not_of_its_type_is_its_text(name: str, value: str) -> None:
    """The client tells the model, which corrects itself."""
    body = WRITTEN[name].body("write", [("n", value), ("text", "x")])
    assert calls_of(name, marked(name, body)) == [("write", json.dumps({"n": value, "text": "x"}))]


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2", "glm47", "minicpm5"])
def test_the_last_argument_may_not_be_closed(name: str) -> None:
    """Models forget it: what ends the call ends its last argument."""
    whole = WRITTEN[name].body("write", [("text", "x"), ("n", "3")])
    tag = WRITTEN[name].argument.format("", "\0").partition("\0")[2].strip()
    cut_off = "".join(whole.rsplit(tag, 1))
    assert tag in cut_off
    for text in (marked(name, cut_off), marked(name, cut_off) + "\n" + marked(name, whole)):
        assert calls_of(name, text)[0] == ("write", '{"text": "x", "n": 3}')
    short = "".join(WRITTEN[name].body("write", [("text", "x y")]).rsplit(tag, 1))
    [(_, written)] = calls_of(name, marked(name, short))
    assert json.loads(written)["text"].strip() == "x y"


@pytest.mark.parametrize("name", STREAMED)
def test_a_call_that_a_stop_string_cuts_keeps_what_is_certain_and_is_not_made(name: str) -> None:
    text = marked(name, WRITTEN[name].body("write", [("text", "one two")]))
    gave, reason = pieces_of(name, [text[: text.index(" two")]], stopped=True)
    assert reason == "stop"
    assert [call.arguments for call in message_of(gave).tool_calls] == ['{"text": "one']


@pytest.mark.parametrize("name", STREAMED)
def test_only_the_first_call_is_made_where_one_may_be(name: str) -> None:
    body = WRITTEN[name].body("write", [("text", "one")])
    text = marked(name, body + (body if WRITTEN[name].end else "")) + marked(name, body) + " x"
    gave, reason = pieces_of(name, list(text), many=False)
    message = message_of(gave)
    assert [call.arguments for call in message.tool_calls] == ['{"text": "one"}']
    assert (message.content, reason) == ("", "tool_calls")


@pytest.mark.parametrize(
    ("name", "body", "called"),
    [
        ("gemma4", 'call:write{text:<|"|>x', "write"),
        ("function_gemma", "call:write{text:<escape>x", "write"),
        ("pythonic", '[write(text="x', "write"),
        ("qwen3_coder", "<function=write", None),
        ("glm47", "write", None),
        ("json_tools", "write", None),
    ],
)
def test_of_a_call_that_is_cut_its_name_is_left(name: str, body: str, called: str | None) -> None:
    text = format_of(name).call_marks.start + body
    for texts in ([text], list(text)):
        gave, _ = pieces_of(name, texts, "length")
        assert [call.name for call in message_of(gave).tool_calls] == ([called] if called else [])


# --- wires ------------------------------------------------------------------------------------


def answer(name: str, text: str) -> Script:
    """The script of an answer that is written as `text`, a character a token."""
    gave, reason = pieces_of(name, list(text))
    return Script(tuple(itertools.chain.from_iterable(gave)), reason)


@pytest.fixture(scope="module")
def spoken() -> Iterator[tuple[FakeServing, str]]:
    serving = FakeServing()
    with running(serving) as server:
        yield serving, server.url


@pytest.mark.process
@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2", "gemma4"])
def test_every_wire_streams_arguments_as_they_are_written(
    name: str, spoken: tuple[FakeServing, str]
) -> None:
    serving, url = spoken
    if name in LISTED:
        form, _, _ = LISTED[name]
        body = form.format(f"text:{listed(name, FILE)},n:3,list:{listed(name, ['é'])}")
    else:
        given_arguments = [("text", FILE), ("n", "3"), ("list", '["é"]'), ("unknown", "x\ny")]
        body = WRITTEN[name].body("write", given_arguments)
    [(_, expected)] = calls_of(name, marked(name, body))

    def script(ask: Ask) -> Script:
        assert isinstance(ask.prompt, Chat)
        assert [tool.name for tool in ask.prompt.tools] == ["write"]
        return answer(name, f"So.\n{marked(name, body)}")

    serving.script = script
    for deltas, whole in (_chat(url), _responses(url), _messages(url)):
        assert "".join(deltas) == whole == expected
        assert len(deltas) > len(FILE) // 2


def _chat(url: str) -> tuple[list[str], str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked = {
            "model": "fake",
            "messages": [{"role": "user", "content": "?"}],
            "tools": [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}],
        }
        create = client.chat.completions.create
        chunks = create(**asked, stream=True)  # type: ignore[call-overload]
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        whole = create(**asked)  # type: ignore[call-overload]
        [call] = whole.choices[0].message.tool_calls
        return [one.function.arguments or "" for one in calls], call.function.arguments


def _responses(url: str) -> tuple[list[str], str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked = {
            "model": "fake",
            "input": "?",
            "tools": [{"type": "function", "name": "write", "parameters": SCHEMA, "strict": False}],
        }
        events = client.responses.create(**asked, stream=True)  # type: ignore[call-overload]
        deltas = [
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta"
        ]
        whole = client.responses.create(**asked)  # type: ignore[call-overload]
        return deltas, whole.output[-1].arguments


def _messages(url: str) -> tuple[list[str], str]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        asked = {
            "model": "fake",
            "max_tokens": 400,
            "messages": [{"role": "user", "content": "?"}],
            "tools": [{"name": "write", "input_schema": SCHEMA}],
        }
        events = client.messages.create(**asked, stream=True)  # type: ignore[call-overload]
        deltas = [
            event.delta.partial_json
            for event in events
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
        ]
        whole = client.messages.create(**asked)  # type: ignore[call-overload]
        return deltas, json.dumps(whole.content[-1].input, ensure_ascii=False)
