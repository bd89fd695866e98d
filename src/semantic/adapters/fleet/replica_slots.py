"""Folders of the replicas of one machine: each has one of its own, while its process lives.

A slot is a numbered folder with a locked file and a folder for the store. A replica that is started
takes the first that is free, with all that an earlier one stored there. Knows files; not what is
stored.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from semantic.domain.errors import StoreError

LOCK: Final = "replica.lock"
_STORE: Final = "store"
_MOST: Final = 256


@dataclass(frozen=True, slots=True)
class ReplicaSlot:
    """`name` is its own on this machine, and `folder` for what it stores; it need not exist."""

    name: str
    folder: Path


@contextmanager
def taken_slot(base: Path) -> Iterator[ReplicaSlot]:
    """The first free slot below `base`, with the id of this process in its locked file.

    Raises StoreError if `base` cannot be used, and if there is none.
    """
    for number in range(_MOST):
        folder = base / f"replica-{number}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"cannot use {folder}: {error.strerror}") from error
        try:
            if _try_lock(lock):
                os.ftruncate(lock, 0)
                os.write(lock, f"{os.getpid()}\n".encode())
                yield ReplicaSlot(str(number), folder / _STORE)
                return
        finally:
            os.close(lock)
    raise StoreError(f"all {_MOST} slots below {base} are taken")


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
