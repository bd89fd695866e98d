"""`semantic serve` and `mlx_lm.server` in turns: same model files, machine and requests.

Run: python -m benchmarks.server [--quick] [--output DIR] [--python PYTHON]; PYTHON belongs to an
environment that has mlx-lm, else one is made. Both compute fp32, each in its own process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.server_measures import (
    OURS,
    QUICK,
    THEIRS,
    Conversations,
    Row,
    Side,
    Sizes,
    beside_long,
    overhead,
    taking_turns,
    throughput,
)
from benchmarks.server_model import write_model
from benchmarks.server_process import make_environment, mlx_lm_server, semantic_server
from experiments.harness.document import Json, Scalar
from experiments.harness.plots import Plot, draw
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.bootstrap import build_engine
from semantic.composition.engine_settings import Settings

QUESTION = "What does a client get from our server, and what from mlx_lm.server?"
CRITERION = (
    "our server fails no request, adds less than 15 ms (median) to a request over the engine in "
    "the same process, and after a restart gives the first token sooner than mlx_lm.server"
)
MOST_OVERHEAD_MS = 15.0
TTFT = ("cold", "same again", "next turn", "after restart", "first request")
SHORT = ("short behind long", "short alone")
LOWER = {**dict.fromkeys((*TTFT, *SHORT), "ttft_ms"), "worst gap": "worst_gap_ms"}
"""Measures in milliseconds, and the field that counts."""
PLOTS = (
    Plot(
        "server_throughput.svg",
        "Clients with mixed prompts and answers",
        x="clients",
        y="tokens_per_second",
        series="side",
        y_label="completion tokens per second",
    ),
    Plot(
        "server_cached.svg",
        "Agents taking turns",
        x="agents",
        y="cached_share",
        series="side",
        y_label="cached share of prompt tokens",
    ),
)


def run(sizes: Sizes | None = None, python: Path | None = None) -> Result:
    """All measures, on two servers that run together and are measured in turns."""
    sizes = sizes or Sizes()
    parameters: dict[str, Scalar] = {
        name: value if isinstance(value, int) else ", ".join(map(str, value))
        for name, value in asdict(sizes).items()
    }
    started = Run.start(
        "server",
        QUESTION,
        model="semantic-tiny with idle layers: 6 layers, 9.3M parameters, fp32",
        parameters=parameters,
        seed=0,
    )
    with TemporaryDirectory(prefix="semantic-benchmark-") as parent:
        folder = Path(parent)
        rows = list(measured(folder, python or make_environment(folder / "environment"), sizes))
    return started.finish(rows, summarise(rows), judge(rows))


def measured(folder: Path, python: Path, sizes: Sizes) -> Iterator[Row]:
    """Every row of every measure."""
    model = folder / "model"
    write_model(model)
    names = ("--served-model-name", "default_model")
    ours = Side(semantic_server(model, folder / OURS, *names, name=OURS))
    sides = (ours, Side(mlx_lm_server(model, folder / THEIRS, python)))
    try:
        for side in sides:
            side.start()
        talks = Conversations(sides, sizes)
        parts: tuple[Iterable[Row], ...] = (
            talks.measure(),
            throughput(sides, sizes),
            beside_long(sides, sizes),
            taking_turns(sides, sizes),
            talks.after_restart(),
            _overhead(ours, model, folder, sizes),
        )
        for part in parts:
            yield from _told(part)
    finally:
        for side in sides:
            side.process.stop()


def summarise(rows: Sequence[Row]) -> dict[str, Json]:
    """Tables: one a kind of measure, medians with their spread, ratios of pairs."""
    measures = list(dict.fromkeys(str(row["measure"]) for row in rows))
    found: dict[str, Json] = {
        "milliseconds": [
            _line(rows, name, LOWER[name], "mlx_lm_over_ours") for name in measures if name in LOWER
        ],
        "throughput": [
            _line(rows, name, "tokens_per_second", "ours_over_mlx_lm")
            for name in measures
            if name.startswith("throughput")
        ],
        "cached_share": [
            _line(rows, name, "cached_share", "ours_over_mlx_lm", digits=3)
            for name in measures
            if name.startswith("cached share")
        ],
        "failed": [
            {key: row[key] for key in ("measure", "side", "round", "failed")}
            for row in rows
            if "failed" in row
        ],
    }
    added = values(rows, "overhead", OURS, "overhead_ms")
    found["overhead_ms"] = round(statistics.median(added), 2) if added else None
    found["overhead_spread_ms"] = _spread(added, 2)
    steps = values(rows, "worst gap", OURS, "step_ms")
    behind, alone = (values(rows, name, OURS, "ttft_ms") for name in SHORT)
    if steps and behind and alone:
        step = statistics.median(steps)
        waited = statistics.median(behind) - statistics.median(alone)
        found["decode_step_ms"] = round(step, 2)
        found["short_behind_long_waits_steps"] = round(waited / step, 1)
    return found


def judge(rows: Sequence[Row]) -> Verdict:
    """Whether our side meets the criterion."""
    added = values(rows, "overhead", OURS, "overhead_ms")
    observed = round(statistics.median(added), 2) if added else None
    failed = any("failed" in row for row in rows if row["side"] == OURS)
    back, theirs = (values(rows, "after restart", side, "ttft_ms") for side in (OURS, THEIRS))
    sooner = bool(back) and (not theirs or statistics.median(back) < statistics.median(theirs))
    passed = not failed and sooner and observed is not None and observed < MOST_OVERHEAD_MS
    return Verdict(CRITERION, MOST_OVERHEAD_MS, observed, passed=passed)


def values(rows: Sequence[Row], measure: str, side: str, field: str) -> list[float]:
    """One field of one side, round by round; rounds that failed are left out."""
    return list(_by_round(rows, measure, side, field).values())


def _by_round(rows: Sequence[Row], measure: str, side: str, field: str) -> dict[Scalar, float]:
    return {
        row["round"]: float(str(row[field]))
        for row in rows
        if row["measure"] == measure and row["side"] == side and field in row
    }


def _line(
    rows: Sequence[Row], measure: str, field: str, ratio: str, *, digits: int = 1
) -> dict[str, Json]:
    ours = _by_round(rows, measure, OURS, field)
    theirs = _by_round(rows, measure, THEIRS, field)
    over, under = (theirs, ours) if ratio.startswith("mlx") else (ours, theirs)
    pairs = [over[i] / under[i] for i in ours if i in theirs and under[i] > 0]
    return {
        "measure": measure,
        "ours": _median(ours.values(), digits),
        "ours_spread": _spread(ours.values(), digits),
        "mlx_lm": _median(theirs.values(), digits),
        "mlx_lm_spread": _spread(theirs.values(), digits),
        ratio: round(statistics.median(pairs), 2) if pairs else None,
    }


def _median(found: Iterable[float], digits: int) -> Json:
    numbers = list(found)
    return round(statistics.median(numbers), digits) if numbers else "failed"


def _spread(found: Iterable[float], digits: int) -> str:
    numbers = list(found)
    return f"{min(numbers):.{digits}f} – {max(numbers):.{digits}f}" if numbers else "failed"


def _overhead(side: Side, model: Path, folder: Path, sizes: Sizes) -> Iterator[Row]:
    """The engine in this process has a store of its own, as the server's has."""
    app = build_engine(Settings(str(model), store=folder / "engine"))
    try:
        yield from overhead(side, app.tokenizer, app.engine, sizes)
    finally:
        app.engine.close()


def _told(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows; prints a line of progress for each."""
    began = time.monotonic()
    for row in rows:
        shown = {key: f"{v:.3g}" if isinstance(v, float) else v for key, v in row.items()}
        print(f"{time.monotonic() - began:6.1f} s  {shown}", file=sys.stderr, flush=True)
        yield row


def main() -> int:
    """Measure; 1 when the criterion is missed. A quick run writes no result without `--output`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--python", type=Path, help="of an environment that has mlx-lm")
    options = parser.parse_args()
    result = run(QUICK if options.quick else None, options.python)
    folder = options.output or (None if options.quick else Path(__file__).parent / "results")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        result.write(folder / "server.json")
        if find_spec("matplotlib") is not None:
            draw(folder / "server.json", PLOTS)
    print(json.dumps(result.summary, indent=2, ensure_ascii=False))
    return int(not result.verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
