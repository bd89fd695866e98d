"""Files that this process has open, by path: what other threads open elsewhere does not count."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path


def open_files(*folders: Path) -> list[str]:
    """Paths below `folders` of all open descriptors, sorted; deleted files included."""
    below = tuple(f"{folder.resolve()}{os.sep}" for folder in folders)
    found = []
    for name in os.listdir("/dev/fd"):  # noqa: PTH208
        with suppress(OSError):  # closed meanwhile, as the listing's own
            path = _path_of(int(name))
            if f"{path}{os.sep}".startswith(below):
                found.append(path)
    return sorted(found)


def _path_of(fd: int) -> str:
    if sys.platform == "darwin":
        return fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0").decode()
    return str(Path("/proc/self/fd", str(fd)).readlink())
