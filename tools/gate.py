"""The gate: the tests in lanes, one after the other, and at the end one line that counts them.

    python -m tools.gate [--page] [PYTEST ARGUMENTS]

Deterministic tests run once. A test of the process lane that failed by what may be chance
(`may_pass_again`) runs once more, alone, and is named as flaked if it passes then. More than two
flaked tests fail the gate. `build/gate.json` has all figures, `build/flaked.json` those tests.
This module is also the pytest plugin that tells the runner what happened.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
BUILD: Final = ROOT / "build"
MOST_FLAKED: Final = 2
"""Tests that may pass in their second run only; with more the machine or the change is at fault."""
PARALLEL: Final = ("--numprocesses", "auto", "--maxprocesses", "4", "--dist", "worksteal")
_WAITING: Final = ("--numprocesses", str(min(4, (os.cpu_count() or 1) + 1)), "--dist", "loadfile")
"""For tests that wait for processes: one worker more than cores, and servers shared by a file."""
LANES: Final = {
    "deterministic": (*PARALLEL, "-m", "not process"),
    "process": (*_WAITING, "-m", "process"),
    "page": ("tests/page",),
}
"""Arguments of pytest by lane."""
LATE: Final = (
    ChildProcessError,
    ConnectionError,
    EOFError,
    ProcessLookupError,
    TimeoutError,
    http.client.HTTPException,
    subprocess.TimeoutExpired,
)
"""Errors of what did not come in time, or is gone."""
_LATE_ELSEWHERE: Final = frozenset({"APIConnectionError", "TransportError"})
"""The same of the clients' libraries: the names of their base classes."""
_OUTCOMES: Final = "SEMANTIC_TEST_OUTCOMES"
"""The environment variable that names the file to which the plugin writes."""
_AGAIN: Final = "may pass again"
_NO_TESTS: Final = 5


@dataclass
class Outcomes:
    """What a run of pytest found. `failed` has texts by test, `again` those chance may explain."""

    seconds: float = 0.0
    passed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    again: list[str] = field(default_factory=list)
    code: int = 0
    """How pytest ended; 0 also where `failed` says it all."""

    @property
    def is_green(self) -> bool:
        """Whether pytest ended in order and nothing failed."""
        return not self.failed and self.code in {0, _NO_TESTS}


# The plugin


def pytest_configure(config: pytest.Config) -> None:
    """Collect outcomes in the process that starts the others."""
    if _OUTCOMES in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(os.environ[_OUTCOMES])))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Mark the report of a failure that may be chance."""
    report = yield
    if report.failed and call.excinfo and may_pass_again(item, call.excinfo.value):
        report.user_properties.append((_AGAIN, True))
    return report


class Recorder:
    """Writes the outcomes of a session to a file when it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = Outcomes()
        self._passed: set[str] = set()
        self._again: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a report of one phase of a test."""
        if report.failed:
            text = f"{report.when}: {report.longreprtext}"
            earlier = self._found.failed.get(report.nodeid, "")
            self._found.failed[report.nodeid] = earlier + text
            again = (_AGAIN, True) in map(tuple, report.user_properties)
            self._again[report.nodeid] = self._again.get(report.nodeid, True) and again
        elif report.skipped:
            self._skip(report)
        elif report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Take a module that cannot be imported as a failed test, and one that is skipped."""
        if report.failed:
            self._found.failed[report.nodeid] = report.longreprtext
        elif report.skipped:
            self._skip(report)

    def pytest_sessionfinish(self) -> None:
        """Write what was found."""
        self._found.again = [test for test, again in self._again.items() if again]
        self._found.passed = len(self._passed - self._found.failed.keys())
        self._path.write_text(json.dumps(asdict(self._found)))

    def _skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        found = report.longrepr
        text = found[2] if isinstance(found, tuple) else str(found)
        why = text.removeprefix("Skipped: ")
        self._found.skipped[why] = self._found.skipped.get(why, 0) + 1


def may_pass_again(item: pytest.Item, error: BaseException) -> bool:
    """Whether a failure deserves a second run: in the process lane, if something was late.

    A test that is not `exact` may have met any other failure by chance, too. An exact one compares
    answers, stores or tenants, and one wrong answer of a hundred is a failure.
    """
    if item.get_closest_marker("process") is None:
        return False
    return is_late(error) or item.get_closest_marker("exact") is None


def is_late(error: BaseException) -> bool:
    """Whether all that an error says is that something did not come in time, or is gone."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_late, error.exceptions))
    if isinstance(error, FileNotFoundError):
        return str(error.filename).startswith("/proc/")
    names = {base.__name__ for base in type(error).__mro__}
    return isinstance(error, LATE) or bool(names & _LATE_ELSEWHERE)


# The runner


def lane(name: str, root: Path) -> list[str]:
    """The arguments of pytest for a lane; the process lane imports only files with the marker."""
    if name != "process":
        return list(LANES[name])
    files = sorted((root / "tests").rglob("test_*.py"))
    left = [root / "tests" / folder for folder in ("fleet", "page", "real")]
    marked = [
        path.relative_to(root).as_posix()
        for path in files
        if "mark.process" in path.read_text(encoding="utf-8")
        if not any(path.is_relative_to(folder) for folder in left)
    ]
    return [*LANES[name], *marked]


def run(arguments: Iterable[str], root: Path) -> Outcomes:
    """Run pytest once in the folder `root`. Its output goes where ours goes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes"
        began = time.monotonic()
        command = (sys.executable, "-m", "pytest", "-p", "tools.gate", "-r", "fE", *arguments)
        ours = {_OUTCOMES: str(path), "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, cwd=root, env=os.environ | ours, check=False)
        found = json.loads(path.read_text()) if path.exists() else {}
        outcomes = Outcomes(**found)
        outcomes.code = 0 if outcomes.failed and ended.returncode == 1 else ended.returncode
        outcomes.seconds = time.monotonic() - began
        return outcomes


def passed_again(found: Outcomes, root: Path) -> dict[str, str]:
    """Run what chance may have failed once more, and return the texts of those that pass now.

    They are no longer among the failed. Nothing runs again where more than `MOST_FLAKED` failed.
    """
    if not found.again or len(found.failed) > MOST_FLAKED:
        return {}
    print(f"\n{len(found.again)} of the failed once more, alone:", flush=True)
    second = run(found.again, root)
    if second.code or second.skipped:  # not all ran
        return {}
    flaked = {test: found.failed[test] for test in found.again if test not in second.failed}
    for test in flaked:
        del found.failed[test]
    found.passed += second.passed
    return flaked


@dataclass
class Gate:
    """All lanes of a run, and what flaked in them."""

    root: Path = ROOT
    lanes: dict[str, Outcomes] = field(default_factory=dict)
    flaked: dict[str, str] = field(default_factory=dict)

    def run(self, names: Sequence[str], arguments: Sequence[str]) -> None:
        """Run these lanes. The second runs come at the end, when nothing else computes."""
        for name in names:
            print(f"\n{name} tests:", flush=True)
            self.lanes[name] = run((*lane(name, self.root), *arguments), self.root)
        for found in self.lanes.values():
            self.flaked |= passed_again(found, self.root)

    @property
    def is_green(self) -> bool:
        """Whether the change may land."""
        lanes = self.lanes.values()
        return all(found.is_green for found in lanes) and len(self.flaked) <= MOST_FLAKED

    @property
    def skipped(self) -> Counter[str]:
        """How many tests were skipped for each reason."""
        return sum((Counter(found.skipped) for found in self.lanes.values()), Counter())

    def write(self, folder: Path) -> None:
        """Write `gate.json` and `flaked.json`."""
        folder.mkdir(exist_ok=True)
        lanes = {name: asdict(found) for name, found in self.lanes.items()}
        figures = {"green": self.is_green, "flaked": self.flaked, "lanes": lanes}
        (folder / "gate.json").write_text(json.dumps(figures, indent=1) + "\n")
        (folder / "flaked.json").write_text(json.dumps(self.flaked, indent=1) + "\n")

    def lines(self) -> list[str]:
        """A report; the last line counts."""
        lanes = self.lanes.values()
        failed = [test for found in lanes for test in found.failed]
        passed = sum(found.passed for found in lanes)
        return [
            "",
            *(f"skipped: {n}: {why}" for why, n in sorted(self.skipped.items())),
            *(f"flaked: {test}\n{text}" for test, text in self.flaked.items()),
            *(f"failed: {test}" for test in failed),
            *(
                f"failed: pytest ended with {found.code} in the {name} lane"
                for name, found in self.lanes.items()
                if not found.failed and not found.is_green
            ),
            *(f"{name} tests: {found.seconds:.0f} s" for name, found in self.lanes.items()),
            f"flaked: {len(self.flaked)} (at most {MOST_FLAKED})",
            f"{passed} passed, {len(failed)} failed, {self.skipped.total()} skipped",
        ]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="the page in a browser, too")
    options, arguments = parser.parse_known_args()
    gate = Gate()
    gate.run(tuple(LANES)[: 3 if options.page else 2], arguments)
    gate.write(BUILD)
    print("\n".join(gate.lines()), flush=True)
    sys.exit(not gate.is_green)


if __name__ == "__main__":
    main()
