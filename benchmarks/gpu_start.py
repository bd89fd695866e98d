"""`python -m benchmarks.gpu_start`: from the start of a server's process to ready, on a GPU.

Our server and mlx_lm.server, on models of each shape with random bf16 weights: the first start with
an empty folder of compiled kernels, and later ones. Prints a line for each start and writes JSON.
`--small` serves a small model on any device.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu_server import (
    OURS,
    POOL_GB,
    SHAPES,
    SMALL_POOL_GB,
    THEIRS,
    server_of,
    write_large_model,
)
from benchmarks.server_measures import MODEL_NAME
from benchmarks.server_model import write_model
from benchmarks.start import measure
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict

QUESTION = "How long does a server on a GPU take to start, the first time and later?"
CRITERION = "ready within 20 s of the start of the process, also with no kernel compiled before"
MOST_READY_S = 20.0
STARTS = 2
KERNELS = "MLX_PTX_CACHE_DIR"
"""MLX's folder of compiled kernels."""


def judge(samples: Sequence[dict[str, Scalar]]) -> Verdict:
    """The criterion of our server's starts."""
    ready = [float(str(one["ready_s"])) for one in samples if one["server"] == OURS]
    worst = max(ready, default=float("inf"))
    return Verdict(CRITERION, MOST_READY_S, worst, passed=worst <= MOST_READY_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when the criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="only these")
    parser.add_argument("--small", action="store_true", help="a small model")
    parser.add_argument("--side", choices=[OURS, THEIRS], help="only this one")
    parser.add_argument("--folder", type=Path, help="for the model and the store")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args(arguments)
    with TemporaryDirectory(dir=given.folder) as folder:
        return run(given, Path(folder))


def run(given: argparse.Namespace, folder: Path) -> int:
    """All starts, one after the other."""
    chosen = ["small"] if given.small else given.shape or list(SHAPES)
    started = Run.start(
        "gpu_start", QUESTION, model=", ".join(chosen), parameters={"starts": STARTS}, seed=0
    )
    given.output.mkdir(parents=True, exist_ok=True)
    samples: list[dict[str, Scalar]] = []
    for shape in chosen:
        with TemporaryDirectory(dir=folder) as below:
            write(shape, Path(below) / "model")
            sides = [given.side] if given.side else [OURS, THEIRS]
            pool_gb = SMALL_POOL_GB if given.small else POOL_GB
            for line in starts(Path(below), sides, pool_gb):
                samples.append({"shape": shape, **line})
                print(json.dumps(samples[-1]), flush=True)
                summary: dict[str, Json] = {"starts": [dict(one) for one in samples]}
                result = started.finish(samples, summary, judge(samples))
                result.write(given.output / "gpu_start.json")
    verdict = judge(samples)
    print(f"{'passed' if verdict.passed else 'MISSED'}: {verdict.observed} s")
    return int(not verdict.passed)


def write(shape: str, folder: Path) -> None:
    """A model of the shape."""
    if shape == "small":
        write_model(folder)
        return
    _, build, layers = SHAPES[shape]
    write_large_model(folder, functools.partial(build, layers))


def starts(folder: Path, sides: Sequence[str], pool_gb: int) -> Iterator[dict[str, Scalar]]:
    """A line for each start of each side's server of the model in `folder`."""
    for name in sides:
        kernels = folder / f"kernels of {name}"
        kernels.mkdir()
        for number in range(STARTS):
            server = server_of(folder, name, pool_gb)
            server.environment = {**server.environment, KERNELS: os.fspath(kernels)}
            model = MODEL_NAME if name == OURS else "default_model"
            yield {"server": name, "start": number, **measure(server, model)}


if __name__ == "__main__":
    raise SystemExit(main())
