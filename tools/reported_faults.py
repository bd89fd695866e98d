"""Tries reported faults on this tree, or on another program, and keeps what each script found.

    python -m tools.reported_faults FOLDER NAME [COMMAND]

FOLDER has a script for each fault, which starts its own server and exits with 1 while the fault
is there, with 0 when it is gone. COMMAND is the program to try instead of this tree's. The outcome
is kept under NAME in `benchmarks/results/reported_faults.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
RESULT: Final = ROOT / "benchmarks" / "results" / "reported_faults.json"
_WORDS: Final = {0: "gone", 1: "there"}


def outcome(script: Path, command: str | None) -> str:
    """What a script finds: "gone", "there", or "not tried"."""
    given = {"PYTHONPATH": str(ROOT / "src")} if command is None else {"SEMANTIC": command}
    command_line = (sys.executable, str(script))
    ran = subprocess.run(command_line, env=os.environ | given, check=False)
    return _WORDS.get(ran.returncode, "not tried")


def main() -> None:
    """Entry point."""
    folder, name, *rest = sys.argv[1:]
    scripts = sorted(Path(folder).glob("*.py"))
    found = {script.stem: outcome(script, next(iter(rest), None)) for script in scripts}
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    known[name] = {"faults": len(found), "gone": list(found.values()).count("gone"), "found": found}
    RESULT.write_text(json.dumps(known, indent=1) + "\n")
    print(json.dumps(known[name], indent=1))


if __name__ == "__main__":
    main()
