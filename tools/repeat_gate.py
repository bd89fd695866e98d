"""Runs `.ci/run` on fresh clones of this commit and keeps what each run found.

    python -m tools.repeat_gate [ROUNDS] [--busy]

With `--busy` beside two busy loops for each core. Rows are added to
`benchmarks/results/gate_runs.json`; a commit that only adds them is another tree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Final, TypedDict

from tools.flaky import busy
from tools.gate import ROOT

RESULT: Final = ROOT / "benchmarks" / "results" / "gate_runs.json"


class Row(TypedDict):
    """A run of the gate."""

    tree: str
    cores: int | None
    busy: bool
    green: bool
    seconds: int
    lanes: dict[str, int]
    passed: int
    flaked: list[str]
    failed: list[str]


def row(clone: Path, *, is_busy: bool) -> Row:
    """Run the gate of a fresh clone and read what it wrote."""
    began = time.monotonic()
    with busy() if is_busy else nullcontext():
        done = subprocess.run(["bash", ".ci/run"], cwd=clone, stdin=subprocess.DEVNULL, check=False)
    path = clone / "build" / "gate.json"
    found = json.loads(path.read_text()) if path.exists() else {"lanes": {}, "flaked": {}}
    lanes = found["lanes"]
    return Row(
        tree=_git(clone, "rev-parse", "HEAD^{tree}"),
        cores=os.cpu_count(),
        busy=is_busy,
        green=done.returncode == 0,
        seconds=round(time.monotonic() - began),
        lanes={name: round(lane["seconds"]) for name, lane in lanes.items()},
        passed=sum(lane["passed"] for lane in lanes.values()),
        flaked=list(found["flaked"]),
        failed=[test for lane in lanes.values() for test in lane["failed"]],
    )


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rounds", type=int, nargs="?", default=1)
    parser.add_argument("--busy", action="store_true", help="beside two busy loops for each core")
    options = parser.parse_args()
    rows: list[Row] = json.loads(RESULT.read_text()) if RESULT.exists() else []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            clone = Path(folder) / "clone"
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
            rows.append(row(clone, is_busy=options.busy))
        RESULT.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(rows[-1], indent=1), flush=True)
    sys.exit(not all(one["green"] for one in rows[-options.rounds :]))


if __name__ == "__main__":
    main()
