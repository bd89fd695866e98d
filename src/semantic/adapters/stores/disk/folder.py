"""The folder of a disk store, its locks, and its unfinished files.

    FORMAT        {"format": 1, "secret": digest of the secret}
    secret        32 random bytes
    lock          locked during changes of the folder
    blocks/, agents/, bad/, index.sqlite
    tmp/<random>/ a session: the unfinished files and the lock file of one process

The system's file locks end with their process.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import json
import logging
import os
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from semantic.adapters.stores.disk.entries import is_plain
from semantic.adapters.stores.disk.files import (
    CREATE_FLAGS,
    FOLDER_FLAGS,
    READ_FLAGS,
    FileSystem,
    delete_any,
    opened,
    read_whole,
    sync_folder,
    write_whole,
)
from semantic.domain.block_hash import LOCAL_TENANT, tenant_tag
from semantic.domain.errors import StoreError
from semantic.domain.identity import digest
from semantic.domain.stored import packed_name

logger = logging.getLogger("semantic.store")

FORMAT = 1
SECRET_BYTES = 32

_FOLDERS = ("blocks", "agents", "bad", "tmp")
_BEFORE_FORMAT = {"lock", "secret", "secret.new", "FORMAT.new", "lost+found"}
"""Names that may exist without FORMAT, after an interrupted creation."""
_MAX_FORMAT_BYTES = 4096
_LOCK_SECONDS = 10.0
_OPEN_SECONDS = 60.0
_MAX_PAUSE = 0.02


@dataclass(frozen=True, slots=True)
class Stamp:
    """The contents of the file FORMAT."""

    format: int
    secret_digest: bytes

    def encoded(self) -> bytes:
        return json.dumps({"format": self.format, "secret": self.secret_digest.hex()}).encode() + (
            b"\n"
        )


class Folder:
    """An open store folder. `locked` excludes other threads and processes. Methods raise OSError
    unless their docstrings say otherwise."""

    def __init__(self, root: Path, files: FileSystem) -> None:
        """See `open_folder`."""
        self.root = root
        self.files = files
        self.secret = b""
        self.session = secrets.token_hex(8)
        self._lock_fd: int | None = None
        self._session_fd: int | None = None
        self._identity: tuple[int, int] | None = None
        self._is_lost = False
        self._mutex = threading.RLock()
        self._depth = 0
        self._numbers = itertools.count()
        self.on_written: Callable[[int], None] = lambda _: None

    def start(self) -> None:
        """Create missing files and begin a session. Raises OSError or StoreError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self._lock_fd = self.files.open(self.root / "lock", flags)
        found = self.files.lstat(self.root)
        self._identity = found.st_dev, found.st_ino
        with self.locked(_OPEN_SECONDS):
            stamp = _read_stamp(self.root, self.files)
            if stamp is None:
                self._make_secret()
                stamp = Stamp(FORMAT, _digest_of(_read_secret(self.root, self.files)))
                self._create("FORMAT", stamp.encoded())
                sync_folder(self.files, self.root)
            self.secret = _read_secret(self.root, self.files, stamp.secret_digest)
            for name in _FOLDERS:
                with suppress(FileExistsError):
                    self.files.mkdir(self.root / name)
                _require_folder(self.root / name, self.files)
            self._start_session()

    def close(self) -> None:
        """Delete this process's unfinished files, and release its locks. Raises nothing."""
        if self._session_fd is not None:
            with suppress(OSError):
                self._delete_session(self.session)
        for fd in (self._session_fd, self._lock_fd):
            if fd is not None:
                with suppress(OSError):
                    self.files.close(fd)
        self._session_fd = self._lock_fd = None

    @contextmanager
    def locked(self, seconds: float | None = None) -> Iterator[None]:
        """Lock the folder for this thread. Raises OSError if another process holds it for
        `seconds`, or if the folder is gone."""
        seconds = seconds or _LOCK_SECONDS
        if not self._mutex.acquire(timeout=seconds):
            raise OSError(errno.EAGAIN, "another thread holds the lock of the store")
        try:
            if self._depth == 0:
                self._take_lock(seconds)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0 and self._lock_fd is not None:
                    self.files.unlock(self._lock_fd)
        finally:
            self._mutex.release()

    # Unfinished files

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """Yield a path for an unfinished file. Deletes the file on exit, unless it was renamed."""
        path = self.root / "tmp" / self.session / str(next(self._numbers))
        try:
            yield path
        finally:
            with suppress(OSError):  # the next recovery deletes it
                self.files.unlink(path)

    def create(
        self, path: Path, data: bytes, *, rest: bytes | memoryview = b"", sync: bool = False
    ) -> None:
        """Write `data`, then `rest`, to a new file. If `sync`, make the file durable."""
        with opened(self.files, path, CREATE_FLAGS) as fd:
            write_whole(self.files, fd, data)
            write_whole(self.files, fd, rest)
            if sync:
                self.files.sync_all(fd)
        self.on_written(len(data) + len(rest))

    def replace(self, name: str, data: bytes, *, sync: bool) -> None:
        """Replace a file in the folder atomically. If `sync`, make the new file durable."""
        with self.temporary() as path:
            self.create(path, data, sync=sync)
            self._install(path, name)

    def sessions(self) -> dict[str, bool]:
        """Return for each session whether its process is alive. Callers hold the lock."""
        names = self.files.names(self.root / "tmp")
        return {name: name == self.session or self._is_alive(name) for name in names}

    def reap(self) -> None:
        """Delete the sessions of dead processes. Callers hold the lock."""
        for name, alive in self.sessions().items():
            if not alive:
                with suppress(OSError):
                    self._delete_session(name)

    def leftovers(self) -> int:
        """Return the number of unfinished files of dead processes. Callers hold the lock."""
        dead = [name for name, alive in self.sessions().items() if not alive]
        return sum(self._count_in(name) for name in dead)

    def _start_session(self) -> None:
        folder = self.root / "tmp" / self.session
        self.files.mkdir(folder)
        self._session_fd = self.files.open(folder / "lock", CREATE_FLAGS)
        self.files.try_lock(self._session_fd)

    def _is_alive(self, session: str) -> bool:
        try:
            with opened(self.files, self.root / "tmp" / session / "lock", READ_FLAGS) as fd:
                return not self.files.try_lock(fd)
        except (FileNotFoundError, NotADirectoryError):
            return False  # not just beginning: that needs the folder's lock
        except OSError:
            return True  # unknown: do not touch it

    def _count_in(self, session: str) -> int:
        # 1 if the session is not a folder, 0 if another process has deleted it
        try:
            with opened(self.files, self.root / "tmp" / session, FOLDER_FLAGS, reads=True) as fd:
                return len(self.files.names(fd))
        except FileNotFoundError:
            return 0
        except OSError as error:
            if error.errno in {errno.ENOTDIR, errno.ELOOP}:
                return 1
            raise

    def _delete_session(self, session: str) -> None:
        folder = self.root / "tmp" / session
        if not stat.S_ISDIR(self.files.lstat(folder).st_mode):
            self.files.unlink(folder)
            return
        with opened(self.files, folder, FOLDER_FLAGS, reads=True) as fd:
            # Delete the lock file last: until then others can tell that the session is dead.
            for name in sorted(self.files.names(fd), key=lambda name: name == "lock"):
                delete_any(self.files, name, fd)
        self.files.rmdir(folder)

    # Creation and locking

    def _make_secret(self) -> None:
        try:
            self.files.lstat(self.root / "secret")
        except FileNotFoundError:
            self._create("secret", secrets.token_bytes(SECRET_BYTES))

    def _create(self, name: str, data: bytes) -> None:
        """Write a new file atomically."""
        new = self.root / f"{name}.new"
        with suppress(FileNotFoundError):
            self.files.unlink(new)
        self.create(new, data, sync=True)
        self._install(new, name)

    def _install(self, path: Path, name: str) -> None:
        with opened(self.files, self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as root:
            self.files.rename(path, name, to=root)

    def _take_lock(self, seconds: float) -> None:
        if self._lock_fd is None:
            raise OSError(errno.EBADF, "the store is not open")
        self._require_same_folder()
        until = time.monotonic() + seconds
        pause = 0.0005
        while not self.files.try_lock(self._lock_fd):
            if time.monotonic() > until:
                raise OSError(errno.EAGAIN, "another process holds the lock of the store")
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)

    def _require_same_folder(self) -> None:
        """Raise OSError if the folder is gone, or if a link or another folder has its name now."""
        try:
            found = self.files.lstat(self.root)
        except FileNotFoundError:
            found = None
        if found is not None and (found.st_dev, found.st_ino) == self._identity:
            self._is_lost = False
            return
        if not self._is_lost:
            self._is_lost = True
            logger.warning(
                "the store %s was removed or replaced: nothing reaches the disk until it is back",
                self.root,
            )
        raise OSError(errno.ESTALE, f"the folder {self.root} was removed or replaced")


def open_folder(root: Path, files: FileSystem) -> Folder:
    """Open the store at `root`, or create it. Raises StoreError and changes nothing if the folder
    is unsafe, not a store or of a newer format."""
    folder = Folder(root, files)
    try:
        _require_usable(root, files)
        folder.start()
    except StoreError:
        folder.close()
        raise
    except OSError as error:
        folder.close()
        raise StoreError(
            f"cannot use the store {root}: {error.strerror or error}; expected a folder that "
            f"this user can write to"
        ) from error
    return folder


def read_format(root: Path, files: FileSystem) -> int | None:
    """Return the number of the store's format; None if the folder has no store. Raises StoreError
    for a newer or damaged FORMAT."""
    stamp = _read_stamp(root, files)
    return None if stamp is None else stamp.format


def _read_stamp(root: Path, files: FileSystem) -> Stamp | None:
    try:
        data = read_small(root / "FORMAT", files, _MAX_FORMAT_BYTES)
    except FileNotFoundError:
        return None
    try:
        loaded: object = json.loads(data)
    except (ValueError, RecursionError):
        loaded = None
    fields = loaded if isinstance(loaded, dict) else {}
    number = fields.get("format")
    if isinstance(number, int) and number > FORMAT:
        raise StoreError(
            f"the store {root} has format {number}, written by a later version; "
            f"expected at most {FORMAT}"
        )
    secret_digest = fields.get("secret")
    if not isinstance(number, int) or number < 1 or not isinstance(secret_digest, str):
        raise _damaged_format(root)
    try:
        return Stamp(number, bytes.fromhex(secret_digest))
    except ValueError:
        raise _damaged_format(root) from None


def _damaged_format(root: Path) -> StoreError:
    return StoreError(
        f'the FORMAT of the store {root} is damaged; expected {{"format": {FORMAT}, "secret": '
        f"the secret's digest}}"
    )


def _digest_of(secret: bytes) -> bytes:
    return digest("store-secret-v1", secret)


def _read_secret(root: Path, files: FileSystem, expected: bytes | None = None) -> bytes:
    """Return the store's secret. Raises StoreError if the secret is damaged."""
    try:
        secret = read_small(root / "secret", files, SECRET_BYTES + 1)
    except FileNotFoundError:
        secret = b""
    if len(secret) != SECRET_BYTES or not any(secret):
        raise StoreError(
            f"the secret of the store {root} is missing or damaged; expected {SECRET_BYTES} random "
            f"bytes. Without it the store finds nothing: restore the file, or move the "
            f"folder away to start empty"
        )
    if expected is not None and not hmac.compare_digest(_digest_of(secret), expected):
        raise StoreError(
            f"the secret of the store {root} does not match the digest in its FORMAT; one of "
            f"the two files is damaged. No other secret finds anything in the store: "
            f"restore the file, or move the folder away to start empty"
        )
    return secret


def read_small(path: Path, files: FileSystem, most: int) -> bytes:
    """Return up to `most` bytes of a file. Raises OSError, or StoreError unless `path` is a
    plain file."""
    with opened(files, path, READ_FLAGS) as fd:
        if not is_plain(files.fstat(fd)):
            raise StoreError(f"{path} is not a plain file of this user; nothing has changed")
        return read_whole(files, fd, most)


def _require_usable(root: Path, files: FileSystem) -> None:
    try:
        _require_folder(root, files)
    except FileNotFoundError:
        root.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            files.mkdir(root)
        _require_folder(root, files)
    if read_format(root, files) is None:
        foreign = {n for n in files.names(root) if n not in _BEFORE_FORMAT and n[0] != "."}
        # Read again, because another process may meanwhile have made the folder a store.
        if foreign and read_format(root, files) is None:
            raise StoreError(
                f"{root} is not a store: it has no FORMAT but holds {min(foreign)!r}; "
                f"expected a store or an empty folder"
            )


def _require_folder(path: Path, files: FileSystem) -> None:
    """Raise StoreError unless `path` is a folder that only this user can write to."""
    found = files.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise StoreError(f"{path} is a symbolic link; expected the folder itself")
    if not stat.S_ISDIR(found.st_mode):
        raise StoreError(f"{path} is not a folder")
    if found.st_uid != os.geteuid():
        raise StoreError(
            f"{path} belongs to user {found.st_uid}; expected a folder of user {os.geteuid()}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreError(
            f"others can write to {path} (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"expected at most 0755"
        )


_WAIT_SECONDS = 0.1
_MOST_STEPS = 3_000_000
"""The maximum number of SQLite's steps in one search."""
_NAMES = """
SELECT name FROM agents WHERE tenant = ?1 AND substr(name, 1, length(?2)) = ?2
GROUP BY name ORDER BY max(time) DESC LIMIT ?3
"""


def agent_names(root: Path, beginning: str, limit: int) -> list[str]:
    """Return up to `limit` names of agents that start with `beginning`, last saved first.

    For completion in a shell: takes no lock, and finds only agents created without an API key.
    Returns an empty list on failure.
    """
    try:
        with (root / "secret").open("rb") as file:
            secret = file.read(SECRET_BYTES)
        with closing(_opened(root.absolute() / "index.sqlite")) as db:
            db.execute("PRAGMA trusted_schema = OFF")
            db.set_progress_handler(lambda: 1, _MOST_STEPS)
            wanted = (tenant_tag(secret, LOCAL_TENANT), packed_name(beginning), limit)
            rows = db.execute(_NAMES, wanted).fetchall()
    except (OSError, sqlite3.Error):
        return []
    packed = (name for (name,) in rows if isinstance(name, bytes))
    return [name.decode("utf-8", "replace") for name in packed]


def _opened(index: Path) -> sqlite3.Connection:
    # Without a write-ahead log, SQLite must not add files: open the index as immutable.
    logged = index.with_name(f"{index.name}-wal").exists()
    address = f"file:{quote(str(index))}?{'mode=ro' if logged else 'immutable=1'}"
    return sqlite3.connect(address, uri=True, timeout=_WAIT_SECONDS)
