"""Environments for clients: one for each, made anew only when its pins changed."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.clients.clients import HERE, RUNNER, Client
from tests.support.npm import NotFetchedError, install

FOLDER: Final = HERE.parents[1] / ".clients"
_STAMP: Final = ".pins"


class EnvironmentFailedError(Exception):
    """An environment could not be made; the text is what uv said."""


def python_of(client: Client) -> Path:
    """The interpreter of the client's environment, made first where it is not there yet.

    Raises EnvironmentFailedError.
    """
    folder = FOLDER / client.name
    python, stamp = folder / "bin" / "python", folder / _STAMP
    wanted = _digest(client)
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _uv("venv", "--quiet", "--python", sys.executable, str(folder))
    _uv("pip", "install", "--quiet", "--python", str(python), "-r", str(client.pins))
    if client.npm:
        _fetch(client)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def packages_of(client: Client) -> Path:
    """The folder with the client's packages from npm."""
    return FOLDER / client.name / "npm"


def _fetch(client: Client) -> None:
    try:
        install(client.npm, packages_of(client))
    except NotFetchedError as error:
        raise EnvironmentFailedError(str(error)) from error


def pin(client: Client) -> None:
    """Write the client's pins anew. Raises EnvironmentFailedError."""
    client.pins.parent.mkdir(exist_ok=True)
    _uv(
        *("pip", "compile", "--quiet", "--universal", "--python-version", "3.11"),
        *("--fork-strategy", "fewest", "--no-annotate", "--no-header"),
        *("-", "--upgrade", "--output-file", str(client.pins)),
        stdin="\n".join((*client.needs, RUNNER)),
    )


def _digest(client: Client) -> str:
    packages = " ".join(client.npm).encode()
    return hashlib.sha256(sys.version.encode() + client.pins.read_bytes() + packages).hexdigest()


def _uv(*arguments: str, stdin: str = "") -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise EnvironmentFailedError("uv was not found; `make setup` installs it")
    done = subprocess.run(
        (uv, *arguments), input=stdin, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EnvironmentFailedError(done.stderr.strip())
