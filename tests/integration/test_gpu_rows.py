"""The benchmark of a step's rows, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_rows, gpu_step
from experiments.harness.document import Json


@pytest.mark.process
@pytest.mark.parametrize(("bits", "name"), [("4", "gpu_rows.json"), ("16", "gpu_rows_plain.json")])
def test_each_side_gets_a_line_for_each_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: str, name: str
) -> None:
    monkeypatch.setattr(gpu_step, "ROUNDS", 1)
    gpu_rows.main(["--small", "--bits", bits, "--output", str(tmp_path)])
    summary = json.loads((tmp_path / name).read_text())["summary"]
    for part in ("steps", "busy"):
        assert [(line["batch"], line["variant"]) for line in summary[part]] == [
            (batch, side) for batch in gpu_rows.SMALL_BATCHES for side in ("MLX", "ours")
        ]


def busy(side: str = "ours", **milliseconds: float) -> list[Json]:
    return [
        {"batch": int(rows[1:]), "variant": side, "busy_ms": one}
        for rows, one in milliseconds.items()
    ]


def test_rows_that_cost_too_much_miss_the_criterion() -> None:
    assert gpu_rows.judge({"busy": busy(r1=4.0, r8=5.0, r16=8.0)}).passed
    assert not gpu_rows.judge({"busy": busy(r1=4.0, r8=6.0)}).passed
    assert not gpu_rows.judge({}).passed


def test_plain_rows_that_cost_more_than_with_mlx_miss_the_criterion() -> None:
    for ours, passed in ((4.1, True), (4.3, False)):
        lines = [*busy("MLX", r1=4.0, r16=4.0, r32=4.0), *busy(r1=ours, r16=4.1, r32=9.0)]
        assert gpu_rows.judge({"busy": lines}, plain=True).passed is passed
    assert not gpu_rows.judge({}, plain=True).passed


def test_a_token_that_depends_on_companions_misses_the_criterion() -> None:
    one: dict[str, Json] = {"batch": 8, "same_tokens": 48, "of": 48}
    for difference, passed in ((0.0, True), (1e-6, False)):
        divergence: list[Json] = [{**one, "largest_logprob_difference": difference}]
        bits: dict[str, Json] = {"divergence": divergence}
        assert gpu_rows.judge({"busy": busy(r1=4.0), "bits": bits}).passed is passed
