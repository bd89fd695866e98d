"""Runs the tests that compare figures with several BLAS kernels and thread counts.

A tolerance must hold whatever order sums are made in. Prints a table, and with `--record` adds the
cells that were run to `benchmarks/results/blas_matrix.json`. Fails if a test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results" / "blas_matrix.json"
KERNELS: Final = ("Haswell", "Zen", "Sandybridge", "Prescott", "none")
"""Names of OpenBLAS kernels; "none" is MLX's own BLAS, without OpenBLAS."""
THREADS: Final = (1, 2, 4)
TESTS: Final = (
    "tests/integration/test_rounding.py",
    "tests/integration/test_prompt_logprobs.py",
    "tests/integration/test_sampling.py",
    "tests/integration/test_penalties.py",
    "tests/integration/test_other_caches.py",
    "tests/integration/test_openai_wire.py",
    "tests/integration/test_exactness.py",
    "tests/integration/test_exactness_machine.py",
    "tests/integration/test_padded_batch.py",
    "tests/integration/test_paged_batch.py",
    "tests/integration/test_durable.py",
    "tests/contract/test_batch_backend.py",
)

_COUNT = re.compile(r"(\d+) (passed|failed|error)")


@dataclass(frozen=True, slots=True)
class Cell:
    """What became of the tests with one kernel and one number of threads."""

    kernel: str
    threads: int
    tests: tuple[str, ...]
    passed: int
    failed: int
    failures: tuple[str, ...]
    cpu_seconds: float


def environment(kernel: str, threads: int) -> dict[str, str]:
    """The variables that choose the kernel and the threads."""
    chosen = {"OPENBLAS_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT / "src")}
    if kernel == "none":
        return os.environ | chosen | {"SEMANTIC_TEST_BLAS": "none"}
    return os.environ | chosen | {"OPENBLAS_CORETYPE": kernel}


def run(kernel: str, threads: int, tests: Sequence[str], flags: Sequence[str]) -> Cell:
    """Run the tests in a process of their own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *tests, *flags],
        cwd=ROOT,
        env=environment(kernel, threads),
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    counts = {kind: int(n) for n, kind in _COUNT.findall(done.stdout)}
    if done.returncode and not (counts.get("failed") or counts.get("error")):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cell(
        kernel=kernel,
        threads=threads,
        tests=tuple(Path(test).name for test in tests),
        passed=counts.get("passed", 0),
        failed=counts.get("failed", 0) + counts.get("error", 0),
        failures=tuple(failures),
        cpu_seconds=round(cpu, 1),
    )


def record(cells: Sequence[Cell]) -> None:
    """Add the cells to the file of results; a cell that was run before is replaced."""
    known: list[dict[str, object]] = []
    if RESULTS.exists():
        known = cast("list[dict[str, object]]", json.loads(RESULTS.read_text())["cells"])
    place = {(one["kernel"], one["threads"]): one for one in known}
    place |= {(cell.kernel, cell.threads): asdict(cell) for cell in cells}
    RESULTS.write_text(json.dumps({"cells": list(place.values())}, indent=1) + "\n")


def main() -> None:
    """Run every chosen cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS)
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--record", action="store_true", help="add the cells to the results")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="flags for pytest")
    given = parser.parse_args()
    cells: list[Cell] = []
    print(f"{'kernel':12} {'threads':>7} {'passed':>7} {'failed':>7} {'CPU s':>8}")
    for kernel in given.kernels:
        # The BLAS that MLX brings has one thread.
        for threads in given.threads[:1] if kernel == "none" else given.threads:
            cell = run(kernel, threads, given.tests, given.flags)
            cells.append(cell)
            print(
                f"{kernel:12} {threads:7} {cell.passed:7} {cell.failed:7} {cell.cpu_seconds:8.1f}",
                *cell.failures,
                sep="\n  ",
                flush=True,
            )
            if given.record:
                record(cells)
    raise SystemExit(any(cell.failed for cell in cells))


if __name__ == "__main__":
    main()
