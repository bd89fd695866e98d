"""Cache of digests of large files, in a small JSON file in the user's cache folder.

Only saves time: a file that is unreadable, owned by another user or malformed counts as empty.
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
_MAX_BYTES = 1 << 20
_MAX_ENTRIES = 1000
_DIGEST_BYTES = 32
_CLOCK_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class FileState:
    """Changes whenever the file's content does: a program cannot set `ctime_ns` back."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The state of the file at `path`, symlinks followed."""
        found = path.stat()
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether a later change is sure to change the state: file system clocks may be coarse."""
        return time.time_ns() - self.ctime_ns > _CLOCK_NS

    @property
    def key(self) -> str:
        return "-".join(map(str, astuple(self)))


def cache_folder() -> Path:
    """The folder of this user's caches of ours."""
    own = os.environ.get("SEMANTIC_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared).expanduser() / "semantic"
    usual = Path("Library", "Caches") if sys.platform == "darwin" else Path(".cache")
    return Path.home() / usual / "semantic"


class DigestCache:
    """Digests by file state. No call raises: if its file cannot be used, it is just empty."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._entries: dict[str, str] = {}
        self._loaded = False
        self._changed = False

    def get(self, state: FileState) -> bytes | None:
        """The digest of the file with this state, 32 bytes; None if not cached."""
        self._load()
        found = self._entries.get(state.key)
        return None if found is None else bytes.fromhex(found)

    def put(self, state: FileState, digest: bytes) -> None:
        """Add `digest` in memory; `save` writes it."""
        self._load()
        self._entries[state.key] = digest.hex()
        self._changed = True

    def save(self) -> None:
        """Write new entries, if any: atomically, readable by the owner alone."""
        if not self._changed:
            return
        newest = dict(list(self._entries.items())[-_MAX_ENTRIES:])
        # A home that is not writable, or does not exist, costs only time.
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
    """The content of a regular file of this user. Raises OSError or ValueError for any other."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or others_write:
            raise ValueError(f"{path} is not a plain file of this user's own")
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{path} is too large")
    return data


def _parse(data: bytes) -> dict[str, str]:
    """The well-formed entries. Raises ValueError or RecursionError if it is no JSON object."""
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
