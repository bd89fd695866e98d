"""Two trees of this project and `mlx_lm.server`: the same requests to each, in turns, in one run.

Run: python -m benchmarks.server_before_after --before SRC [--rounds N] [--output DIR]; SRC is the
`src` folder of the other tree. Times to the first token are also given in decode steps of the same
side, so that runs of machines of other speed can be compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.server_client import Answer, RequestFailedError
from benchmarks.server_measures import Conversations, Row, Side, Sizes, in_turns
from benchmarks.server_model import words, write_model
from benchmarks.server_process import (
    ServerEndedError,
    ServerProcess,
    mlx_lm_server,
    semantic_server,
)
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict

QUESTION = "What changed for a client of our server, beside mlx_lm.server on the same machine?"
CRITERION = (
    "no time to the first token grows and no throughput falls by more than 10 % of what the other "
    "tree gives in the same run"
)
MOST = 1.1
BEFORE, NOW, THEIRS = "before", "now", "mlx-lm"
NAMES = (BEFORE, NOW, THEIRS)
TTFT = ("cold", "same again", "next turn", "after restart")
PROMPT_WORDS, SHORT_WORDS = 718, 55
"""About 1,008 and 80 tokens."""
CLIENTS, REQUESTS, ANSWER, STREAM = (1, 4, 8, 16), 2, 40, 60
MODEL = "semantic-tiny with idle layers: 6 layers, 9.3M parameters, fp32"


def run(before: Path, python: Path, rounds: int = 5) -> Result:
    """All measures of the three servers, `before` being the sources of the other tree."""
    sizes = Sizes(rounds=rounds, prompt_words=PROMPT_WORDS, new_words=20)
    parameters: dict[str, Scalar] = {
        "rounds": rounds,
        "prompt_words": PROMPT_WORDS,
        "clients": ", ".join(map(str, CLIENTS)),
        "requests": REQUESTS,
        "answer": ANSWER,
        "short_words": SHORT_WORDS,
    }
    started = Run.start("server_before_after", QUESTION, model=MODEL, parameters=parameters, seed=0)
    with TemporaryDirectory(prefix="semantic-benchmark-") as folder:
        rows: list[Row] = []
        for row in measured(Path(folder), before, python, sizes):
            rows.append(row)
            print(json.dumps(row), flush=True)
    summary = summarise(rows)
    worst = worst_change(rows)
    failed = [row for row in rows if "failed" in row and row["side"] != THEIRS]
    verdict = Verdict(CRITERION, MOST, worst, passed=not failed and worst <= MOST)
    return started.finish(rows, summary, verdict)


def measured(folder: Path, before: Path, python: Path, sizes: Sizes) -> Iterator[Row]:
    """The rows of all measures."""
    model = folder / "model"
    write_model(model)
    sides = [Side(one) for one in servers(folder, model, before, python)]
    try:
        for side in sides:
            side.start()
        talks = Conversations(sides, sizes)
        yield from talks.measure()
        for number in range(sizes.rounds):
            yield from in_turns(sides, "decode step", number, partial(step, number))
            for n in CLIENTS:
                name = f"throughput, {n} client{'s' if n > 1 else ''}"
                yield from in_turns(sides, name, number, partial(throughput, n, number))
        yield from talks.after_restart()
    finally:
        for side in sides:
            with suppress(ServerEndedError):
                side.process.stop()


def servers(folder: Path, model: Path, before: Path, python: Path) -> list[ServerProcess]:
    """The three servers, not started."""
    names = ("--served-model-name", "default_model")
    ours = [semantic_server(model, folder / name, *names, name=name) for name in (BEFORE, NOW)]
    ours[0].environment = {**ours[0].environment, "PYTHONPATH": str(before.resolve())}
    return [*ours, mlx_lm_server(model, folder / THEIRS, python)]


def step(number: int, side: Side) -> Row:
    """Milliseconds between two tokens of a stream of its own, after a prompt of the same length."""
    text = words(PROMPT_WORDS, f"step {number}")
    answer = side.client.ask([{"role": "user", "content": text}], STREAM)
    return {"step_ms": 1e3 * statistics.median(answer.gaps())}


def throughput(n: int, number: int, side: Side) -> Row:
    """Tokens of answers per second, of `n` clients with equal, short requests."""
    answers: list[Answer] = []
    failed: list[RequestFailedError] = []

    def talk(client: int) -> None:
        for request in range(REQUESTS):
            text = words(SHORT_WORDS, f"short {number} {n} {client} {request}")
            try:
                answers.append(side.client.ask([{"role": "user", "content": text}], ANSWER))
            except RequestFailedError as error:
                failed.append(error)

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(n)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if failed:
        raise failed[0]
    tokens = sum(one.completion_tokens for one in answers)
    return {
        "clients": n,
        "tokens_per_second": tokens / seconds,
        "ttft_p50_ms": 1e3 * statistics.median(one.ttft for one in answers),
        "worst_gap_ms": 1e3 * max(gap for one in answers for gap in one.gaps()),
    }


def summarise(rows: Sequence[Row]) -> dict[str, Json]:
    """Medians a side: times to the first token with their decode steps, and throughput."""
    steps = {name: median(rows, "decode step", name, "step_ms") for name in NAMES}
    measures = list(dict.fromkeys(str(row["measure"]) for row in rows))
    many = [name for name in measures if name.startswith("throughput")]
    return {
        "first_token": [_first_token(rows, name, steps) for name in TTFT],
        "throughput": [_sides(rows, name, "tokens_per_second") for name in many],
        "ttft_p50_ms": [_sides(rows, name, "ttft_p50_ms") for name in many],
        "worst_gap_ms": [_sides(rows, name, "worst_gap_ms") for name in many],
        "step_ms": {name: _round(steps[name], 2) for name in NAMES},
        "failed": [
            {key: row[key] for key in ("measure", "side", "round", "failed")}
            for row in rows
            if "failed" in row
        ],
    }


def worst_change(rows: Sequence[Row]) -> float:
    """The largest factor by which this tree is worse than the other, medians of pairs."""
    worse: list[float] = []
    for measure in dict.fromkeys(str(row["measure"]) for row in rows):
        if measure in TTFT:
            worse.append(ratio(rows, measure, "ttft_ms", NOW, BEFORE))
        elif measure.startswith("throughput"):
            worse.append(ratio(rows, measure, "tokens_per_second", BEFORE, NOW))
    return round(max(worse, default=float("inf")), 3)


def ratio(rows: Sequence[Row], measure: str, field: str, over: str, under: str) -> float:
    """The median of one side over another, round by round."""
    above, below = (by_round(rows, measure, side, field) for side in (over, under))
    pairs = [above[i] / below[i] for i in above if below.get(i)]
    return statistics.median(pairs) if pairs else float("nan")


def by_round(rows: Sequence[Row], measure: str, side: str, field: str) -> dict[Scalar, float]:
    """One field of one side, by round; rounds that failed are left out."""
    return {
        row["round"]: float(str(row[field]))
        for row in rows
        if row["measure"] == measure and row["side"] == side and field in row
    }


def median(rows: Sequence[Row], measure: str, side: str, field: str) -> float:
    """The median of a field; NaN if no round has it."""
    found = list(by_round(rows, measure, side, field).values())
    return statistics.median(found) if found else float("nan")


def _first_token(rows: Sequence[Row], measure: str, steps: dict[str, float]) -> dict[str, Json]:
    line: dict[str, Json] = {"measure": measure}
    for name in NAMES:
        found = median(rows, measure, name, "ttft_ms")
        line[f"{name}_ms"] = _round(found, 1)
        line[f"{name}_steps"] = _round(found / steps[name], 1)
    line["now_over_before"] = _round(ratio(rows, measure, "ttft_ms", NOW, BEFORE), 2)
    return line


def _sides(rows: Sequence[Row], measure: str, field: str) -> dict[str, Json]:
    line: dict[str, Json] = {"measure": measure.removeprefix("throughput, ")}
    for name in NAMES:
        line[name] = _round(median(rows, measure, name, field), 1)
    line["now_over_before"] = _round(ratio(rows, measure, field, NOW, BEFORE), 2)
    line["now_over_mlx_lm"] = _round(ratio(rows, measure, field, NOW, THEIRS), 2)
    return line


def _round(number: float, digits: int) -> Json:
    return "failed" if number != number else round(number, digits)  # noqa: PLR0124 - NaN


def main() -> int:
    """Measure; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="src of the other tree")
    parser.add_argument("--python", type=Path, help="of an environment that has mlx-lm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    result = run(options.before, options.python or Path(sys.executable), options.rounds)
    options.output.mkdir(parents=True, exist_ok=True)
    result.write(options.output / "server_before_after.json")
    print(json.dumps(result.summary, indent=2, ensure_ascii=False))
    return int(not result.verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
