"""The benchmark of lanes, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_lanes
from experiments.harness.document import Scalar


@pytest.mark.process
def test_each_part_gets_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("WARM", 1), ("STEPS", 2), ("BATCHES", (2,))):
        monkeypatch.setattr(gpu_lanes, name, number)
    assert gpu_lanes.main(["--small", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "gpu_lanes.json").read_text())
    parts = result["summary"]["tiny"]
    assert [line["mode"] for line in parts["lanes"]] == ["auto", "off", "on"]
    inside = [line for line in parts["answers"] if line["mode"] == "on"]
    assert [line["same_bits"] for line in inside[:2]] == [4, 4]
    assert inside[2]["case"] == gpu_lanes.TAIL
    assert len(parts["steps"]) == 8


@pytest.mark.process
def test_answers_alone_may_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lanes, "BATCHES", (2,))
    assert gpu_lanes.main(["--small", "--only-answers", "--output", str(tmp_path)]) == 0
    parts = json.loads((tmp_path / "gpu_lanes.json").read_text())["summary"]["tiny"]
    assert [(one["mode"], one["same_bits"]) for one in parts["answers"][:2]] == [("on", 4)] * 2
    assert list(parts) == ["answers"]


def line(part: str, mode: str, **found: Scalar) -> dict[str, Scalar]:
    return {"model": "m", "part": part, "mode": mode, **found}


def test_other_bits_miss_the_criterion() -> None:
    for mode, same, passed in (("on", 3, False), ("on", 4, True), ("off", 3, True)):
        one = line("answers", mode, case="beside 1", answers=4, same_bits=same)
        assert gpu_lanes.judge([one]).passed is passed


def test_a_prefilled_tail_misses_nothing() -> None:
    one = line("answers", "on", case=gpu_lanes.TAIL, answers=4, same_bits=0)
    assert gpu_lanes.judge([one]).passed


def test_a_step_that_costs_too_much_misses_the_criterion() -> None:
    for cost, passed in ((1.04, True), (1.06, False)):
        lines = [
            line("busy", "off", rows=1, busy_ms=1.0),
            line("busy", "on", rows=1, busy_ms=cost),
            line("busy", "on", rows=32, busy_ms=9.0),
        ]
        assert gpu_lanes.judge(lines).passed is passed
