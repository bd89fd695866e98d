"""Which tests with processes fail beside other work: the process lane, again and again.

    python -m tools.flaky [ROUNDS] [PYTEST ARGUMENTS]

Two busy loops for each core take time from every test. A test that fails here has a fault:
the gate's second run is for what is left.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tools.gate import ROOT, lane, run

_LOOPS: Final = 2
"""Busy loops for each core."""


@contextmanager
def busy(loops: int = _LOOPS * (os.cpu_count() or 1)) -> Iterator[None]:
    """Other work for the cores, while the block runs."""
    command = (sys.executable, "-c", "while True: pass")
    started = [subprocess.Popen(command) for _ in range(loops)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def table(failures: Counter[str], rounds: int) -> list[str]:
    """A line for each test that failed, the worst first."""
    rows = [f"{rounds:>5} {n:>9}  {test}" for test, n in failures.most_common()]
    return [f"{'runs':>5} {'failures':>9}  test", *rows]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    options, arguments = parser.parse_known_args()
    failures: Counter[str] = Counter()
    with busy():
        for _ in range(options.rounds):
            found = run((*lane("process", ROOT), *arguments), ROOT)
            failures.update(list(found.failed))
    print("\n".join(table(failures, options.rounds)))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
