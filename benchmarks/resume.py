"""Time to first token of an agent that resumes from memory, in decode steps."""

from __future__ import annotations

import statistics

from benchmarks.rig import Rig
from benchmarks.shapes import smollm2_135m
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict

QUESTION = "How long does an agent of 2,000 tokens wait for its first token when it comes back?"
CRITERION = "median time to first token, resumed with 8 new tokens, at most 3 decode steps"
LIMIT = 3.0
LENGTH, ROUNDS, NEW_TOKENS = 2000, 7, (1, 8, 16)


def run() -> Result:
    """Resume the same agent repeatedly, in turns with decode steps, and prefill it once."""
    started = Run.start(
        "resume",
        QUESTION,
        model="SmolLM2-135M shape, random fp32 weights",
        parameters={"tokens": LENGTH, "rounds": ROUNDS},
        seed=0,
    )
    rig = Rig.build(smollm2_135m())
    tokens = rig.add_idle_agent("ann", LENGTH)
    rig.first_token("ann", (*tokens, 1))  # everything that is set up once, is set up now
    samples: list[dict[str, Scalar]] = []
    for i in range(ROUNDS):
        for new in NEW_TOKENS:
            found = rig.first_token("ann", (*tokens, *[i + 2] * new))
            samples.append(
                {"new_tokens": new, "ttft_ms": found.ttft * 1e3, "step_ms": found.step * 1e3}
            )
    cold = rig.first_token("cold", (*tokens, 1)).ttft
    table = [row(new, samples) for new in NEW_TOKENS]
    observed = next(float(str(r["decode_steps"])) for r in table if r["new_tokens"] == 8)
    resumed = float(str(table[0]["ttft_ms"]))
    summary: dict[str, Json] = {
        "resumed": [{**line} for line in table],
        "cold_ttft_ms": round(cold * 1e3, 1),
        "cold_over_resumed": round(cold * 1e3 / resumed, 1),
    }
    verdict = Verdict(CRITERION, LIMIT, observed, passed=observed <= LIMIT)
    return started.finish(samples, summary, verdict)


def row(new: int, samples: list[dict[str, Scalar]]) -> dict[str, Scalar]:
    """One line of the table."""
    own = [s for s in samples if s["new_tokens"] == new]
    ttft = statistics.median(float(str(s["ttft_ms"])) for s in own)
    step = statistics.median(float(str(s["step_ms"])) for s in own)
    return {
        "new_tokens": new,
        "ttft_ms": round(ttft, 1),
        "step_ms": round(step, 1),
        "decode_steps": round(ttft / step, 2),
    }
