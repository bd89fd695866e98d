"""Stop strings cut a stream as they cut the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semantic.domain.stop_strings import StopStrings
from semantic.domain.value_objects import Thoughts


def cut_whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """What is left of `text`: it ends where the stop string that is complete first begins."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


def cut_outside(text: str, stops: list[str], *, opened: bool) -> tuple[str, bool]:
    """What is left of `text` if thoughts, from "(" to ")", are not searched."""
    kept, inside = "", opened
    while text:
        if inside:
            thought, mark, text = text.partition(")")
            kept, inside = kept + thought + mark, False
            continue
        said, mark, text = text.partition("(")
        left, stopped = cut_whole(said, stops)
        kept += left
        if stopped:
            return kept, True
        kept, inside = kept + mark, True
    return kept, False


def feed(
    pieces: list[str], stops: list[str], thoughts: Thoughts | None = None
) -> tuple[list[str], bool]:
    """What comes out, piece by piece, the end included."""
    cutter = StopStrings(stops, thoughts)
    emitted = [cutter.push(piece) for piece in pieces]
    return [*emitted, cutter.flush()], cutter.stopped


letters = st.text(alphabet="abé😀", max_size=30)
stop_lists = st.lists(st.text(alphabet="abé😀", min_size=1, max_size=5), max_size=4)


@given(st.lists(st.text(alphabet="abé😀", max_size=6), max_size=12), stop_lists)
@example(["aab"], ["ab", "b"])
@example(["a", "b", "a"], ["bb", "aba"])
@example(["abab"], ["ba", "abab"])
def test_any_division_of_a_text_is_cut_as_the_whole(pieces: list[str], stops: list[str]) -> None:
    emitted, stopped = feed(pieces, stops)
    assert ("".join(emitted), stopped) == cut_whole("".join(pieces), stops)


@given(
    st.lists(st.text(alphabet="ab()", max_size=6), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
@example(["a(b", "a)ab"], ["ba", "ab"], False)
def test_a_thought_is_not_searched(pieces: list[str], stops: list[str], opened: bool) -> None:
    emitted, stopped = feed(pieces, stops, Thoughts("(", ")", opened))
    assert ("".join(emitted), stopped) == cut_outside("".join(pieces), stops, opened=opened)


def test_the_marks_of_a_thought_may_come_in_pieces() -> None:
    thoughts = Thoughts("<think>", "</think>")
    pieces = ["a<th", "ink>stop</thi", "stop</th", "ink>b st", "op c"]
    assert feed(pieces, ["stop"], thoughts) == (
        ["a", "<think>stop", "</thistop", "</think>b ", "", ""],
        True,
    )


def test_a_text_that_mentions_the_mark_is_searched() -> None:
    thoughts = Thoughts("<think>", "</think>", opened=True)
    for text in ("Hm</think>The `<think>` mark. STOP here", "Hm</think>A <think> is it. STOP here"):
        for pieces in ([text], list(text)):
            emitted, stopped = feed(pieces, ["STOP"], thoughts)
            assert ("".join(emitted), stopped) == (text.partition("STOP")[0], True)


@given(letters, stop_lists)
def test_what_was_emitted_is_never_taken_back(text: str, stops: list[str]) -> None:
    kept, _ = cut_whole(text, stops)
    emitted = ""
    cutter = StopStrings(stops)
    for character in text:
        emitted += cutter.push(character)
        assert kept.startswith(emitted)


@given(letters, stop_lists)
def test_text_is_held_back_only_while_it_may_become_a_stop_string(
    text: str, stops: list[str]
) -> None:
    cutter = StopStrings(stops)
    emitted = cutter.push(text)
    held = text[len(emitted) :]
    assert cutter.stopped or not held or any(stop.startswith(held) for stop in stops)


def test_nothing_of_a_stop_string_is_emitted() -> None:
    assert feed(["Hello <", "/ans", "wer", "> more"], ["</answer>"]) == (
        ["Hello ", "", "", "", ""],
        True,
    )


def test_a_stop_string_that_does_not_come_is_given_back() -> None:
    assert feed(["Hello <", "/ans", "!"], ["</answer>"]) == (["Hello ", "", "</ans!", ""], False)


def test_an_end_held_back_comes_with_the_flush() -> None:
    assert feed(["abc"], ["cd"]) == (["ab", "c"], False)


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert feed(["xaab"], ["b", "aab"]) == (["x", ""], True)


def test_the_one_complete_first_wins_though_another_began_before() -> None:
    assert feed(["xabc"], ["abcd", "b"]) == (["xa", ""], True)


def test_after_a_stop_nothing_comes_any_more() -> None:
    cutter = StopStrings(["stop"])
    assert cutter.push("go stop go") == "go "
    assert (cutter.push("more"), cutter.flush(), cutter.stopped) == ("", "", True)


@pytest.mark.parametrize("pieces", [["a", "", "b"], ["\n\n", "é"]])
def test_without_stop_strings_all_text_passes_at_once(pieces: list[str]) -> None:
    assert feed(pieces, []) == ([*pieces, ""], False)


@pytest.mark.parametrize(
    ("pieces", "stops", "matched"),
    [
        (["xaab"], ["b", "aab"], "aab"),
        (["xabc"], ["abcd", "b"], "b"),
        (["go st", "op"], ["stop", "end"], "stop"),
        (["go st", "ay"], ["stop", "end"], None),
        (["anything"], [], None),
    ],
)
def test_it_tells_which_stop_string_matched(
    pieces: list[str], stops: list[str], matched: str | None
) -> None:
    cutter = StopStrings(stops)
    for piece in pieces:
        cutter.push(piece)
    cutter.flush()
    assert cutter.matched == matched
    assert cutter.stopped is (matched is not None)
