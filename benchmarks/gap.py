"""Inter-token latency of running agents while a long prompt is prefilled."""

from __future__ import annotations

import time

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
from mlx.nn.layers.base import Module

from benchmarks.rig import PaddedBatch, Rig
from benchmarks.shapes import small, smollm2_135m
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from experiments.harness.stats import percentile
from semantic.domain.value_objects import PrefillEvent, TokenEvent

QUESTION = "Do running agents keep talking while a prompt of 8,000 tokens is read?"
CRITERION = (
    "3 agents decode, a prompt of 8,000 tokens arrives: p99 of the gap between two of their tokens "
    "below 1.5 x the target of 250 ms (small model shape)"
)
TARGET, FACTOR, PROMPT, RESIDENT = 0.25, 1.5, 8000, 300
SHAPES = {"small": small, "SmolLM2-135M": smollm2_135m}


def run() -> Result:
    """Both shapes; for the small one mlx-lm's own BatchGenerator too."""
    started = Run.start(
        "gap",
        QUESTION,
        model="4-layer shape of the embedded model, and SmolLM2-135M shape; random fp32 weights",
        parameters={"prompt_tokens": PROMPT, "target_ms": TARGET * 1e3, "agents": 3},
        seed=0,
    )
    samples: list[dict[str, Scalar]] = []
    for shape, build in SHAPES.items():
        model = build()
        samples += [{"shape": shape, "side": "ours", "gap_ms": g * 1e3} for g in ours(model)]
        if shape == "small":
            samples += [
                {"shape": shape, "side": "mlx-lm", "gap_ms": g * 1e3} for g in theirs(model)
            ]
    table = [
        row(shape, side, samples)
        for shape, side in (("small", "ours"), ("small", "mlx-lm"), ("SmolLM2-135M", "ours"))
    ]
    observed = float(str(table[0]["p99_ms"]))
    summary: dict[str, Json] = {"gaps": [{**line} for line in table]}
    limit = TARGET * FACTOR * 1e3
    verdict = Verdict(CRITERION, limit, observed, passed=observed < limit)
    return started.finish(samples, summary, verdict)


def ours(model: Module) -> list[float]:
    """Inter-token latencies of the three agents until the prompt is prefilled."""
    rig = Rig.build(model, target_gap=TARGET)
    rig.start_agents([RESIDENT] * 3)
    rig.settle(10)
    uid = rig.engine.submit("long", [i % 90 for i in range(PROMPT)], max_tokens=5)
    gaps, last, reading = [], time.perf_counter(), True
    while reading:
        events = rig.engine.step_once()
        if any(isinstance(event, TokenEvent) for event in events):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        reading = not any(
            isinstance(event, PrefillEvent) and event.uid == uid and event.done == event.total
            for event in events
        )
    return gaps


def theirs(model: Module) -> list[float]:
    """The same with mlx-lm's unmodified BatchGenerator."""
    batch = PaddedBatch(model, Rig.build(model).spec)
    batch.add([RESIDENT] * 3)
    for _ in range(10):
        batch.advance()
    batch.add_prompt([i % 90 for i in range(PROMPT)])
    gaps, last, agents = [], time.perf_counter(), 3
    while agents == 3:
        agents = batch.advance()
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    return gaps


def row(shape: str, side: str, samples: list[dict[str, Scalar]]) -> dict[str, Scalar]:
    """One line of the table."""
    gaps = [float(str(s["gap_ms"])) for s in samples if (s["shape"], s["side"]) == (shape, side)]
    return {
        "shape": shape,
        "side": side,
        "tokens": len(gaps),
        "p50_ms": round(percentile(gaps, 50), 1),
        "p99_ms": round(percentile(gaps, 99), 1),
        "max_ms": round(max(gaps), 1),
    }
