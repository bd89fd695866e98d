"""Extracts the cache specs of five models without their weights and compares them with the truth.

Each model is built in its own process (`reading.py`), so that its peak memory is known.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from experiments.exp_001_model_specs.comparing import (
    Reading,
    claims,
    differences,
    sample,
    window_bytes,
    window_room,
)
from experiments.exp_001_model_specs.configurations import EXPECTED
from experiments.harness.document import Json, Scalar
from experiments.harness.environment import ROOT
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict

ID = "EXP-001"
QUESTION = (
    "Does the cache spec read from a model whose weights were never loaded say, layer by layer, "
    "what the model really caches?"
)
CRITERION = (
    "for each of five models every layer's kind, window, KV heads, head sizes and bytes equal the "
    "values worked out by hand, and reading one peaks below 512 MiB of resident memory"
)
MIB = 2**20
MAX_RSS = 512 * MIB


def run(parameters: Mapping[str, Scalar]) -> Result:
    """Read every model's spec and compare."""
    started = Run.start(ID, QUESTION, model=", ".join(EXPECTED), parameters=parameters, seed=0)
    readings = {name: read(name) for name in EXPECTED}
    wrong = [
        line
        for name, expected in EXPECTED.items()
        for line in differences(name, expected, readings[name])
    ]
    most = max(reading.rss_peak_bytes for reading in readings.values())
    verdict = Verdict(CRITERION, 0, len(wrong), passed=not wrong and most < MAX_RSS)
    samples = [sample(name, reading) for name, reading in readings.items()]
    return started.finish(samples, summary(readings, wrong), verdict)


def read(name: str) -> Reading:
    """What `reading.py` finds, in a fresh process."""
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", "experiments.exp_001_model_specs.reading", name],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Reading.parse(done.stdout)


def summary(readings: Mapping[str, Reading], wrong: list[str]) -> dict[str, Json]:
    """What the report quotes."""
    columns = (
        "model", "layers", "window_layers", "window", "kv_heads", "head_dim", "bytes_per_token",
        "bytes_per_block",
    )  # fmt: skip
    rows = [sample(name, reading) for name, reading in readings.items()]
    gemma = readings["Gemma 3 12B"]
    return {
        "models": [{column: row[column] for column in columns} for row in rows],
        "wrong": len(wrong),
        "differences": [*wrong],
        "claims": [
            {**claim._asdict(), "holds": claim.plan == claim.found} for claim in claims(readings)
        ],
        "false_claims": sum(claim.plan != claim.found for claim in claims(readings)),
        "most_rss_mib": max(reading.rss_peak_bytes for reading in readings.values()) / MIB,
        "rss_before_mib": max(reading.rss_before_bytes for reading in readings.values()) / MIB,
        "most_mlx_kib": max(reading.mlx_peak_bytes for reading in readings.values()) / 1024,
        "most_weights_gib": max(reading.weight_bytes for reading in readings.values()) / 2**30,
        "most_seconds": max(reading.seconds for reading in readings.values()),
        "gemma_windows_mib": window_bytes(gemma) / MIB,
        "gemma_windows_reserved_mib": window_room(gemma) / MIB,
    }
