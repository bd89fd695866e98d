"""Latency for running agents when an agent joins the batch, by the amount of resident cache."""

from __future__ import annotations

import statistics

from benchmarks.rig import Rig
from benchmarks.shapes import smollm2_135m
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict

QUESTION = "Does a join cost more when more is resident?"
CRITERION = "median cost of a join with 7 x 2,048 tokens resident over that with 7 x 64: below 1.5"
LIMIT = 1.5
RESIDENT = {"7 x 64": 64, "7 x 2,048": 2048}
NEWCOMER, ROUNDS = 256, 7


def run() -> Result:
    """Measure joins of a resumed agent, in turns with plain steps."""
    started = Run.start(
        "join",
        QUESTION,
        model="SmolLM2-135M shape, random fp32 weights",
        parameters={"newcomer_tokens": NEWCOMER, "rounds": ROUNDS},
        seed=0,
    )
    model = smollm2_135m()
    rigs = {name: Rig.build(model) for name in RESIDENT}
    for name, length in RESIDENT.items():
        rigs[name].start_agents([length] * 7)
        rigs[name].settle(2)
    samples: list[dict[str, Scalar]] = [
        {"resident": name, "join_ms": join_seconds(rig, i) * 1e3}
        for i in range(ROUNDS)
        for name, rig in rigs.items()
    ]
    medians = {
        name: statistics.median(float(str(s["join_ms"])) for s in samples if s["resident"] == name)
        for name in RESIDENT
    }
    ratio = medians["7 x 2,048"] / medians["7 x 64"]
    summary: dict[str, Json] = {
        "joins": [{"resident": name, "join_ms": round(ms, 1)} for name, ms in medians.items()],
        "ratio": round(ratio, 2),
    }
    return started.finish(
        samples, summary, Verdict(CRITERION, LIMIT, round(ratio, 2), passed=ratio < LIMIT)
    )


def join_seconds(rig: Rig, i: int) -> float:
    """How much longer two steps with a join take than two without."""
    name = f"newcomer-{i}"
    tokens = rig.add_idle_agent(name, NEWCOMER)
    plain = statistics.median(rig.step() for _ in range(3))
    uid = rig.engine.submit(name, (*tokens, 1), max_tokens=100)
    with_join = rig.step() + rig.step()  # admitted and started; then its first forward pass
    rig.engine.cancel(uid)
    rig.settle(2)
    rig.engine.forget(name)
    return with_join - 2 * plain
