"""Fault injection for files: a file system whose n-th call fails, once or from then on.

After SQLite's test harness: a scenario is run with n = 1, 2, … until it no longer meets the fault.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from semantic.adapters.stores.disk.files import FileSystem, Where

T = TypeVar("T")

ALL_CALLS = frozenset(
    {
        "open", "close", "write", "preadv", "fstat", "lstat", "mkdir", "rename", "unlink", "rmdir",
        "names", "try_lock", "sync_data", "sync_all",
    }
)  # fmt: skip
"""All but `unlock`, which never fails."""


class FaultyFiles(FileSystem):
    """Raises `number` at the call `at` (from 1) of those in `calls`; `forever` also afterwards.

    `most_bytes` limits what one read or write does, as systems may. Any thread may call.
    """

    def __init__(
        self,
        number: int,
        at: int,
        *,
        forever: bool = False,
        calls: frozenset[str] = ALL_CALLS,
        most_bytes: int | None = None,
    ) -> None:
        self._number = number
        self._at = at
        self._forever = forever
        self._calls = calls
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._count = 0
        self._off = False

    @property
    def was_met(self) -> bool:
        """Whether any call has failed."""
        return self._count >= self._at

    def repair(self) -> None:
        """Nothing fails any more, and no call is counted, until `break_again`."""
        self._off = True

    def break_again(self) -> None:
        """Count and fail as before `repair`."""
        self._off = False

    def open(self, path: Where, flags: int, *, dir_fd: int | None = None) -> int:
        self._meet("open")
        return super().open(path, flags, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        super().close(fd)  # a descriptor is gone also when closing reports an error
        self._meet("close")

    def write(self, fd: int, data: memoryview) -> int:
        self._meet("write")
        return super().write(fd, data[: self._most_bytes])

    def preadv(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        self._meet("preadv")
        if self._most_bytes is not None:
            targets = [targets[0][: self._most_bytes]]
        return super().preadv(fd, targets, offset)

    def fstat(self, fd: int) -> os.stat_result:
        self._meet("fstat")
        return super().fstat(fd)

    def lstat(self, path: Where, *, dir_fd: int | None = None) -> os.stat_result:
        self._meet("lstat")
        return super().lstat(path, dir_fd=dir_fd)

    def mkdir(self, path: Where) -> None:
        self._meet("mkdir")
        super().mkdir(path)

    def rename(self, source: Where, target: Where, *, to: int, of: int | None = None) -> None:
        self._meet("rename")
        super().rename(source, target, to=to, of=of)

    def unlink(self, path: Where, *, dir_fd: int | None = None) -> None:
        self._meet("unlink")
        super().unlink(path, dir_fd=dir_fd)

    def rmdir(self, path: Where, *, dir_fd: int | None = None) -> None:
        self._meet("rmdir")
        super().rmdir(path, dir_fd=dir_fd)

    def names(self, folder: Where | int) -> list[str]:
        self._meet("names")
        return super().names(folder)

    def try_lock(self, fd: int) -> bool:
        self._meet("try_lock")
        return super().try_lock(fd)

    def sync_data(self, fd: int) -> None:
        del fd  # no test cuts the power, so there is no need to wait for the drive
        self._meet("sync_data")

    def sync_all(self, fd: int) -> None:
        del fd
        self._meet("sync_all")

    def _meet(self, call: str) -> None:
        if call not in self._calls or self._off:
            return
        with self._lock:
            self._count += 1
            fails = self._count == self._at or (self._forever and self._count > self._at)
        if fails:
            raise OSError(self._number, os.strerror(self._number))


def until_untouched(
    number: int,
    scenario: Callable[[FaultyFiles], None],
    *,
    forever: bool,
    calls: frozenset[str] = ALL_CALLS,
    first: int = 1,
    every: int = 1,
) -> int:
    """Run `scenario` with the fault at each `every`-th call from the `first` on, in turn; about
    how many calls there are.
    """
    at = first
    while True:
        files = FaultyFiles(number, at, forever=forever, calls=calls)
        scenario(files)
        if not files.was_met:
            return at - 1
        at += every
