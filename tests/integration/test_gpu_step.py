"""The benchmark of a step's variants, on a tiny model."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu_step
from benchmarks.gpu_floor import copy_rate
from experiments.harness.document import Json


@pytest.mark.process
def test_each_variant_gets_a_line_for_each_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_step, "copy_rate", functools.partial(copy_rate, 1 << 20))
    looks = itertools.count()  # each look at the clock takes a millisecond
    clock = SimpleNamespace(perf_counter=lambda: next(looks) / 1000)
    monkeypatch.setattr(gpu_step, "time", clock)
    wanted = ["--only", "plain", "--only", "shortened"]
    gpu_step.main(["--small", *wanted, "--batch", "1", "--batch", "2", "--output", str(tmp_path)])
    differences, *lines, kernels = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")
    ]
    assert list(differences) == ["plain", "shortened"]
    assert list(kernels) == ["plain", "shortened"]
    assert max(map(max, differences.values())) < 1e-4
    assert [(line["batch"], line["variant"]) for line in lines] == [
        (batch, variant) for batch in (1, 2) for variant in ("plain", "shortened")
    ]
    for line in lines:
        assert min(line["graph_ms"], line["hand_over_ms"], line["wait_ms"]) > 0
        parts = line["graph_ms"] + line["hand_over_ms"] + line["wait_ms"]
        assert line["step_ms"] == pytest.approx(parts)
    written = json.loads((tmp_path / "gpu_step.json").read_text())
    assert written["summary"]["steps"] == lines


def test_a_faster_variant_than_the_one_used_misses_the_criterion() -> None:
    used: dict[str, Json] = {"batch": 8, "variant": gpu_step.USED, "step_ms": 2.0}
    other: dict[str, Json] = {"batch": 8, "variant": "plain", "step_ms": 3.0}
    assert gpu_step.judge([used, other]).passed
    assert not gpu_step.judge([used, {**other, "step_ms": 1.0}]).passed
