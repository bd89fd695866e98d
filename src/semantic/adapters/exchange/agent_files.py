"""The two files of an exported agent: FILE.safetensors with the bodies, FILE.json beside it.

Opens, creates and names them; knows nothing of what they hold.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from semantic.domain.errors import InvalidRequestError

_SUFFIXES = (".safetensors", ".json")
_PRIVATE = 0o600


@dataclass(frozen=True, slots=True)
class AgentFiles:
    """Where the two files are."""

    bodies: Path
    document: Path

    @classmethod
    def of(cls, given: Path) -> AgentFiles:
        """The files that `given` names, with either ending or none."""
        stem = given.with_suffix("") if given.suffix in _SUFFIXES else given
        if stem.name in ("", ".."):
            raise InvalidRequestError(f"expected the name of a file, got {str(given)!r}")
        bodies, document = (stem.with_name(stem.name + suffix) for suffix in _SUFFIXES)
        return cls(bodies, document)


@contextmanager
def creating(path: Path) -> Iterator[BinaryIO]:
    """A new file to write to, readable by its owner only; it goes when writing fails.

    Raises InvalidRequestError when it exists or cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, _PRIVATE)
    except FileExistsError as error:
        raise InvalidRequestError(f"{path} exists already; choose another name") from error
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"cannot write {path}: {_reason(error)}") from error
    with ExitStack() as undo:
        undo.callback(path.unlink, missing_ok=True)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InvalidRequestError(f"cannot write {path}: {_reason(error)}") from error
        undo.pop_all()


@contextmanager
def opening(path: Path) -> Iterator[BinaryIO]:
    """A file to read. Raises InvalidRequestError for anything but a regular file of its own name.

    A link is refused: what is read is what was named.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if path.is_symlink():
        raise InvalidRequestError(f"{path} is a link; name the file itself")
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"cannot read {path}: {_reason(error)}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidRequestError(f"{path} is no regular file")
    with os.fdopen(descriptor, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise InvalidRequestError(f"cannot read {path}: {_reason(error)}") from error


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
