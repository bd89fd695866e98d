"""Calls a test's function in a fresh interpreter: nothing else takes memory or has threads there.

python -m tests.support.own_process MODULE:FUNCTION ARGUMENT...
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_STUCK_S = 600.0
"""Seconds after which the process is taken for stuck."""


def environment() -> dict[str, str]:
    """This process's, in which another one imports the package and the tests."""
    return {**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}"}


def in_own_process(function: str, *arguments: object) -> None:
    """Call `function`, given as "module:function", with `arguments` as texts.

    Fails with all that the process printed, its traceback included, unless the function returns.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.own_process", function, *map(str, arguments)],
        cwd=_ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=_STUCK_S,
        check=False,
    )
    assert done.returncode == 0, f"{function} failed:\n{done.stdout}\n{done.stderr}"


if __name__ == "__main__":
    import_module("tests.conftest")  # sets up libraries as for any test
    module, _, name = sys.argv[1].partition(":")
    getattr(import_module(module), name)(*sys.argv[2:])
