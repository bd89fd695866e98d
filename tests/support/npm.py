"""Packages from npm, by name and version, in a folder."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Final

_FETCH_SECONDS: Final = 900


class NotFetchedError(Exception):
    """Packages cannot be had on this machine; the text says why."""


def install(packages: tuple[str, ...], folder: Path) -> None:
    """Fetch `packages`, each `name@version`, into the new folder `folder`; runs none of their
    scripts. Raises NotFetchedError."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotFetchedError("npm was not found")
    folder.mkdir(parents=True)
    # Else npm looks for a package around it.
    (folder / "package.json").write_text(json.dumps({"private": True}), encoding="utf-8")
    # With a version each: newer than this machine's Node would be another version, silently.
    command = (
        npm,
        "install",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--no-save",
        *packages,
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
