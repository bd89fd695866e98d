"""The fleet's secret: read from a file that the operator gives to every replica.

Tenants' tags and the keys of remote bodies are derived from it. It is never logged, and no message
has a part of it. Knows one file; not what the secret is for.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from semantic.domain.errors import InvalidRequestError
from semantic.domain.identity import digest

FEWEST_BYTES = 32
"""Of a secret, so that it cannot be guessed."""
_MOST_BYTES = 4096
_FEWEST_DIFFERENT = 8
_FOR_OTHERS = 0o037
"""Permissions that a file of a secret must not give: its group may read it, as groups of mounted
secrets do."""


def read_fleet_secret(path: Path) -> bytes:
    """32 bytes derived from the contents of `path`, without the end of its last line.

    Raises InvalidRequestError unless it is a file of this user's or root's that others cannot read
    nor their groups write, with 32 to 4096 bytes that are not all alike.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _require_private(path, os.fstat(fd))
            data = os.read(fd, _MOST_BYTES + 1).rstrip(b"\r\n")
        finally:
            os.close(fd)
    except OSError as error:
        raise InvalidRequestError(
            f"fleet_secret_file: cannot read {path}: {error.strerror}"
        ) from error
    if not FEWEST_BYTES <= len(data) <= _MOST_BYTES or len(set(data)) < _FEWEST_DIFFERENT:
        raise InvalidRequestError(
            f"fleet_secret_file: {path} is no secret: expected {FEWEST_BYTES} to {_MOST_BYTES} "
            "random bytes, as `openssl rand -hex 32` writes them"
        )
    return digest("fleet-secret-v1", data)


def _require_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise InvalidRequestError(f"fleet_secret_file: {path} is not a file")
    if found.st_uid not in (os.geteuid(), 0):
        raise InvalidRequestError(
            f"fleet_secret_file: {path} belongs to user {found.st_uid}; expected one of user "
            f"{os.geteuid()} or of root"
        )
    if found.st_mode & _FOR_OTHERS:
        raise InvalidRequestError(
            f"fleet_secret_file: {path} is open to others (mode {stat.S_IMODE(found.st_mode):04o});"
            " expected at most 0640"
        )
