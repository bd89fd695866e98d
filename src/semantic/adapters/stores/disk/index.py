"""Two SQLite connections to the index: a writer, under the folder's lock, and a reader.

A fault of the system raises OSError. A fault of the index raises IndexBrokenError, and the index
needs a rebuild.
"""

from __future__ import annotations

import errno
import os
import secrets
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from semantic.adapters.stores.disk import schema
from semantic.adapters.stores.disk.entries import is_plain
from semantic.adapters.stores.disk.files import CREATE_FLAGS, FOLDER_FLAGS, opened
from semantic.adapters.stores.disk.folder import Folder
from semantic.adapters.stores.disk.schema import IndexBrokenError
from semantic.domain.block_hash import BlockHash

_WAL_PAGES = 64
_WAL_BYTES = 1 << 19
_WAIT_SECONDS = 5.0

_SYSTEM_FAULTS = {
    sqlite3.SQLITE_BUSY: errno.EAGAIN,
    sqlite3.SQLITE_LOCKED: errno.EAGAIN,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_INTERRUPT: errno.EINTR,
}
_REFUSALS = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}
"""SQLite errors that the folder, the process or the index can cause."""

_NAMES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "index.sqlite-journal")
_MOST_OPENINGS = 8
_OPEN_TOGETHER = 4
"""The number of descriptors that SQLite needs at once, plus a spare one."""
_OWNER_MAY_USE = stat.S_IRUSR | stat.S_IWUSR
_MIN_COST = 5 << 18
"""The minimum cost of an index in bytes: a small index with a full log."""
_SLACK = 1 << 19
"""Bytes by which the index may grow when SQLite copies its log."""

FileId = tuple[int, int]
"""A file's device and inode numbers."""
Identity = tuple[FileId, FileId | None, FileId | None]
"""The identities of the table file, its log and the log's shared-memory map."""


class Index:
    """The index of an open folder. One thread may use `reading` while another uses `writing`."""

    def __init__(
        self, folder: Folder, on_removed: Callable[[Sequence[BlockHash]], None] | None = None
    ) -> None:
        """Call `on_removed` with the hashes of complete blocks after a transaction has deleted
        their rows."""
        self._folder = folder
        self._on_removed = on_removed
        self._files = IndexFiles(folder)
        # Only the thread that holds a connection closes it: SQLite allows nothing else.
        self._writer = _Connection(self._files, checks_log=True)
        self._reader = _Connection(self._files, checks_log=False)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction under the folder's lock. An exception undoes the transaction."""
        with self._folder.locked(), _translated(self._files), self._writer.held() as db:
            db.execute("BEGIN IMMEDIATE")
            with ExitStack() as undo:
                undo.callback(_roll_back, db)
                if self._on_removed is not None:
                    schema.watch_removals(db)
                yield db
                removed = [] if self._on_removed is None else schema.take_removals(db)
                db.execute("COMMIT")
                undo.pop_all()
            if self._on_removed is not None and removed:
                self._on_removed(removed)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection that sees one committed state. For one thread at a time."""
        with _translated(self._files), self._reader.held() as db, ExitStack() as end:
            db.execute("BEGIN")
            end.callback(_roll_back, db)
            yield db

    def is_sound(self) -> bool:
        """Return whether the index is usable. Raises OSError if the check fails."""
        try:
            with self._folder.locked(), _translated(self._files), self._writer.held() as db:
                return schema.is_sound(db)
        except IndexBrokenError:
            return False

    @contextmanager
    def recreating(self) -> Iterator[sqlite3.Connection]:
        """Yield an empty index, which the caller must fill. After an exception, the index counts
        as missing."""
        with self._folder.locked(), _translated(self._files):
            self._writer.close()
            self._files.recreate()
            with self.writing() as db:
                schema.create(db)
                yield db

    def cost(self) -> int:
        """Return the index's bytes for the quota, with an allowance for growth."""
        return self._files.cost()

    def close(self) -> None:
        """Close both connections, once no thread uses them."""
        self._reader.close()
        self._writer.close()


class IndexFiles:
    """Checks the index's four files before SQLite opens them."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files = folder.files
        self.path = folder.root / _NAMES[0]

    def identity(self) -> Identity | None:
        """Return the identity of the index's files; None unless they exist and are safe to open."""
        try:
            table = self._id(_NAMES[0])
            log, log_map, _ = map(self._id, _NAMES[1:])
        except _UnfitError:
            return None
        if table is None:
            self._files.lstat(self._folder.root)  # raises if the folder is gone
            return None
        return table, log, log_map

    def has_table(self, table: FileId) -> bool:
        """Return whether the table file is still the same."""
        try:
            return self._id(_NAMES[0]) == table
        except _UnfitError:
            return False

    def recreate(self) -> None:
        """Remove all four files, and create an empty table file. Callers hold the folder's lock.
        Raises OSError."""
        for name in _NAMES:
            with suppress(FileNotFoundError):
                self._remove(self._folder.root / name)
        # Create it here, so that SQLite's own files inherit its permissions.
        self._files.close(self._files.open(self.path, CREATE_FLAGS))

    def cost(self) -> int:
        actual = 0
        for name in _NAMES:
            with suppress(FileNotFoundError):
                actual += self._files.lstat(self._folder.root / name).st_size
        return max(_MIN_COST, actual + _SLACK)

    def require_folder(self) -> None:
        """Raise the OSError that explains why SQLite cannot use the folder."""
        with ExitStack() as stack:
            for _ in range(_OPEN_TOGETHER):
                fd = stack.enter_context(opened(self._files, self._folder.root, FOLDER_FLAGS))
            mode = self._files.fstat(fd).st_mode
        if not (mode & stat.S_IWUSR and mode & stat.S_IXUSR):
            raise OSError(
                errno.EACCES,
                f"{os.strerror(errno.EACCES)}: {self._folder.root} has mode "
                f"{stat.S_IMODE(mode):04o}; expected a folder that its owner can write to",
            )

    def _id(self, name: str) -> FileId | None:
        """Return a file's identity, or None. Raises _UnfitError for a file that SQLite must not
        open."""
        try:
            found = self._files.lstat(self._folder.root / name)
        except FileNotFoundError:
            return None
        if not is_plain(found) or found.st_mode & _OWNER_MAY_USE != _OWNER_MAY_USE:
            raise _UnfitError
        return found.st_dev, found.st_ino

    def _remove(self, path: Path) -> None:
        if not stat.S_ISDIR(self._files.lstat(path).st_mode):
            self._files.unlink(path)
            return
        # A folder may contain foreign files: move it to `bad/`, with the number to be deleted
        # first.
        name = f"{0:020}-{secrets.token_hex(8)}-{path.name}"
        with opened(self._files, self._folder.root / "bad", FOLDER_FLAGS) as bad:
            self._files.rename(path, name, to=bad)


class _Connection:
    def __init__(self, files: IndexFiles, *, checks_log: bool) -> None:
        self._files = files
        self._checks_log = checks_log
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._identity: Identity | None = None

    @contextmanager
    def held(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection. Raises IndexBrokenError, OSError or sqlite3.Error."""
        with self._lock:
            if self._db is not None and self._is_current():
                yield self._db
                return
            there = self._found()
            if self._identity is not None and there != self._identity:
                if there[0] == self._identity[0]:
                    # Another log for the same tables: SQLite would mix the two logs.
                    raise IndexBrokenError("another process replaced the index's log")
                self.close()
            yield self._opened() if self._db is None else self._db

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                with suppress(sqlite3.Error):
                    self._db.close()
            self._db = self._identity = None

    def _is_current(self) -> bool:
        if self._checks_log or self._identity is None:
            return False
        return self._files.has_table(self._identity[0])

    def _found(self) -> Identity:
        there = self._files.identity()
        if there is None:
            raise IndexBrokenError("the index is missing, or not a plain file of this user")
        return there

    def _opened(self) -> sqlite3.Connection:
        # Another process may replace the files, and a connection to deleted files misses later
        # writes: try again.
        for _ in range(_MOST_OPENINGS):
            before = self._found()
            self._db = self._open()
            self._identity = self._found()
            if self._identity[0] == before[0]:
                return self._db
            self.close()
        raise IndexBrokenError("other processes keep replacing the index")

    def _open(self) -> sqlite3.Connection:
        uri = f"file:{quote(os.fsencode(self._files.path.absolute()))}?mode=rw"
        db = sqlite3.connect(
            uri, uri=True, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False
        )
        with ExitStack() as undo:
            undo.callback(db.close)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
            db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            db.execute("PRAGMA user_version").fetchone()  # creates the log
            undo.pop_all()
        return db


class _UnfitError(Exception):
    """A file of the index is not a plain file of this user."""


def _roll_back(db: sqlite3.Connection) -> None:
    with suppress(sqlite3.Error):  # SQLite may have done so itself
        db.execute("ROLLBACK")


@contextmanager
def _translated(files: IndexFiles) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _REFUSALS:
            files.require_folder()
        if code == sqlite3.SQLITE_CANTOPEN and files.identity() is not None:
            raise OSError(errno.EIO, f"the index: {error}") from error
        number = _SYSTEM_FAULTS.get(code)
        if number is None:
            raise IndexBrokenError(str(error)) from error
        raise OSError(number, f"the index: {error}") from error
    except UnicodeDecodeError as error:  # SQLite quotes stored values in its messages
        raise IndexBrokenError(str(error)) from error
