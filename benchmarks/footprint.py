"""Memory of a process and disk usage of a folder, as the operating system counts them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_SECTOR = 512
"""Unit of `st_blocks` in bytes, independent of the file system's block size."""


def resident_bytes() -> int:
    """Resident memory of this process in bytes."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    ps = shutil.which("ps") or "/bin/ps"
    done = subprocess.run(  # noqa: S603 - a fixed program, no shell
        [ps, "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return 1024 * int(done.stdout)


def disk_bytes(folder: Path) -> int:
    """What `du` says: the room that all files and folders in `folder` take, itself included.

    `folder` is a store, whose lock is held meanwhile: else one file is counted before it is
    deleted, and also the one that it made room for.
    """
    with (folder / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _SECTOR * sum(found.st_blocks for _, found in _everything(folder))


def files(folder: Path) -> dict[tuple[str, int], int]:
    """Size of each file below `folder`, by path and by the number that is new when it is."""
    found: dict[tuple[str, int], int] = {}
    for path, status in _everything(folder):
        if path.is_file():
            found[path.relative_to(folder).as_posix(), status.st_ino] = status.st_size
    return found


def _everything(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for parent, folders, names in os.walk(folder):
        for path in (Path(parent), *(Path(parent, name) for name in names)):
            try:
                yield path, path.lstat()
            except FileNotFoundError:
                continue  # a store at work deletes files, too
        folders.sort()
