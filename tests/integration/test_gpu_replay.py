"""The replay of recorded sessions through a server, on a tiny model."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import mlx.core as mx
import pytest
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase

from benchmarks import gpu_replay
from benchmarks.forced_server import ForcedSampler, all_up_to, draw_forced
from benchmarks.gpu_replay import AUTO, OFF, OTHERS, Round
from benchmarks.recorded_talks import Limits, talks_in, use_tokenizer
from experiments.harness.document import Scalar
from semantic.adapters.mlx.batch.draft_costs import StepSeconds
from semantic.adapters.mlx.model.provider import find_folder
from semantic.adapters.mlx.sampling.sampler import give_back
from semantic.ports.generation import Draft

PROGRAM = "def add(first, second):\n    return first + second\n\n\nprint(add(1, 2))\n"
MARKS = "🌍 naïve <|end|>"


def recording(folder: Path) -> Path:
    """Two sessions of a task, each with two answers of which the second has the first."""
    file = folder / "sessions.jsonl.gz"
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        for name in ("one/add", "two/add"):
            messages = [
                {"role": "system", "content": "You write programs."},
                {"role": "user", "content": f"Write add, {name}."},
                {"role": "assistant", "content": PROGRAM},
                {"role": "tool", "content": "3"},
                {"role": "assistant", "content": f"Again, {MARKS}:\n{PROGRAM}"},
            ]
            lines.write(json.dumps({"session": name, "messages": messages}) + "\n")
    return file


def tokenizer_file() -> Path:
    return find_folder("semantic-tiny") / "tokenizer.json"


@pytest.mark.process
def test_answers_are_the_recorded_ones_and_drafts_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_replay, "plans", lambda *_: [[Round(AUTO, 2, checked=3)]])
    given = ["--small", "--only-checked", "--tokens", "200", "--output", str(tmp_path)]
    assert gpu_replay.main([str(recording(tmp_path)), *given]) == 0
    (line,) = json.loads((tmp_path / "gpu_replay.json").read_text())["summary"]["rounds"]
    assert (line["answers"], line["as_recorded"]) == (4, 4)
    assert line["accepted"] > line["tokens"] / 8
    assert line["tokens_per_step"] > 1.1
    assert len(line["same_task"]) == 2


def test_a_forced_sampler_repeats_the_tokens_of_refused_drafts() -> None:
    rows = [ForcedSampler([5, 6, 7], 0), ForcedSampler([8, 9], 1)]
    logprobs = mx.zeros((3, 10))
    assert draw_forced([rows[0], rows[0], rows[1]], logprobs).tolist() == [5, 6, 9]
    give_back(rows[0], 1)
    assert draw_forced([rows[0], rows[0], rows[1]], logprobs).tolist() == [6, 7, 9]


def test_each_draft_is_checked_up_to_a_number_of_tokens() -> None:
    drafts = [Draft([1, 2, 3, 4, 5], 0.1), Draft([1], 0.1), Draft([1, 2, 3], 0.1)]
    assert all_up_to(4)(drafts, 3, 7, StepSeconds()) == [4, 1, 2]


def test_answers_end_between_characters_and_spell_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file()))
    for most in range(1, 30):
        for talk in talks_in(recording(tmp_path), tokenizer, Limits(1, None, most)):
            assert talk.task == "add"
            assert [one.number for one in talk.exchanges] == [0, 1]
            for one, text in zip(
                talk.exchanges, (PROGRAM, f"Again, {MARKS}:\n{PROGRAM}"), strict=True
            ):
                assert len(one.tokens) <= most
                assert text.startswith(one.answer)
            assert [one["role"] for one in talk.exchanges[1].messages] == [
                *("system", "user", "assistant", "user")
            ]
            assert talk.exchanges[1].messages[2]["content"] == talk.exchanges[0].answer


def test_a_tokenizer_must_keep_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file()))
    tokenizer.normalizer = Lowercase()
    with pytest.raises(ValueError, match="does not keep the text of 'Again"):
        talks_in(recording(tmp_path), tokenizer, Limits())


def test_a_tokenizer_needs_the_end_of_chatml(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no token"):
        use_tokenizer(tmp_path, tokenizer_file())


def line(side: str, rate: float, **more: Scalar) -> dict[str, Scalar]:
    """A round of one client."""
    return {
        "side": side, "clients": 1, "source": OTHERS, "answers": 2, "as_recorded": 2,
        "decode_tok_s": rate, "out_tok_s": rate, "ttft_p50_s": 0.1, "gap_max_ms": 9.0,
        "tokens_per_step": 2.5, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("with_drafts", "passed"),
    [
        (line(AUTO, 99.0), True),
        (line(AUTO, 97.0), False),
        (line(AUTO, 99.0, as_recorded=1), False),
        ({**line(AUTO, 99.0), "failure": "status 503"}, False),
    ],
    ids=["as fast", "slower", "another answer", "failed"],
)
def test_drafts_must_not_cost_time_nor_change_answers(
    with_drafts: dict[str, Scalar], passed: bool
) -> None:
    lines = [line(OFF, 100.0), with_drafts]
    assert gpu_replay.judge(lines, [[], []], [1]).passed is passed


def test_a_fixed_number_of_drafts_must_give_its_tokens_per_step() -> None:
    for checked, of_task, passed in (
        (4, [1.2, 3.1], True), (4, [1.2, 2.9], False), (16, [1.2, 2.9], False), (3, [], True),
    ):  # fmt: skip
        found = gpu_replay.judge([line(AUTO, 1.0, checked=checked)], [of_task], [])
        assert found.passed is passed
