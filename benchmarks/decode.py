"""Decode step time: our engine and mlx-lm's BatchGenerator in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx

from benchmarks.rig import PaddedBatch, Rig
from benchmarks.shapes import smollm2_135m
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict

QUESTION = "How fast is a decode step, beside mlx-lm's BatchGenerator with its own caches?"
CRITERION = (
    "seconds of mlx-lm over ours, median of alternating runs: at least 0.97 for 8 equal lengths "
    "and at least 1.3 for 1 x 4,096 + 7 x 256"
)
EQUAL, MIXED = 0.97, 1.3
BATCHES = {
    "8 x 512": [512] * 8,
    "8 x 1,024": [1024] * 8,
    "1 x 4,096 + 7 x 256": [4096] + [256] * 7,
    "1 x 512": [512],
}
STEPS, ROUNDS = 6, 7


def run() -> Result:
    """Measure each batch size, both sides in turns."""
    started = Run.start(
        "decode",
        QUESTION,
        model="SmolLM2-135M shape, random fp32 weights",
        parameters={"steps_per_round": STEPS, "rounds": ROUNDS},
        seed=0,
    )
    model = smollm2_135m()
    samples: list[dict[str, Scalar]] = []
    for name, lengths in BATCHES.items():
        ours, theirs = Rig.build(model), PaddedBatch(model, Rig.build(model).spec)
        ours.start_agents(lengths)
        theirs.add(lengths)
        for _ in range(2):
            ours.step()
            theirs.step()
        for _ in range(ROUNDS):
            mine = seconds(ours.engine.step_once, ours.backend.stream)
            other = seconds(theirs.advance, theirs.stream)
            samples.append({"batch": name, "ours_ms": mine * 1e3, "mlx_lm_ms": other * 1e3})
    table = [row(name, samples) for name in BATCHES]
    ratios = {str(line["batch"]): float(str(line["ratio"])) for line in table}
    equal, mixed = ratios["8 x 512"], ratios["1 x 4,096 + 7 x 256"]
    summary: dict[str, Json] = {"batches": [{**line} for line in table]}
    passed = equal >= EQUAL and mixed >= MIXED
    return started.finish(samples, summary, Verdict(CRITERION, EQUAL, equal, passed=passed))


def seconds(step: Callable[[], object], stream: mx.Stream) -> float:
    """Mean seconds per step over several, since a step may prepare the next one."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    mx.synchronize(stream)
    return (time.perf_counter() - begin) / STEPS


def row(name: str, samples: list[dict[str, Scalar]]) -> dict[str, Scalar]:
    """One line of the table."""
    ours = [float(str(s["ours_ms"])) for s in samples if s["batch"] == name]
    theirs = [float(str(s["mlx_lm_ms"])) for s in samples if s["batch"] == name]
    paired = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {
        "batch": name,
        "ours_ms": round(statistics.median(ours), 1),
        "mlx_lm_ms": round(statistics.median(theirs), 1),
        "ratio": round(statistics.median(paired), 3),
    }
