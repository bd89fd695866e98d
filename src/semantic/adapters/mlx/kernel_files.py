"""The folder where MLX's CPU backend compiles fused operations.

By default other users may be able to write there, and so decide which code runs.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final

import platformdirs

from semantic.domain.errors import BackendError

_BELOW: Final = ("mlx", version("mlx"), "cpu")
_CUDA: Final = "MLX_PTX_CACHE_DIR"
_VARIABLES: Final = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
"""The variables that name a temporary folder in C++, by precedence."""
_MEND: Final = "set TMPDIR to a folder of yours in which programs can run"
_ROOM: Final = 64 << 20
"""Bytes of free space that the folder needs."""
_MOST_NOTE: Final = 1 << 20
_LOADED: Final = Path("/proc/self/maps")


class KernelFolder:
    """A private folder for the files that MLX compiles in this process."""

    def __init__(self, root: Path) -> None:
        """Raise OSError unless `root` is private, has free space, and allows executable files."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(root)
        found = os.statvfs(root)
        if found.f_flag & getattr(os, "ST_NOEXEC", 0):
            raise OSError(errno.EACCES, "programs in it cannot run")
        if found.f_bavail * found.f_frsize < _ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with _locked(root):  # keeps a starting process from removing the new folder
            _remove_ended(root)
            self.path = Path(tempfile.mkdtemp(prefix="run-", dir=root))
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._files = self.path.joinpath(*_BELOW)
        self._files.mkdir(parents=True)
        self._kept = root / f"{_BELOW[1]}-{platform.machine()}"
        self._kept.mkdir(mode=0o700, exist_ok=True)
        for file in self._kept.iterdir():
            os.link(file, self._files / file.name)

    def keep(self) -> None:
        """Save the compiled files that this process loaded, for later processes."""
        with suppress(OSError):  # on failure, later processes compile them again
            loaded = _LOADED.read_text()
            for file in self._files.glob("*.so"):
                if f"{file}\n" in loaded and not (self._kept / file.name).exists():
                    os.link(file, self._kept / file.name)

    def end(self) -> None:
        self.keep()
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _remove_ended(root: Path) -> None:
    for folder in root.glob("run-*"):
        with suppress(OSError):  # the folder is in use, or gone
            held = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(held)


def _require_own(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.ENOTDIR, "it is not a folder")
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise OSError(errno.EPERM, "others may write to it")


_own: list[KernelFolder] = []


def own() -> Path:
    """Make MLX compile in a `KernelFolder`. Raises BackendError if that is impossible."""
    if _own:
        return _own[0].path
    problems: list[str] = []
    for root in (
        platformdirs.user_cache_path("semantic") / "kernels",
        Path(tempfile.gettempdir(), f"semantic-{os.geteuid()}"),
    ):
        try:
            _own.append(KernelFolder(root))
        except OSError as error:
            problems.append(f"{root}: {error.strerror}")
            continue
        os.environ["TMPDIR"] = str(_own[0].path)
        os.environ.setdefault(_CUDA, str(root / f"cuda-{_BELOW[1]}"))
        os.environ.setdefault("PATH", os.defpath)  # a compiler needs it to find its own parts
        atexit.register(_own[0].end)
        return _own[0].path
    raise BackendError(f"cannot compile kernels: {'; '.join(problems)}; {_MEND}")


def note(name: str) -> Path | None:
    """Return the path of a private file for later processes; None if this process has no
    `KernelFolder`. The folder of the file exists."""
    if not _own:
        return None
    folder = _own[0].path.parent / "notes"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / name


def read_note(path: Path | None) -> bytes:
    """Return what is in a file of `note`, or nothing if it is missing or too long."""
    with suppress(OSError):
        if path is not None and path.is_file() and path.stat().st_size <= _MOST_NOTE:
            return path.read_bytes()
    return b""


def write_note(path: Path | None, document: object) -> None:
    """Write a file of `note` as JSON, if there is one. A failure costs later processes time."""
    if path is not None:
        part = path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            part.write_text(json.dumps(document))
            part.replace(path)
        with suppress(OSError):
            part.unlink(missing_ok=True)  # a folder has the file's name


def keep() -> None:
    """Call `KernelFolder.keep` if this process has a `KernelFolder`."""
    for folder in _own:
        folder.keep()


def require_own() -> Path:
    """Return the folder in which MLX compiles by default. Raises BackendError if other users may
    write there."""
    given = (os.environ[name] for name in _VARIABLES if name in os.environ)
    folder = Path(next(given, Path("/", "tmp")))
    for name in _BELOW:
        folder /= name
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            _require_own(folder)
        except OSError as error:
            message = f"cannot compile kernels: {folder}: {error.strerror}; {_MEND}"
            raise BackendError(message) from error
    return folder
