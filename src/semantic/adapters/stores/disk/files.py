"""The system calls that the disk store makes, in one place, so that a test can make them fail.

Knows how to make data durable on each system; nothing of blocks or of the folder's layout.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_F_BARRIERFSYNC = 85
"""macOS: what was written to the file reaches the drive before anything written later."""

Where = Path | str
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Never through a symbolic link, and never waiting at a FIFO."""
FOLDER_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY
_PREFIX = 21
"""Of a folder's name, kept by what was in it: how its owner knows its own."""
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class FileSystem:
    """The real thing. Every method raises OSError as the call behind it does."""

    def open(self, path: Where, flags: int, *, dir_fd: int | None = None) -> int:
        """A descriptor; a file that is created is readable by its owner alone."""
        return os.open(path, flags, 0o600, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, data: memoryview) -> int:
        """Bytes written, perhaps fewer than given."""
        return os.write(fd, data)

    def preadv(self, fd: int, targets: Sequence[memoryview], offset: int) -> int:
        """Bytes read, perhaps fewer than there is room for; 0 at the end."""
        return os.preadv(fd, targets, offset)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def lstat(self, path: Where, *, dir_fd: int | None = None) -> os.stat_result:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def mkdir(self, path: Where) -> None:
        Path(path).mkdir(mode=0o700)

    def rename(self, source: Where, target: Where, *, to: int, of: int | None = None) -> None:
        """Rename `source`, in the folder `of` or by its path, to `target` in the folder `to`."""
        os.replace(source, target, src_dir_fd=of, dst_dir_fd=to)

    def unlink(self, path: Where, *, dir_fd: int | None = None) -> None:
        os.unlink(path, dir_fd=dir_fd)

    def rmdir(self, path: Where, *, dir_fd: int | None = None) -> None:
        os.rmdir(path, dir_fd=dir_fd)

    def names(self, folder: Where | int) -> list[str]:
        """Names in a folder, in no order."""
        return os.listdir(folder)  # noqa: PTH208  # of a descriptor

    def try_lock(self, fd: int) -> bool:
        """Take the exclusive lock of an open file, unless another open file has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)

    def sync_data(self, fd: int) -> None:
        """What was written to `fd` is on the drive before anything that is synced later."""
        if sys.platform == "darwin":
            try:
                fcntl.fcntl(fd, _F_BARRIERFSYNC)
            except OSError:  # a file system without barriers
                os.fsync(fd)
        else:
            os.fdatasync(fd)

    def sync_all(self, fd: int) -> None:
        """`fd`, a file or a folder, and all that was synced before it, survive a power loss."""
        if sys.platform == "darwin":
            try:
                fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            except OSError:  # a file system without it
                os.fsync(fd)
        else:
            os.fsync(fd)


@contextmanager
def opened(
    files: FileSystem, path: Where, flags: int, *, dir_fd: int | None = None
) -> Iterator[int]:
    """An open descriptor, closed at the end."""
    fd = files.open(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        files.close(fd)


@contextmanager
def opened_to_read(
    files: FileSystem, path: Where, flags: int, *, dir_fd: int | None = None
) -> Iterator[int]:
    """An open descriptor through which nothing is written: that closing it fails says nothing."""
    fd = files.open(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        with suppress(OSError):
            files.close(fd)


def delete_any(files: FileSystem, name: str, folder: int) -> None:
    """Delete whatever has that name in the open `folder`, with all that is in it; no link is
    followed. Raises FileNotFoundError when nothing has.
    """
    try:
        files.unlink(name, dir_fd=folder)
    except OSError as error:
        # Linux and macOS say it differently of a folder, and others may say EPERM of a file.
        if error.errno not in {errno.EISDIR, errno.EPERM}:
            raise
        if not stat.S_ISDIR(files.lstat(name, dir_fd=folder).st_mode):
            raise
        _delete_folder(files, name, folder)


def _delete_folder(files: FileSystem, name: str, parent: int) -> None:
    """Folders inside are moved beside it first: however deep they are, three are open at most."""
    left = [name]
    while left:
        this = left[-1]
        n_before = len(left)
        with opened_to_read(files, this, FOLDER_FLAGS, dir_fd=parent) as fd:
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


def write_whole(files: FileSystem, fd: int, data: bytes) -> None:
    """Write all of `data`, however often that takes."""
    rest = memoryview(data)
    while rest:
        rest = rest[files.write(fd, rest) :]


def read_whole(files: FileSystem, fd: int, n_bytes: int) -> bytes:
    """The first `n_bytes` of a file, fewer when it ends before."""
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
    """Names that were created in or renamed into a folder survive a power loss."""
    with opened(files, path, FOLDER_FLAGS) as fd:
        files.sync_all(fd)


_ALWAYS = ("hits", "misses", "written", "dropped", "evicted", "damaged", "write_errors")


class Counts:
    """Named counters; a kind is counted beside its total, as "damaged: body checksum"."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(_ALWAYS, 0))

    def add(self, name: str, kind: str = "", n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n
            if kind:
                self._counts[f"{name}: {kind}"] += n

    def add_error(self, name: str, error: OSError) -> None:
        """Count `error` by the name of its number, as "write_errors: ENOSPC"."""
        self.add(name, errno.errorcode.get(error.errno or 0, "unknown"))

    def snapshot(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)
