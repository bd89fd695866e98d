"""Programs from npm, each by name and version, in a folder that git does not see."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.agents.agents import Agent

FOLDER: Final = Path(__file__).parents[2] / ".agents"
_STAMP: Final = ".version"
_FETCH_SECONDS: Final = 900
_ANSWER_SECONDS: Final = 60


class NotFetchedError(Exception):
    """A program cannot be had on this machine; the text says why."""


def program_of(agent: Agent) -> Path:
    """The agent's program, fetched first where it is not there yet. Raises NotFetchedError."""
    folder = FOLDER / agent.name
    stamp = folder / _STAMP
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != agent.version:
        shutil.rmtree(folder, ignore_errors=True)
        _fetch(agent, folder)
    for program in _candidates(agent, folder):
        if agent.version in _version(program):
            stamp.write_text(agent.version, encoding="utf-8")
            return program
    raise NotFetchedError(f"{agent.package}@{agent.version} has no program for this machine")


def _fetch(agent: Agent, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NotFetchedError("npm was not found")
    folder.mkdir(parents=True)
    # Else npm looks for a package around it.
    (folder / "package.json").write_text(json.dumps({"private": True}), encoding="utf-8")
    command = (
        *(npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-save"),
        # Newer than this machine's Node would be another version, silently.
        f"{agent.package}@{agent.version}",
    )
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=_FETCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise NotFetchedError(f"npm did not end within {_FETCH_SECONDS} seconds") from None
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if "npm error" in line]
        raise NotFetchedError("; ".join(told[:2]) or f"npm ended with {done.returncode}")


def _candidates(agent: Agent, folder: Path) -> Iterator[Path]:
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
