"""The program's threads share malloc's arenas, so that what they free does not stay scattered."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from tests.cli.support import environment

_SCRIPT = """
import ctypes, sys, threading
from semantic.composition.framework import be_program, mlx_provider
if sys.argv[1] == "program":
    be_program()
mlx_provider()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
meet = threading.Barrier(16)
def allocate():
    meet.wait()
    for _ in range(1000):
        libc.malloc(ctypes.c_size_t(3000))
    meet.wait()
threads = [threading.Thread(target=allocate) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fdopen.restype = ctypes.c_void_p
out = libc.fdopen(1, b"w")
libc.malloc_info(0, ctypes.c_void_p(out))
libc.fflush(ctypes.c_void_p(out))
"""


@pytest.mark.process
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="needs glibc")
@pytest.mark.parametrize(("who", "most"), [("program", 2), ("library", 64)])
def test_threads_of_the_program_share_arenas(who: str, most: int) -> None:
    command = (sys.executable, "-c", _SCRIPT, who)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    n_arenas = done.stdout.count("<heap nr=")
    assert 1 <= n_arenas <= most
    assert who == "program" or n_arenas > 2, "threads share arenas by themselves: the test is blind"
