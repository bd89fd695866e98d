"""Runs the tests that compare figures with several BLAS kernels and thread counts.

A tolerance must hold whatever order sums are made in. A cell, which is one kernel and one number of
threads, runs `SAMPLE`: the bound for rounding itself, log-probabilities, and of every other kind of
comparison (exact answers, agents on disk, caches in pages, padded batches, contracts of backends)
one or a few models. That is about a minute of CPU time. `--whole` runs all tests of these files,
many times as long, as continuous integration does each night.

Prints a table, and with `--record` adds the cells that were run to
`benchmarks/results/blas_matrix.json`. Fails if a test fails.
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
WHOLE: Final = (
    "tests/integration/test_rounding.py",
    "tests/integration/test_prompt_logprobs.py",
    "tests/integration/test_sampling.py",
    "tests/integration/test_penalties.py",
    "tests/integration/test_other_caches.py",
    "tests/integration/test_openai_wire.py",
    "tests/integration/test_reference.py",
    "tests/integration/test_exactness.py",
    "tests/integration/test_exactness_machine.py",
    "tests/integration/test_padded_batch.py",
    "tests/integration/test_paged_batch.py",
    "tests/integration/test_durable.py",
    "tests/contract/test_batch_backend.py",
)
_EXACT: Final = "tests/integration/test_exactness.py::"
_DURABLE: Final = "tests/integration/test_durable.py::"
_CONTRACT: Final = "tests/contract/test_batch_backend.py::"
SAMPLE: Final = (
    "tests/integration/test_rounding.py",
    "tests/integration/test_prompt_logprobs.py::test_the_figures_are_bit_equal_however_they_are_computed[gemma3]",
    *(
        f"tests/integration/test_prompt_logprobs.py::test_the_figures_are_those_of_mlx_lm[{n}-{name}]"
        for n in (1, 129, 400)
        for name in ("llama", "gemma3", "qwen3", "gpt_oss")
    ),
    "tests/integration/test_sampling.py::test_log_probabilities_are_those_of_mlx_lm",
    "tests/integration/test_sampling.py::test_penalty_and_bias_are_those_of_mlx_lm",
    "tests/integration/test_penalties.py",
    "tests/integration/test_other_caches.py",
    *(
        f"{_EXACT}test_a_batch_of_eight_from_1_to_3000_tokens[{name}]"
        for name in ("qwen2", "gemma3", "gpt_oss", "moe", "quantized")
    ),
    f"{_EXACT}test_requests_preempted_for_want_of_blocks_go_on_with_the_same_tokens[llama]",
    f"{_EXACT}test_another_agent_may_begin_with_a_cache_that_stays_where_it_is[gemma3 in pages]",
    "tests/integration/test_exactness_machine.py::test_every_answer_is_that_of_mlx_lm_alone[gemma3]",
    "tests/integration/test_padded_batch.py::test_joining_and_leaving_at_random_steps[llama]",
    "tests/integration/test_paged_batch.py::test_after_a_warm_up_nothing_is_open_and_answers_are_the_same",
    *(
        f"{_DURABLE}test_agents_of_all_lengths_go_on_after_a_restart[{name}]"
        for name in ("qwen3", "stablelm", "falcon_h1", "gemma3 narrow")
    ),
    f"{_DURABLE}test_a_turn_after_a_restart_leaves_the_bytes_of_one_without[lfm2]",
    f"{_DURABLE}test_what_one_form_of_caches_saved_another_goes_on_with[windows]",
    *(
        f"{_CONTRACT}test_a_loaded_sequence_goes_on_and_is_saved_as_the_same_bytes[mlx {name}]"
        for name in ("llama bf16", "gpt_oss", "lfm2", "falcon_h1")
    ),
    f"{_CONTRACT}test_chunks_of_any_size_give_the_same_answer[mlx gemma3-64]",
    f"{_CONTRACT}test_prompts_computed_in_one_pass_answer_as_alone[mlx gemma3 in pages-(5, 30, 2)]",
    f"{_CONTRACT}test_scores_are_the_same_bits_each_time[mlx llama]",
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
        tests=tuple(test.removeprefix("tests/") for test in tests),
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
    parser.add_argument("--tests", nargs="+", default=SAMPLE, help="instead of the sample")
    parser.add_argument("--whole", action="store_true", help="all tests that compare figures")
    parser.add_argument("--record", action="store_true", help="add the cells to the results")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="flags for pytest")
    given = parser.parse_args()
    tests = WHOLE if given.whole else given.tests
    cells: list[Cell] = []
    print(f"{'kernel':12} {'threads':>7} {'passed':>7} {'failed':>7} {'CPU s':>8}")
    for kernel in given.kernels:
        # The BLAS that MLX brings has one thread.
        for threads in given.threads[:1] if kernel == "none" else given.threads:
            cell = run(kernel, threads, tests, given.flags)
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
