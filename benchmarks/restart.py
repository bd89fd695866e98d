"""Time to first token of an agent after a restart, in decode steps and beside a prefill."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import stored
from benchmarks.restarted import LENGTH, NEW_TOKENS
from experiments.harness.document import Json, Scalar
from experiments.harness.environment import ROOT
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict

QUESTION = (
    "How long does an agent of 2,000 tokens wait for its first token after the process was "
    "started again?"
)
CRITERION = (
    "model loaded, page cache warm, one new token: at least 20 times faster than reading the "
    "prompt again (median of pairs), and the same first token"
)
LEAST, ROUNDS = 20.0, 3
Row = dict[str, Scalar]


def run() -> Result:
    """One process saves; others, one after the other, resume."""
    started = Run.start(
        "restart",
        QUESTION,
        model="SmolLM2-135M shape, random fp32 weights",
        parameters={"tokens": LENGTH, "rounds": ROUNDS},
        seed=0,
    )
    samples: list[Row] = []
    with stored.folder() as folder:
        child("save", folder)
        for i in range(ROUNDS):
            lines = child("come-back", folder, str(i)).splitlines()
            samples += [{"round": i, **json.loads(line)} for line in lines]
    cold = column(samples, 0, "ttft_ms")
    one = column(samples, NEW_TOKENS[0], "ttft_ms")
    faster = statistics.median(a / b for a, b in zip(cold, one, strict=True))
    same = column(samples, 0, "token") == column(samples, NEW_TOKENS[0], "token")
    summary: dict[str, Json] = {
        "restarted": [{**row(samples, new, cold)} for new in NEW_TOKENS],
        "cold_ttft_ms": round(statistics.median(cold), 1),
        "faster": round(faster, 1),
        "same_first_token": same,
    }
    verdict = Verdict(CRITERION, LEAST, round(faster, 1), passed=same and faster >= LEAST)
    return started.finish(samples, summary, verdict)


def child(*arguments: str | Path) -> str:
    """What a new process prints."""
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", "benchmarks.restarted", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def column(samples: list[Row], new: int, key: str) -> list[float]:
    """One field, round by round; `new` 0 is the cold prefill."""
    return [float(str(s[key])) for s in samples if s["new_tokens"] == new]


def row(samples: list[Row], new: int, cold: list[float]) -> Row:
    """One line of the table."""
    ttft = column(samples, new, "ttft_ms")
    step = statistics.median(column(samples, new, "step_ms"))
    return {
        "new_tokens": new,
        "ttft_ms": round(statistics.median(ttft), 1),
        "step_ms": round(step, 1),
        "decode_steps": round(statistics.median(ttft) / step, 2),
        "open_store_ms": round(statistics.median(column(samples, new, "open_ms")), 1),
        "cold_over_this": round(
            statistics.median(a / b for a, b in zip(cold, ttft, strict=True)), 1
        ),
    }
