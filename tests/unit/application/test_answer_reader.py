"""An answer is sorted into text, thoughts and calls, whatever pieces it comes in."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.chat.answer_reader import AnswerReader, message_in
from semantic.application.chat.streamed_calls import CallSyntax, StreamedCalls
from semantic.domain.answer import (
    AnswerPiece,
    AnswerReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFailed,
    ToolCallStarted,
)
from semantic.domain.chat import AnswerFormat, Chat, Message, Tool, ToolChoice
from semantic.domain.value_objects import TokenLogprob
from semantic.ports.chat import Marks
from tests.support.fake_chat_format import FakeChatFormat

THINK = Marks("<think>", "</think>")
TOOLS = (Tool("look"), Tool("go"))
ASKED = (Message("user", "?"),)
WITH_TOOLS = Chat(ASKED, TOOLS)
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


def reader(
    chat: Chat = WITH_TOOLS,
    *,
    thought: Marks | None = THINK,
    opens: bool = False,
    end: str | None = None,
) -> AnswerReader:
    calls = Marks("<tool_call>", "</tool_call>" if end is None else end)
    numbers = itertools.count()
    return AnswerReader(
        FakeChatFormat(thought, calls),
        chat,
        opens_thought=opens,
        new_id=lambda: f"call_{next(numbers)}",
    )


def test_a_whole_answer_is_a_message() -> None:
    text = f"<think>hm</think>Hello.{CALL}"
    message = message_in(reader(), text)
    assert (message.reasoning, message.content) == ("hm", "Hello.")
    assert [call.name for call in message.tool_calls] == ["look"]
    assert message_in(reader(Chat(ASKED), opens=True), "hm</think>yes").reasoning == "hm"


Ended = tuple[list[AnswerPiece], AnswerReason]


def read(reading: AnswerReader, pieces: Sequence[str], reason: AnswerReason = "stop") -> Ended:
    """All that comes of an answer in `pieces`, texts and thoughts joined."""
    given_out = [piece for text in pieces for piece in reading.push(text)]
    if reading.done:
        reason = "cancelled"
    rest, ended = reading.finish(reason)
    return joined(given_out + rest), ended


def joined(pieces: Sequence[AnswerPiece]) -> list[AnswerPiece]:
    whole: list[AnswerPiece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if isinstance(piece, TextDelta) and isinstance(last, TextDelta):
            whole[-1] = TextDelta(last.text + piece.text, last.logprobs + piece.logprobs)
        elif isinstance(piece, ReasoningDelta) and isinstance(last, ReasoningDelta):
            whole[-1] = ReasoningDelta(last.text + piece.text)
        elif isinstance(piece, ToolCallDelta) and isinstance(last, ToolCallDelta):
            assert piece.index == last.index
            whole[-1] = ToolCallDelta(last.index, last.arguments + piece.arguments)
        else:
            whole.append(piece)
    return whole


def called(index: int = 0, name: str = "look", arguments: str = '{"at": "x"}') -> list[AnswerPiece]:
    return [ToolCallStarted(index, f"call_{index}", name), ToolCallDelta(index, arguments)]


# --- what an answer may be --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": "<think>b</think> <tool_call>"}', []),
        ("<think>Hm.</think>\n<think>a</think>", [ReasoningDelta("Hm.")]),
        ("</think><tool_call>", []),
        (f"<think>Hm.</think>\n{CALL}\n</think>", [ReasoningDelta("Hm."), *called()]),
    ],
)
def test_marks_within_an_answer_in_a_form_are_its_text(
    text: str, expected: list[AnswerPiece]
) -> None:
    chat = Chat(ASKED, TOOLS, answer_format=AnswerFormat())
    shown = TextDelta(text[text.rfind("\n") + 1 :])
    for size in (1, 2, 3, 5, 99):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(reader(chat), pieces)[0] == [*expected, shown]


def test_an_answer_in_a_form_after_a_thought_that_the_prompt_opened() -> None:
    chat = Chat(ASKED, answer_format=AnswerFormat())
    pieces, _ = read(reader(chat, opens=True), ["Hm.</think>\n<think>", "a</think>"])
    assert pieces == [ReasoningDelta("Hm."), TextDelta("<think>a</think>")]


def test_text_alone_is_text() -> None:
    assert read(reader(), ["Hello", ", ", "world.\n"]) == ([TextDelta("Hello, world.\n")], "stop")


def test_text_is_given_out_at_once() -> None:
    assert reader().push("Hello") == [TextDelta("Hello")]


def test_what_may_become_a_mark_is_held_back() -> None:
    reading = reader()
    assert reading.push("a <tool") == [TextDelta("a")]
    assert reading.push("box") == [TextDelta(" <toolbox")]


def test_a_thought_and_then_text() -> None:
    pieces = read(reader(), ["<think>\nHm.\n</think>\n\nYes."])
    assert pieces == ([ReasoningDelta("Hm."), TextDelta("Yes.")], "stop")


def test_a_thought_that_the_prompt_opened() -> None:
    pieces = read(reader(opens=True), ["Hm.\n</think>\n\nYes."])
    assert pieces == ([ReasoningDelta("Hm."), TextDelta("Yes.")], "stop")


def test_an_empty_thought_is_none() -> None:
    assert read(reader(), ["<think>\n\n</think>\n\nYes."]) == ([TextDelta("Yes.")], "stop")


def test_a_second_thought_is_a_thought() -> None:
    pieces, _ = read(reader(), ["<think>a</think>b<think>c</think>d"])
    assert pieces == [ReasoningDelta("a"), TextDelta("b"), ReasoningDelta("c"), TextDelta("d")]


MENTIONS = (
    "Write `<think>` first, `</think>` behind it, and `<tool_call>` for a call.",
    "The <think> mark opens it, and (<think> is a token.",
    'A template has "<think>\\n" in it.',
    "`<think>`",
)


@pytest.mark.parametrize("text", MENTIONS)
@pytest.mark.parametrize("before", ["", "<think>Hm.</think>"])
def test_marks_that_an_answer_mentions_are_text(text: str, before: str) -> None:
    thought = [ReasoningDelta("Hm.")] if before else []
    for pieces in ([before + text], list(before + text)):
        assert read(reader(), pieces) == ([*thought, TextDelta(text)], "stop")


def test_a_thought_ends_once() -> None:
    text = "The end </think> of it.\n</think>\nYes."
    for pieces in ([f"Hm.</think>{text}"], list(f"Hm.</think>{text}")):
        assert read(reader(opens=True), pieces)[0] == [ReasoningDelta("Hm."), TextDelta(text)]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>It says `</think>` there.</think>So.", "It says `</think>` there.", "So."),
        ("<think>It ends with `</think>So.", "It ends with `", "So."),
        ("<think>It ends with `</think>", "It ends with `", ""),
        ("First.\n<think>Hm.</think>So.", "Hm.", "First.\nSo."),
        ("First.<think>Hm.</think>So.", "Hm.", "First.So."),
    ],
)
def test_marks_beside_other_text_are_marks(text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        found, _ = read(reader(), pieces)
        assert "".join(one.text for one in found if isinstance(one, ReasoningDelta)) == reasoning
        assert "".join(one.text for one in found if isinstance(one, TextDelta)) == content


def test_a_mark_between_backticks_is_text_and_a_whole_call_is_made() -> None:
    text = f"Such as `<tool_call>` or `{CALL}`?"
    pieces, reason = read(reader(), list(text))
    assert (pieces[0], reason) == (TextDelta("Such as `<tool_call>` or `"), "tool_calls")


def test_an_end_of_a_thought_that_never_began_is_dropped() -> None:
    assert read(reader(), ["a </think> b"]) == ([TextDelta("a b")], "stop")


def test_a_thought_that_is_never_closed_stays_one() -> None:
    assert read(reader(opens=True), ["Hm. <th"], "length") == ([ReasoningDelta("Hm.")], "length")


def test_without_thought_marks_they_are_text() -> None:
    pieces = read(reader(thought=None), ["<think>a</think>"])
    assert pieces == ([TextDelta("<think>a</think>")], "stop")


def test_a_call() -> None:
    assert read(reader(), [CALL]) == (called(), "tool_calls")


def test_a_call_between_texts() -> None:
    pieces, reason = read(reader(), [f"Let me look.\n\n{CALL}\n\nSo."])
    assert pieces == [TextDelta("Let me look."), *called(), TextDelta("\n\nSo.")]
    assert reason == "tool_calls"


def test_white_space_around_calls_is_dropped() -> None:
    pieces, _ = read(reader(), [f"\n\n{CALL}\n{CALL}\n"])
    assert pieces == [*called(), *called(1)]


def test_a_call_behind_a_thought() -> None:
    pieces, reason = read(reader(opens=True), [f"Hm.</think>\n{CALL}"])
    assert (pieces, reason) == ([ReasoningDelta("Hm."), *called()], "tool_calls")


def test_a_call_inside_a_thought_ends_it() -> None:
    pieces, reason = read(reader(opens=True), [f"Hm.\n{CALL}\nDone."])
    assert pieces == [ReasoningDelta("Hm."), *called(), TextDelta("Done.")]
    assert reason == "tool_calls"


def test_several_calls_between_one_pair_of_marks() -> None:
    text = json.dumps([{"name": name, "arguments": {}} for name in ("look", "go")])
    pieces, _ = read(reader(), [f"<tool_call>{text}</tool_call>"])
    assert pieces == [*called(0, "look", "{}"), *called(1, "go", "{}")]


@pytest.mark.parametrize(
    "chat", [Chat(ASKED), Chat(ASKED, TOOLS, ToolChoice("none"))], ids=["no tools", "none chosen"]
)
def test_calls_are_text_where_none_is_asked_for(chat: Chat) -> None:
    assert read(reader(chat), [CALL]) == ([TextDelta(CALL)], "stop")


def test_a_call_that_lasts_until_the_end() -> None:
    text = '<tool_call>{"name": "go", "arguments": {}}'
    assert read(reader(end=""), [text]) == (called(0, "go", "{}"), "tool_calls")
    assert read(reader(end=""), [text], "length") == (called(0, "go", "{}"), "length")


def test_a_mark_inside_arguments_does_not_end_the_call() -> None:
    arguments = json.dumps({"text": "a </tool_call> b <tool_call> c </tool_call>"})
    text = f'<tool_call>{{"name": "go", "arguments": {arguments}}}</tool_call> ok'
    assert read(reader(), list(text)) == (
        [*called(0, "go", arguments), TextDelta("ok")],
        "tool_calls",
    )


# --- as it is written -------------------------------------------------------------------------


KIMI = "<|tool_call_begin|>functions.go:0<|tool_call_argument_begin|>"


def streamed(text: str, end: str | None = None) -> list[list[AnswerPiece]]:
    """What each character of an answer gives."""
    reading = reader(end=end)
    return [reading.push(character) for character in text]


def test_arguments_are_emitted_as_they_are_written() -> None:
    text = '<tool_call>{"name": "go", "arguments": {"a": "one two", "b": [1, 2]}}</tool_call>'
    gave = streamed(text)
    begins = text.index('{"a"')
    assert not any(map(joined, gave[:begins]))
    assert joined(gave[begins]) == called(0, "go", "{")
    assert gave[text.index("n", begins)] == [ToolCallDelta(0, "n")]
    ends = text.index("}}</tool_call>")
    assert gave[ends] == [ToolCallDelta(0, "}")]
    assert not any(map(joined, gave[ends + 1 :]))


@pytest.mark.parametrize("before", ["", "{", '{"name":', '{"name": "look",', '{"name": "go'])
def test_what_precedes_arguments_without_an_end_is_not_read_with_each_token(before: str) -> None:
    marks = Marks("<tool_call>", "</tool_call>")
    calls = StreamedCalls(CallSyntax(marks, {"look": Tool("look")}, None))
    endless = "o" if before.endswith("go") else " "
    assert calls.push(before + 200 * endless if endless == " " else before) == []
    assert calls.is_known is None
    assert calls.push(100 * endless if endless == " " else 300 * endless) == []
    assert calls.is_known is False


@pytest.mark.parametrize("n", [200, 2000])
def test_white_space_of_any_length_may_precede_arguments(n: int) -> None:
    text = f'<tool_call>{{"name":{n * " "}"look", "arguments": {{"at": "x"}}}}</tool_call>'
    for pieces in ([text], list(text)):
        assert read(reader(), pieces) == (called(), "tool_calls")


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ('<tool_call>[{"name": "go", "arguments": {"a": "bc"}}]</tool_call>', None),
        ('<tool_call>{"name": "go", "parameters": {"a": "bc"}}</tool_call>', None),
    ],
)
def test_every_form_of_json_is_emitted_as_it_is_written(text: str, end: str | None) -> None:
    assert streamed(text, end)[text.index("bc") + 1][-1:] == [ToolCallDelta(0, "c")]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "go", "arguments": {}}{"name": "look", "arguments": {}}', ["go", "look"]),
        ('[{"name": "go", "arguments": {}}, {"name": "look"}]', ["go", "look"]),
        ('{"name": "go", "arguments": {}, "id": 3}', ["go"]),
        ('{"name": "go", "arguments": {}}}', ["go"]),
        ('{"name": "go", "arguments": {}', ["go"]),
    ],
)
def test_what_surrounds_the_arguments_may_be_wrong(text: str, calls: list[str]) -> None:
    pieces, reason = read(reader(), [f"<tool_call>{text}</tool_call>"])
    started = [piece.name for piece in pieces if isinstance(piece, ToolCallStarted)]
    assert (started, reason) == (calls, "tool_calls")


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [('{"a": nope}', '{"a": nope}'), ('{"a": "b', '{"a": "b'), ('{"a": [1', '{"a": [1')],
)
@pytest.mark.parametrize("after", ["", "</tool_call>", f"</tool_call>\n{CALL}"])
def test_arguments_that_turn_out_to_be_no_json_are_as_they_were_written(
    inside: str, arguments: str, after: str
) -> None:
    text = f'<tool_call>{{"name": "go", "arguments": {inside}{"}" if inside[-1] == "}" else ""}'
    pieces, reason = read(reader(), [text + after])
    assert pieces == [*called(0, "go", arguments), *(called(1) if CALL in after else [])]
    assert reason == "tool_calls"


def test_what_follows_arguments_that_are_never_closed_is_read() -> None:
    text = '<tool_call>{"name": "go", "arguments": {"a": "b</tool_call> So. '
    for pieces in ([text + CALL + " x"], list(text + CALL + " x")):
        called_text = called(0, "go", '{"a": "b')
        assert read(reader(), pieces) == (
            [*called_text, TextDelta("So."), *called(1), TextDelta(" x")],
            "tool_calls",
        )


# --- one call only ----------------------------------------------------------------------------


def test_after_the_only_call_the_answer_is_done() -> None:
    reading = reader(Chat(ASKED, TOOLS, parallel_tool_calls=False))
    assert joined(reading.push(f"a{CALL}{CALL} b")) == [TextDelta("a"), *called()]
    assert reading.done
    assert reading.push("more") == []
    assert reading.finish("cancelled") == ([], "tool_calls")


def test_of_several_calls_in_one_the_first_is_taken() -> None:
    text = json.dumps([{"name": name, "arguments": {}} for name in ("go", "look")])
    reading = reader(Chat(ASKED, TOOLS, parallel_tool_calls=False))
    assert read(reading, [f"<tool_call>{text}</tool_call>"]) == (
        called(0, "go", "{}"),
        "tool_calls",
    )


# --- how it may end ---------------------------------------------------------------------------


def certain(cut: str) -> list[AnswerPiece]:
    """What is certain of a call that `cut` begins."""
    if '"look"' not in cut:
        return []
    said = cut[CALL.index('{"at"') : CALL.index("}\n</tool_call>")]
    whole = next(part for part in ('{"at": "x"}', '{"at": "x"', '{"at": "x', '{"at": "', "{", "")
                 if said.startswith(part))  # fmt: skip
    return called(arguments=whole) if whole else called()[:1]


CUTS = [CALL[:size] for size in range(11, len(CALL))]


@pytest.mark.parametrize("cut", CUTS)
def test_a_call_that_was_cut_is_emitted_as_far_as_it_is_certain(cut: str) -> None:
    pieces = [TextDelta("Look:"), *certain(cut)]
    assert read(reader(), [f"Look:\n{cut}"], "length") == (pieces, "length")
    assert read(reader(), list(f"Look:\n{cut}"), "length") == (pieces, "length")


def test_a_call_without_its_end_mark_counts_when_the_model_stopped() -> None:
    text = CALL.removesuffix("</tool_call>")
    assert read(reader(), [text]) == (called(), "tool_calls")


@pytest.mark.parametrize("inside", ["", "look()", '{"arguments": {}}', '{"name": 3}'])
@pytest.mark.parametrize("ending", ["</tool_call>", "</tool_call>\n", "</tool_call>\nb"])
def test_what_is_no_call_is_text(inside: str, ending: str) -> None:
    pieces, reason = read(reader(), ["a\n<tool_call>", inside, ending, ""])
    assert isinstance(pieces[1], ToolCallFailed)
    assert pieces[1].problem
    del pieces[1]
    shown = "".join(piece.text for piece in pieces if isinstance(piece, TextDelta))
    assert shown.split() == f"a <tool_call>{inside}{ending}".split()
    assert reason == "stop"


def test_a_call_behind_what_is_none_is_made() -> None:
    pieces, reason = read(reader(), ["<tool_call>look()</tool_call>\n", CALL, "b"])
    assert isinstance(pieces[0], ToolCallFailed)
    assert pieces[1:] == [
        TextDelta("<tool_call>look()</tool_call>"), *called(), TextDelta("\nb"),
    ]  # fmt: skip
    assert reason == "tool_calls"


@pytest.mark.parametrize(
    ("name", "arguments"), [("fly", "{}"), ("go", "3"), ("go", "[1]"), ("fly", '"not JSON"')]
)
def test_a_call_that_no_tool_takes_is_made_all_the_same(name: str, arguments: str) -> None:
    """The client answers that there is no such tool, and the model corrects itself."""
    text = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
    passed = arguments.strip('"')
    assert read(reader(), [text]) == (called(0, name, passed), "tool_calls")


def test_a_name_that_the_answers_end_cut_is_no_call() -> None:
    text = '<tool_call>{"arguments": {}, "name": "fly"}'
    pieces, reason = read(reader(), [text])
    assert isinstance(pieces[0], ToolCallFailed)
    assert (pieces[1:], reason) == ([TextDelta(text)], "stop")


@pytest.mark.parametrize("cut", CUTS[: CUTS.index(CALL[: CALL.index("}\n</tool_call>")])])
def test_a_call_that_a_stop_string_cut_is_not_to_be_made(cut: str) -> None:
    reading = reader()
    pieces = [piece for text in ("Look:\n", *cut) for piece in reading.push(text)]
    rest, reason = reading.finish("stop", stopped=True)
    begun = certain(cut) if "{" in cut.partition('"look"')[2] else []
    assert joined(pieces + rest) == [TextDelta("Look:"), *begun]
    assert reason == "stop"


def test_a_call_that_a_stop_string_ended_counts() -> None:
    """The mark that ends a call may be a stop string: it is no part of the text then."""
    reading = reader()
    assert joined(reading.push(CALL.removesuffix("</tool_call>"))) == called()
    assert reading.finish("stop", stopped=True) == ([], "tool_calls")


def test_calls_before_one_that_a_stop_string_cut_are_to_be_made() -> None:
    reading = reader()
    assert reading.push(CALL + "<tool_call>{") == called()
    assert reading.finish("stop", stopped=True) == ([], "tool_calls")


def test_a_stop_string_does_not_mask_a_call_that_is_wrong() -> None:
    reading = reader()
    assert reading.push("<tool_call>nothing</tool_call>") == []
    [failed, text], reason = reading.finish("stop", stopped=True)
    assert isinstance(failed, ToolCallFailed)
    assert (text, reason) == (TextDelta("<tool_call>nothing</tool_call>"), "stop")


def test_what_is_no_call_is_not_masked_by_a_limit() -> None:
    pieces, reason = read(reader(), ["<tool_call>nothing</tool_call>"], "length")
    assert isinstance(pieces[0], ToolCallFailed)
    assert (pieces[1:], reason) == ([TextDelta("<tool_call>nothing</tool_call>")], "length")


@pytest.mark.parametrize("reason", ["length", "cancelled", "error"])
def test_an_end_from_outside_stays_what_it_is(reason: AnswerReason) -> None:
    assert read(reader(), [f"{CALL} a"], reason) == ([*called(), TextDelta("a")], reason)


def test_half_a_mark_at_a_natural_end_is_text() -> None:
    assert read(reader(), ["1 < 2 <"]) == ([TextDelta("1 < 2 <")], "stop")


def test_half_a_mark_at_a_cut_is_dropped() -> None:
    assert read(reader(), ["ok <tool_c"], "length") == ([TextDelta("ok ")], "length")


# --- tokens -----------------------------------------------------------------------------------


def logprob(token: int) -> tuple[TokenLogprob, ...]:
    return (TokenLogprob(token, -0.5),)


def test_logprobs_go_with_the_text_of_their_tokens() -> None:
    reading = reader()
    texts = ["<think>", "Hm", "</think>", "\n", "A", " ", "<", "b", "", "é", CALL, "\n"]
    pieces = [piece for i, text in enumerate(texts) for piece in reading.push(text, logprob(i))]
    rest, _ = reading.finish("stop")
    said = [piece for piece in pieces + rest if isinstance(piece, TextDelta)]
    assert "".join(piece.text for piece in said) == "A <bé"
    assert [lp.token for piece in said for lp in piece.logprobs] == [4, 5, 6, 7, 8, 9]


def test_a_token_without_text_has_its_logprob() -> None:
    reading = reader(Chat(ASKED), thought=None)
    assert reading.push("", logprob(7)) == [TextDelta("", logprob(7))]


def test_tokens_of_thoughts_are_counted() -> None:
    reading = reader()
    for text in ["<think>", "a", "b", "</think>", "c", "d"]:
        reading.push(text)
    assert reading.reasoning_tokens == 4


# --- any chunking -----------------------------------------------------------------------------

PARTS = [
    "Hello ", "a < b", "\n\n", " ", "é😀", "<tool", "</", "<think>hm\n</think>", "<think>\n",
    "</think>", CALL, "<tool_call>", "</tool_call>", '{"name": "go", "arguments": {}}',
    '<tool_call>{"name": "go", "arguments": {"s": "</tool_call>"}}</tool_call>',
    "<tool_call>?</tool_call>", '<tool_call>{"name": "go", "arguments": {', '"a": "x', '"}}',
    "nope", '[{"name": "go", "arguments": {}}', ', {"name": "look", "arguments": {"at": "x"}}', "]",
    "look[ARGS]{", f"{KIMI}{{", "\\ud83d", "\x07", "</tool_call>\n<tool_call>", ', {"name": "go"}]',
]  # fmt: skip
answers = st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=8).map("".join)
reasons = st.sampled_from(["stop", "length", "cancelled"])


def cut(text: str, at: list[int]) -> list[str]:
    places = [0, *sorted(place % (len(text) + 1) for place in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(answers, st.lists(st.integers(0, 400)), st.booleans(), st.booleans(), st.booleans(), reasons)
def test_any_chunking_gives_the_same(
    text: str, at: list[int], opens: bool, many: bool, endless: bool, reason: AnswerReason
) -> None:
    chat = Chat(ASKED, TOOLS, parallel_tool_calls=many)
    end = "" if endless else None
    whole = read(reader(chat, opens=opens, end=end), [text], reason)
    assert read(reader(chat, opens=opens, end=end), cut(text, at), reason) == whole
    assert read(reader(chat, opens=opens, end=end), list(text), reason) == whole


@given(answers, st.booleans(), reasons)
def test_no_mark_is_ever_given_out(text: str, opens: bool, reason: AnswerReason) -> None:
    pieces, _ = read(reader(opens=opens), list(text), reason)
    if any(isinstance(piece, ToolCallFailed) for piece in pieces):
        return  # what is no call is given out with its marks
    for piece in pieces:
        if isinstance(piece, TextDelta | ReasoningDelta):
            for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
                # Text around a mark may join to one more; that was no mark in the answer.
                assert mark not in piece.text or mark not in text


@given(st.text(alphabet=st.characters(exclude_characters="<", exclude_categories=["Cs"])))
def test_text_without_marks_is_not_changed(text: str) -> None:
    pieces, reason = read(reader(), list(text))
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextDelta)) == text
    assert reason == "stop"


@given(answers, st.booleans())
def test_every_logprob_is_given_out_once_at_most_and_in_order(text: str, opens: bool) -> None:
    reading = reader(opens=opens)
    pieces = [piece for i, c in enumerate(text) for piece in reading.push(c, logprob(i))]
    pieces += reading.finish("stop")[0]
    tokens = [lp.token for p in pieces if isinstance(p, TextDelta) for lp in p.logprobs]
    assert tokens == sorted(set(tokens))
    said = "".join(p.text for p in pieces if isinstance(p, TextDelta))
    if any(isinstance(piece, ToolCallFailed) for piece in pieces):
        return  # what was taken for a call has none
    assert len(tokens) >= len(said.strip()) - said.count(" ") - said.count("\n")
    assert all(text[token] in said for token in tokens)
