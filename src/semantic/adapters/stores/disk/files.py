"""The system calls of the disk store in one class, so that tests can make each of them fail."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from semantic.domain.stored import COUNTERS

logger = logging.getLogger("semantic.store")

_F_BARRIERFSYNC = 85
"""macOS's `fcntl` command that writes a file's data before any later write."""

Where = Path | str
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags to open a file for reading, without following a link or blocking on a FIFO."""
FOLDER_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PREFIX = 21
"""The length of the number that begins a name in `bad/`."""


class FileSystem:
    """The operating system's files. Methods raise the OSError of their system call."""

    def open(self, path: Where, flags: int, *, dir_fd: int | None = None) -> int:
        """Return a file descriptor. A created file has mode 0600."""
        return os.open(path, flags, 0o600, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, data: memoryview) -> int:
        """Write `data`, or only its beginning; return the number of bytes written."""
        return os.write(fd, data)

    def preadv(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        """Read bytes into `targets`; return the number of bytes read, 0 at the file's end."""
        return os.preadv(fd, targets, offset)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def lstat(self, path: Where, *, dir_fd: int | None = None) -> os.stat_result:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def mkdir(self, path: Where) -> None:
        Path(path).mkdir(mode=0o700)

    def rename(self, source: Where, target: Where, *, to: int, of: int | None = None) -> None:
        """Rename `source` to `target` in the folder `to`. `of` is the folder of `source`."""
        os.replace(source, target, src_dir_fd=of, dst_dir_fd=to)

    def unlink(self, path: Where, *, dir_fd: int | None = None) -> None:
        os.unlink(path, dir_fd=dir_fd)

    def rmdir(self, path: Where, *, dir_fd: int | None = None) -> None:
        os.rmdir(path, dir_fd=dir_fd)

    def names(self, folder: Where | int) -> list[str]:
        """Return the names in a folder, unordered."""
        return os.listdir(folder)  # noqa: PTH208  # accepts a descriptor

    def try_lock(self, fd: int) -> bool:
        """Lock an open file; return False if another open file has the lock."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)

    def sync_data(self, fd: int) -> None:
        """Write the data of a file to the drive before the data of any later sync."""
        if sys.platform == "darwin":
            try:
                fcntl.fcntl(fd, _F_BARRIERFSYNC)
            except OSError:  # a file system without barriers
                os.fsync(fd)
        else:
            os.fdatasync(fd)

    def sync_all(self, fd: int) -> None:
        """Make a file, and all data synced earlier, survive power loss."""
        if sys.platform == "darwin":
            try:
                fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            except OSError:  # a file system that does not support F_FULLFSYNC
                os.fsync(fd)
        else:
            os.fsync(fd)


class Counts:
    """Named counters since the store opened. A kind has its own counter, such as "damaged: body
    checksum". Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    def add(self, name: str, kind: str = "", n: int = 1) -> int:
        """Add `n` to a counter; return its total."""
        with self._lock:
            self._counts[name] += n
            if kind:
                self._counts[f"{name}: {kind}"] += n
            return self._counts[name]

    def add_error(self, name: str, error: OSError) -> None:
        """Count `error` by its errno, for example "write_errors: ENOSPC"."""
        kind = errno.errorcode.get(error.errno or 0, "unknown")
        n = self.add(name, kind)
        is_write = name == "write_errors" and kind not in {"ENOENT", "ESTALE"}
        if is_write and str(n).strip("0") == "1":
            logger.warning(
                "cannot write to the store (failure %d): %s (%s); after a restart, agents prefill "
                "the missing blocks", n, error.strerror or error, kind
            )  # fmt: skip

    def snapshot(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)


@contextmanager
def opened(
    files: FileSystem, path: Where, flags: int, *, dir_fd: int | None = None, reads: bool = False
) -> Iterator[int]:
    """Yield an open descriptor, then close it."""
    fd = files.open(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        with suppress(OSError) if reads else nullcontext():
            files.close(fd)


def delete_any(files: FileSystem, name: str, folder: int) -> None:
    """Delete a file, link or folder tree. Never follows a link. Raises FileNotFoundError."""
    try:
        files.unlink(name, dir_fd=folder)
    except OSError as error:
        # The errno for a folder differs between Linux and macOS; some systems return EPERM for
        # files.
        if error.errno not in {errno.EISDIR, errno.EPERM}:
            raise
        if not stat.S_ISDIR(files.lstat(name, dir_fd=folder).st_mode):
            raise
        _delete_folder(files, name, folder)


def _delete_folder(files: FileSystem, name: str, parent: int) -> None:
    # Nested folders move up first, so that at most three folders are open at any depth.
    left = [name]
    while left:
        this = left[-1]
        n_before = len(left)
        with opened(files, this, FOLDER_FLAGS, dir_fd=parent, reads=True) as fd:
            for inside in files.names(fd):
                if stat.S_ISDIR(files.lstat(inside, dir_fd=fd).st_mode):
                    beside = name[:_PREFIX] + secrets.token_hex(8)
                    files.rename(inside, beside, of=fd, to=parent)
                    left.append(beside)
                else:
                    files.unlink(inside, dir_fd=fd)
        if len(left) == n_before:
            files.rmdir(this, dir_fd=parent)
            left.pop()


def write_whole(files: FileSystem, fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`."""
    rest = memoryview(data)
    while rest:
        rest = rest[files.write(fd, rest) :]


def read_whole(files: FileSystem, fd: int, n_bytes: int) -> bytes:
    """Return the first `n_bytes` of a file, or all of a shorter file."""
    data = bytearray(n_bytes)
    view = memoryview(data)
    at = 0
    while at < n_bytes:
        got = files.preadv(fd, [view[at:]], at)
        if got == 0:
            break
        at += got
    return bytes(view[:at])


def sync_folder(files: FileSystem, path: Where) -> None:
    """Make the names in a folder survive power loss."""
    with opened(files, path, FOLDER_FLAGS) as fd:
        files.sync_all(fd)
