"""The benchmarks of prompts and of starts on a GPU, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks import gpu_prefill, gpu_server, gpu_start
from experiments.harness.document import Json, Scalar
from semantic.adapters.mlx import device
from semantic.adapters.mlx.cuda import first_kernels

BESIDE: dict[str, Json] = {
    "side": gpu_prefill.OURS, "what": "beside", "tokens": 8192, "first_s": 0.5, "gap_max_ms": 120.0,
}  # fmt: skip
NEXT: dict[str, Json] = {"side": gpu_prefill.OURS, "what": "next turn", "p50_ms": 30.0}


@pytest.mark.process
def test_each_side_and_kind_of_prompt_gets_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_prefill.main(["--small", "--output", str(tmp_path)])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()[:-1]]
    kinds = ["alone", "alone", "beside", "beside", "at once, first", "at once, again"]
    assert [line["what"] for line in lines if line["side"] == gpu_prefill.THEIRS] == kinds
    assert [line["what"] for line in lines if line["side"] == gpu_prefill.OURS] == [
        *kinds, "next turn",
    ]  # fmt: skip
    assert all(line["tok_s"] > 0 for line in lines if "tok_s" in line)
    written = json.loads((tmp_path / "gpu_prefill.json").read_text())
    assert written["summary"]["lines"] == lines


def test_a_slow_prompt_a_long_gap_and_a_slow_next_turn_miss_the_criterion() -> None:
    assert gpu_prefill.judge([BESIDE, NEXT]).passed
    assert not gpu_prefill.judge([{**BESIDE, "first_s": 1.1}]).passed
    assert not gpu_prefill.judge([{**BESIDE, "gap_max_ms": 251.0}]).passed
    assert not gpu_prefill.judge([BESIDE, {**NEXT, "p50_ms": 41.0}]).passed
    theirs: dict[str, Json] = {**BESIDE, "side": gpu_prefill.THEIRS, "first_s": 9.0}
    assert gpu_prefill.judge([theirs, BESIDE]).passed


def test_the_slowest_of_our_starts_counts() -> None:
    first: dict[str, Scalar] = {"server": gpu_server.OURS, "ready_s": 19.0}
    assert gpu_start.judge([first, {**first, "ready_s": 9.0}]).passed
    assert not gpu_start.judge([first, {**first, "ready_s": 21.0}]).passed
    assert not gpu_start.judge([{"server": gpu_server.THEIRS, "ready_s": 1.0}]).passed


def test_what_the_first_kernels_compute_is_computed_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.eval([compute() for compute in first_kernels.KERNELS])
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    first_kernels.begin()  # nothing without a GPU
    first_kernels.wait()
    assert not any(tmp_path.iterdir())


@pytest.mark.process
def test_kernels_are_compiled_once_by_processes_that_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "on_cuda", lambda: True)
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    first_kernels.begin()
    assert first_kernels._running == []
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    first_kernels.begin()
    assert len(first_kernels._running) == len(first_kernels.KERNELS)
    first_kernels.wait()
    assert len(list(tmp_path.iterdir())) == len(first_kernels.KERNELS)
    first_kernels.begin()
    assert first_kernels._running == []
