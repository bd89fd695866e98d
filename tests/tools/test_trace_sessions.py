"""Recorded sessions become prompts with the recorded lengths and common prefixes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from benchmarks.trace_sessions import RecordedSession, recorded_sessions, sessions, single_words
from tests.support.char_tokenizer import CharTokenizer

WORDS = [f" {a}{b}" for a in "abcdefghij" for b in "abcdefghij"]


def session(*requests: tuple[str, int, list[int]]) -> RecordedSession:
    return {
        "id": "one",
        "requests": [{"agent": a, "keep": keep, "new": new} for a, keep, new in requests],
    }


def test_prompts_have_the_recorded_lengths_and_prefixes() -> None:
    recorded = session(
        ("", 0, [1, 2, 3]),
        ("", 3, [4]),  # goes on
        ("1", 0, [1, 2, 9]),  # a subagent that begins alike
        ("", 2, [5, 6]),  # goes back, and on from there
    )
    (found,) = sessions([recorded], WORDS, most_turns=9, piece_tokens=4)
    assert [turn.n_tokens for turn in found.turns] == [12, 16, 12, 16]
    assert [turn.reusable for turn in found.turns] == [0, 12, 8, 8]
    assert found.longest == 16
    first, second, third, fourth = (turn.prompt.split() for turn in found.turns)
    assert [len(words) for words in (first, second, third, fourth)] == [12, 16, 12, 16]
    assert second[:12] == first
    assert third[:8] == first[:8] == fourth[:8]
    assert third[8:] != first[8:]


def test_sessions_have_nothing_in_common() -> None:
    one = session(("", 0, [1, 2]))
    found = sessions([one, one], WORDS, most_turns=1, piece_tokens=2)
    left, right = (each.turns[0].prompt.split() for each in found)
    assert left[:2] != right[:2]


def test_only_the_first_turns_are_taken() -> None:
    one = session(("", 0, [1]), ("", 1, [2]))
    assert len(sessions([one], WORDS, most_turns=1, piece_tokens=2)[0].turns) == 1


def test_a_file_has_a_session_a_line(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(session(("", 0, [n]))) for n in range(3))
    (tmp_path / "some.gz").write_bytes(gzip.compress(lines.encode()))
    assert [one["requests"][0]["new"] for one in recorded_sessions(tmp_path / "some.gz")] == [
        [0],
        [1],
        [2],
    ]


def test_words_are_one_token_each() -> None:
    assert single_words(CharTokenizer(), 96) == []
