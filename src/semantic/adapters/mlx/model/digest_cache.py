"""Digests of large files that were read before, in a small file in the user's cache folder.

Only saves time: what cannot be read, is not ours or looks wrong is as if it were not there.
Knows no models.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path

_FILE = "weights.json"
_MOST_BYTES = 1 << 20
_MOST_ENTRIES = 1000
_DIGEST_BYTES = 32
_CLOCK_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes whenever a file's content does: a program cannot set `ctime_ns` back."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The state of the file that `path` leads to."""
        found = path.stat()
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether a change from now on is sure to show: file systems' clocks may be coarse."""
        return time.time_ns() - self.ctime_ns > _CLOCK_NS

    @property
    def key(self) -> str:
        return "-".join(map(str, astuple(self)))


def cache_folder() -> Path:
    """Where this user's caches of ours lie."""
    own = os.environ.get("SEMANTIC_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared).expanduser() / "semantic"
    usual = Path("Library", "Caches") if sys.platform == "darwin" else Path(".cache")
    return Path.home() / usual / "semantic"


class DigestCache:
    """Digests by the state of a file. No call fails: without a file it just remembers nothing."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._entries: dict[str, str] = {}
        self._loaded = False
        self._changed = False

    def get(self, state: FileState) -> bytes | None:
        """The digest of the file with this state, 32 bytes, if it is known."""
        self._load()
        found = self._entries.get(state.key)
        return None if found is None else bytes.fromhex(found)

    def put(self, state: FileState, digest: bytes) -> None:
        """Remember `digest`; `save` makes it last."""
        self._load()
        self._entries[state.key] = digest.hex()
        self._changed = True

    def save(self) -> None:
        """Write what is new: whole or not at all, readable by its owner alone."""
        if not self._changed:
            return
        newest = dict(list(self._entries.items())[-_MOST_ENTRIES:])
        # A home that cannot be written to, or is none, costs time and nothing else.
        with contextlib.suppress(OSError, RuntimeError):
            _write(self._path(), json.dumps(newest).encode())
            self._changed = False

    def _path(self) -> Path:
        return (cache_folder() if self._folder is None else self._folder) / _FILE

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._entries = _parse(_read(self._path()))


def _read(path: Path) -> bytes:
    """The content of a plain file of ours. Raises OSError or ValueError for anything else."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or others_write:
            raise ValueError(f"{path} is not a plain file of this user's own")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path} is too large")
    return data


def _parse(data: bytes) -> dict[str, str]:
    """Entries that look right. Raises ValueError or RecursionError when nothing does."""
    entries: object = json.loads(data)
    if not isinstance(entries, dict):
        raise ValueError("no entries")  # noqa: TRY004  it came from a file, not from a caller
    return {
        key: value for key, value in entries.items() if isinstance(value, str) and _is_digest(value)
    }


def _is_digest(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) == _DIGEST_BYTES
    except ValueError:
        return False


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:  # mkstemp makes it readable by its owner alone
            file.write(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
