"""The benchmark of drafts, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_drafts
from experiments.harness.document import Scalar


@pytest.mark.process
def test_drafts_change_no_bit_and_make_fewer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_drafts, "_HISTORY", 1 << 10)
    monkeypatch.setattr(gpu_drafts, "ROUNDS", 1)
    gpu_drafts.main(["--small", "--output", str(tmp_path)])  # its speed depends on the machine
    lines = json.loads((tmp_path / "gpu_drafts.json").read_text())["summary"]["lines"]
    assert [(one["answers"], one["same_bits"]) for one in lines[:2]] == [(3, 3), (3, 3)]
    assert [one["agents"] for one in lines[2:]] == [1, 4, 8, 32]


@pytest.mark.process
def test_answers_alone_may_be_measured(tmp_path: Path) -> None:
    given = ["--small", "--only-answers", "--output", str(tmp_path)]
    assert gpu_drafts.main(given) == 0
    result = json.loads((tmp_path / "gpu_drafts.json").read_text())
    assert [one["part"] for one in result["summary"]["lines"]] == ["answers", "answers"]


def speed(agents: int, faster: float, unknown: float) -> dict[str, Scalar]:
    return {
        "part": "speed", "context": 64, "agents": agents, "usual_over_none": faster,
        "unknown_over_drawn": unknown,
    }  # fmt: skip


def test_the_criterion_is_missed_by_other_bits_and_slow_steps() -> None:
    equal: dict[str, Scalar] = {"part": "answers", "beside": 0, "answers": 3, "same_bits": 3}
    assert gpu_drafts.judge([equal, speed(1, 1.5, 0.98), speed(4, 1.25, 0.98)]).passed
    for wrong in (equal | {"same_bits": 2}, speed(1, 1.49, 1.0), speed(4, 1.3, 0.97)):
        assert not gpu_drafts.judge([wrong]).passed
