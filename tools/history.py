"""The history of this repository, for checks of what commits did."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(root: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails."""
    command = ("git", "-c", "safe.directory=*", *arguments)
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def is_whole(root: Path) -> bool:
    """Whether all commits are there: neither an archive nor a shallow clone."""
    return git(root, "rev-parse", "--is-shallow-repository") == "false\n"
