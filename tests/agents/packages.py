"""Programs from npm, each by name and version, in a folder that git does not see."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.agents.agents import Program
from tests.support.npm import NotFetchedError, install

FOLDER: Final = Path(__file__).parents[2] / ".agents"
_STAMP: Final = ".version"
_ANSWER_SECONDS: Final = 60


def program_of(agent: Program) -> Path:
    """The agent's program, fetched first where it is not there yet. Raises NotFetchedError."""
    folder = FOLDER / agent.name
    stamp = folder / _STAMP
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != agent.version:
        shutil.rmtree(folder, ignore_errors=True)
        install((f"{agent.package}@{agent.version}",), folder)
    for program in _candidates(agent, folder):
        if agent.version in _version(program):
            stamp.write_text(agent.version, encoding="utf-8")
            return program
    raise NotFetchedError(f"{agent.package}@{agent.version} has no program for this machine")


def _candidates(agent: Program, folder: Path) -> Iterator[Path]:
    """Programs that npm brought, those for any machine last."""
    found = [path for pattern in agent.binaries for path in (folder / "node_modules").glob(pattern)]
    return iter(sorted(found, key=lambda path: ("baseline" in str(path), str(path))))


def _version(program: Path) -> str:
    """What it says of itself; nothing when it cannot run here."""
    try:
        done = subprocess.run(
            (program, "--version"),
            capture_output=True,
            text=True,
            check=False,
            timeout=_ANSWER_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
