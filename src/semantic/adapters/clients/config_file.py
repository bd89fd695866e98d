"""A file that belongs to a user and is changed by us: read whole, copied, replaced in one step.

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

from semantic.adapters.clients.file_format import FileFormat, UnreadableError
from semantic.adapters.clients.settings_tree import Change, Settings, changes
from semantic.domain.errors import InvalidRequestError, OperatorError

_OWNER_ONLY: Final = 0o600
_FOLDER: Final = 0o700
_LARGEST: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Plan:
    """What would become of the file at `path`. `before` is None where there is none yet."""

    path: Path
    before: bytes | None
    after: bytes
    changes: tuple[Change, ...]


def plan(path: Path, kind: FileFormat, wanted: Settings) -> Plan:
    """What it takes that `wanted` holds in the file. Changes nothing.

    Raises UnreadableError for what is no such file, OperatorError for what cannot be opened.
    """
    before = _read(path)
    try:
        text = "" if before is None else before.decode("utf-8-sig")
        needed = tuple(changes(kind.read(text), wanted))
        after = kind.change(text, wanted).encode() if needed else before or b""
    except UnicodeDecodeError as error:
        raise _left(path, f"byte {error.start} is no UTF-8") from None
    except RecursionError:
        raise _left(path, "it is nested too deeply") from None
    except InvalidRequestError as error:
        raise _left(path, str(error)) from None
    return Plan(path, before, after, needed)


def write(wanted: Plan) -> Path | None:
    """Do what was planned; returns where a copy of the file as it was is, if it was there.

    A symbolic link stays one: the file that it leads to is replaced. A new file can be read by
    its owner alone. Raises OperatorError when it cannot be written, or was changed meanwhile;
    then the file is as it was.
    """
    if not wanted.changes:
        return None
    target = Path(os.path.realpath(wanted.path))
    with _told(wanted.path, "written"):
        target.parent.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
        mode = _OWNER_ONLY if wanted.before is None else stat.S_IMODE(target.stat().st_mode)
        copy = None if wanted.before is None else _copied(target, wanted.before, mode)
        _replace(target, wanted, mode)
    return copy


def _read(path: Path) -> bytes | None:
    with _told(path, "read"):
        try:
            is_plain = stat.S_ISREG(path.stat().st_mode)
        except FileNotFoundError:
            return None
        if not is_plain:
            raise UnreadableError(f"{path} is no file")
        data = path.read_bytes()
    if len(data) > _LARGEST:
        raise UnreadableError(f"{path} has {len(data)} bytes: expected a file of settings")
    return data


def _left(path: Path, why: str) -> UnreadableError:
    return UnreadableError(f"{path} was left as it is: {why}")


def _copied(target: Path, data: bytes, mode: int) -> Path:
    """A copy beside the file, under a name that nobody has yet."""
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
            _fill(descriptor, data, mode)
        except OSError:
            copy.unlink(missing_ok=True)
            raise
        return copy


def _replace(target: Path, wanted: Plan, mode: int) -> None:
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        _fill(descriptor, wanted.after, mode)
        if _read(target) != wanted.before:
            raise OperatorError(f"{target} was changed meanwhile, and not by us: try again")
        Path(name).replace(target)
    finally:
        with suppress(FileNotFoundError):
            Path(name).unlink()


def _fill(descriptor: int, data: bytes, mode: int) -> None:
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)
        file.flush()
        os.fsync(descriptor)


@contextmanager
def _told(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, OperatorError):
            raise
        raise OperatorError(f"{path} cannot be {what}: {error.strerror or error}") from None
