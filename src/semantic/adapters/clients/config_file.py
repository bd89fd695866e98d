"""Changes a user's settings file: read whole, backed up, replaced atomically.

Knows the file system; not what a client's settings mean.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from semantic.adapters.clients.file_format import (
    Change,
    FileFormat,
    Settings,
    UnreadableError,
    changes,
)
from semantic.domain.errors import InvalidRequestError, OperatorError

_OWNER_ONLY: Final = 0o600
_FOLDER: Final = 0o700
_MAX_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Plan:
    """The content of the file at `path` before and after; `before` is None if there is no file."""

    path: Path
    before: bytes | None
    after: bytes
    changes: tuple[Change, ...]


def plan(path: Path, kind: FileFormat, required: Settings) -> Plan:
    """The change after which the file holds `required`. Writes nothing.

    Raises UnreadableError for a file that is not of `kind`, OperatorError if it cannot be opened.
    """
    before = _read(path)
    try:
        text = "" if before is None else before.decode("utf-8-sig")
        needed = tuple(changes(kind.read(text), required))
        after = kind.change(text, required).encode() if needed else before or b""
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"byte {error.start} is no UTF-8") from None
    except RecursionError:
        raise _unreadable(path, "it is nested too deeply") from None
    except InvalidRequestError as error:
        raise _unreadable(path, str(error)) from None
    return Plan(path, before, after, needed)


def write(change: Plan) -> Path | None:
    """Carry out the plan; the path of a backup of the previous file, None if there was none.

    A symbolic link stays one: its target is replaced. A new file is readable by its owner only.
    Raises OperatorError when it cannot be written or was changed since `plan`; the file is then
    unchanged.
    """
    if not change.changes:
        return None
    target = Path(os.path.realpath(change.path))
    with _os_errors(change.path, "written"):
        target.parent.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
        mode = _OWNER_ONLY if change.before is None else stat.S_IMODE(target.stat().st_mode)
        copy = None if change.before is None else _backup(target, change.before, mode)
        _replace(target, change, mode)
    return copy


def _read(path: Path) -> bytes | None:
    with _os_errors(path, "read"):
        try:
            is_plain = stat.S_ISREG(path.stat().st_mode)
        except FileNotFoundError:
            return None
        if not is_plain:
            raise UnreadableError(f"{path} is no file")
        data = path.read_bytes()
    if len(data) > _MAX_BYTES:
        raise UnreadableError(f"{path} has {len(data)} bytes: expected a file of settings")
    return data


def _unreadable(path: Path, why: str) -> UnreadableError:
    return UnreadableError(f"{path} was left as it is: {why}")


def _backup(target: Path, data: bytes, mode: int) -> Path:
    """Write a backup next to the file, under a new name."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        more = f"-{number}" if number > 1 else ""
        copy = target.with_name(f"{target.name}.{stamp}{more}.bak")
        try:
            descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
        except FileExistsError:
            number += 1
            continue
        try:
            _write_all(descriptor, data, mode)
        except OSError:
            copy.unlink(missing_ok=True)
            raise
        return copy


def _replace(target: Path, change: Plan, mode: int) -> None:
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        _write_all(descriptor, change.after, mode)
        if _read(target) != change.before:
            raise OperatorError(f"{target} was changed meanwhile, and not by us: try again")
        Path(name).replace(target)
    finally:
        with suppress(FileNotFoundError):
            Path(name).unlink()


def _write_all(descriptor: int, data: bytes, mode: int) -> None:
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)
        file.flush()
        os.fsync(descriptor)


@contextmanager
def _os_errors(path: Path, what: str) -> Iterator[None]:
    """Turn OSError into OperatorError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OperatorError):
            raise
        raise OperatorError(f"{path} cannot be {what}: {error.strerror or error}") from None
