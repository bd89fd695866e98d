"""The gate names tests that chance failed and passes no other failure: with planted faults."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tools.gate import Gate, is_late

pytestmark = pytest.mark.process

INI = """
[pytest]
addopts = -p no:cacheprovider -p xdist -p tests.support.leaks
markers =
    process:
    exact:
filterwarnings = error
"""

HEAD = """
import os, subprocess, sys, time
from pathlib import Path
import pytest

process = pytest.mark.process
exact = pytest.mark.exact

def first_time(name):
    path = Path(__file__).with_name(name)
    is_first = not path.exists()
    path.touch()
    return is_first
"""

LATE = """
@process
@exact
def test_late_once():
    if first_time("late"):
        raise TimeoutError("no answer in 60 s")
"""
RACE = """
@process
@exact
def test_a_vanished_process_once():
    if first_time("race"):
        os.readlink("/proc/0/fd/3")
"""
CLOCK = """
@process
def test_a_wall_clock():
    began = time.monotonic()
    time.sleep(0.2 if first_time("clock") else 0)
    assert time.monotonic() - began < 0.1
"""
ALWAYS = """
@process
def test_late_each_time():
    raise TimeoutError("never")
"""
WRONG = """
@process
@exact
def test_one_wrong_answer():
    assert not first_time("wrong"), "another token"
"""
FIRM = """
def test_deterministic():
    assert not first_time("firm")
"""
LEAK = """
@process
@exact
def test_drops_a_pipe():
    circle = []
    circle.append(circle)
    circle.append(subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE))
    circle[1].wait()
"""
LEAK_OF_A_FAILED = """
@process
def test_fails_and_drops_a_pipe():
    if first_time("leak"):
        pipe = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
        assert pipe.wait() != 0, "its own fault"
"""
SKIPPED = """
@pytest.mark.skipif(True, reason="needs a GPU")
@pytest.mark.parametrize("way", ["one", "two"])
def test_skipped(way):
    pass
"""
AFTER = """
@process
def test_that_collects_garbage():
    import gc
    gc.collect()
"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gate]:
    """The gate over a module of planted tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they are slow to import
    (tmp_path / "pytest.ini").write_text(INI)

    def run(*tests: str) -> Gate:
        (tmp_path / "test_planted.py").write_text(HEAD + "".join(tests))
        found = Gate(tmp_path)
        found.run(("deterministic", "process"), ["-n0"])
        return found

    return run


def names(tests: Iterable[str]) -> list[str]:
    return sorted(test.partition("::test_")[2] for test in tests)


def failed(found: Gate) -> list[str]:
    return names(test for lane in found.lanes.values() for test in lane.failed)


def test_what_chance_failed_is_run_again_and_named(
    gate: Callable[..., Gate], tmp_path: Path
) -> None:
    found = gate(LATE, RACE)
    assert found.is_green
    assert names(found.flaked) == ["a_vanished_process_once", "late_once"]
    found.write(tmp_path / "build")
    written = json.loads((tmp_path / "build" / "flaked.json").read_text())
    assert "no answer in 60 s" in written["test_planted.py::test_late_once"]
    assert "flaked: 2 (at most 2)" in found.lines()
    assert found.lines()[-1] == "2 passed, 0 failed, 0 skipped"


def test_other_failures_are_failures(gate: Callable[..., Gate]) -> None:
    exact_clock = CLOCK.replace("@process", "@process\n@exact")
    found = gate(WRONG, FIRM, LEAK, AFTER, exact_clock, SKIPPED)
    assert not found.is_green
    assert not found.flaked
    assert not found.lanes["process"].again
    assert failed(found) == ["a_wall_clock", "deterministic", "drops_a_pipe", "one_wrong_answer"]
    assert "failed: test_planted.py::test_drops_a_pipe" in found.lines()
    assert "skipped: 2: needs a GPU" in found.lines()
    assert found.lines()[-1] == "1 passed, 4 failed, 2 skipped"


def test_a_second_failure_is_one_and_a_failed_test_leaves_nothing_to_others(
    gate: Callable[..., Gate],
) -> None:
    found = gate(ALWAYS, LEAK_OF_A_FAILED, AFTER)
    assert not found.is_green
    assert failed(found) == ["late_each_time"]
    assert names(found.flaked) == ["fails_and_drops_a_pipe"]


def test_more_than_two_by_chance_are_too_many(gate: Callable[..., Gate]) -> None:
    found = gate(LATE, RACE, CLOCK)
    assert not found.is_green
    assert found.lines()[-1] == "0 passed, 3 failed, 0 skipped"


def test_a_module_that_cannot_be_imported_is_a_failure(gate: Callable[..., Gate]) -> None:
    assert not gate("import nothing_of_that_name").is_green


def test_an_error_is_late_if_all_its_parts_are() -> None:
    assert is_late(ExceptionGroup("both", [TimeoutError(), ConnectionResetError()]))
    assert not is_late(ExceptionGroup("one", [TimeoutError(), AssertionError()]))
    assert not is_late(FileNotFoundError(2, "gone", "settings.toml"))


@pytest.mark.parametrize("made", [gzip.compress(b"at this second")])
def test_the_bytes_of_a_test_are_not_in_its_name(
    request: pytest.FixtureRequest, made: bytes
) -> None:
    """The processes of a lane import its modules at different times, and compare the names."""
    assert made.startswith(b"\x1f\x8b")
    assert request.node.name.endswith("[made]")
