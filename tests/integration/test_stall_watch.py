"""The watch tells where a thread stood still."""

from __future__ import annotations

import subprocess
import sys

import pytest

from experiments.harness.environment import ROOT

SCRIPT = """
import threading, time
from benchmarks import stall_watch
idle = threading.Event()
threading.Thread(target=idle.wait, name="waits for work", daemon=True).start()
stall_watch.begin(0.3)
time.sleep(1.0)
while threading.active_count():
    time.sleep(0.01)
"""


@pytest.mark.process
def test_a_thread_that_stands_still_is_named_and_one_that_waits_for_work_is_not() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    process.kill()
    process.communicate()
    assert line.startswith("stall: ")
    assert "MainThread: <string>:7" in line
