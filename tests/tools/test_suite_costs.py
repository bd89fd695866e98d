"""What a test costs is measured with the processes that it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.suite_costs import by_file, measure

TESTS = """
import subprocess, sys, time

def busy():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass

def test_itself():
    busy()

def test_another_process():
    spin = "import time\\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)

def test_sleep():
    time.sleep(1.5)

def test_failure():
    assert False
"""


@pytest.mark.process
def test_cpu_seconds_of_each_test(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    found = measure(["-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(file)])
    costs = {test.partition("::")[2]: seconds for test, seconds in found.items()}
    assert costs.keys() == {"test_itself", "test_another_process", "test_sleep", "test_failure"}
    assert costs["test_itself"] >= 0.3
    assert costs["test_another_process"] >= 0.3
    assert costs["test_sleep"] < 1.5


def test_files_by_cost() -> None:
    costs = {"a.py::one": 1.0, "b.py::one": 4.0, "a.py::two[x::y]": 2.0}
    assert by_file(costs) == [("b.py", 1, 4.0), ("a.py", 2, 3.0)]
