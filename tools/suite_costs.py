"""What the tests cost: CPU seconds of each, with the processes that it starts.

    python -m tools.suite_costs [--record] [PYTEST ARGUMENTS]

Wall-clock time depends on what else runs; these figures hardly do. Prints the most expensive files
and tests; `--record` writes the table of files to `benchmarks/results/test_durations.json`.
This module is also the pytest plugin that measures.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
RESULT: Final = ROOT / "benchmarks" / "results" / "test_durations.json"
_LINES: Final = "SEMANTIC_TEST_COSTS"
"""The environment variable that names the file to which the plugin appends."""
_MOST: Final = 10


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Append the CPU seconds of one test, its fixtures included, to the file of lines."""
    before = _cpu_seconds()
    result = yield
    with Path(os.environ[_LINES]).open("a") as file:
        file.write(json.dumps([item.nodeid, round(_cpu_seconds() - before, 3)]) + "\n")
    return result


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(arguments: list[str]) -> dict[str, float]:
    """CPU seconds by test id. Raises SystemExit if pytest was interrupted or not understood."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        lines.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.suite_costs", *arguments]
        ended = subprocess.run(
            command, cwd=ROOT, env={**os.environ, _LINES: str(lines)}, check=False
        )
        if ended.returncode > 1:
            sys.exit(ended.returncode)
        return dict(map(json.loads, lines.read_text().splitlines()))


def by_file(costs: Mapping[str, float]) -> list[tuple[str, int, float]]:
    """Files, how many tests each has and their CPU seconds, the most expensive first."""
    files: dict[str, list[float]] = {}
    for test, seconds in costs.items():
        files.setdefault(test.partition("::")[0], []).append(seconds)
    found = [(file, len(seconds), sum(seconds)) for file, seconds in files.items()]
    return sorted(found, key=lambda one: -one[2])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write the result file")
    options, arguments = parser.parse_known_args()
    costs = measure(arguments or ["--numprocesses", "auto", "--dist", "worksteal"])
    total = sum(costs.values())
    files = by_file(costs)
    print(f"{len(costs)} tests, {total:.0f} CPU seconds")
    for file, tests, seconds in files[: 4 * _MOST]:
        print(f"{seconds:8.1f} {seconds / total:6.1%} {tests:5} {file}")
    for test, seconds in sorted(costs.items(), key=lambda one: -one[1])[: 8 * _MOST]:
        print(f"{seconds:8.1f} {test}")
    if options.record:
        groups = [
            {"group": file, "tests": tests, "share": round(seconds / total, 3)}
            for file, tests, seconds in files[:_MOST]
        ]
        result = {
            "measured": "CPU seconds of each test of `make test`, its processes included, by "
            "`python -m tools.suite_costs --record`",
            "tests": len(costs),
            "seconds": round(total),
            "slowest_groups": groups,
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
