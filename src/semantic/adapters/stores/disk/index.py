"""The index's connections: one that writes under the folder's lock, one that reads beside it.

Sorts what SQLite reports into two: the system's fault (OSError: the operation failed) and the
index's own (IndexBrokenError: rebuild it). Knows no rows.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import quote

from semantic.adapters.stores.disk import schema
from semantic.adapters.stores.disk.folder import Folder
from semantic.adapters.stores.disk.index_files import Identity, IndexFiles

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
"""The folder's fault, the process's, or the index's own: a look at the folder tells."""


class IndexBrokenError(Exception):
    """The index is gone or does not say what it should; the files know better."""


class Index:
    """The index of an open folder. `reading` may be used while another thread is `writing`."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files = IndexFiles(folder)
        # Each is closed only by the thread that holds it: SQLite does not survive anything else.
        self._writer = _Connection(self._files, looks_closely=True)
        self._reader = _Connection(self._files, looks_closely=False)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, alone in the folder: all of it, or, when anything is raised, nothing."""
        with self._folder.locked(), _translated(self._files), self._writer.held() as db:
            db.execute("BEGIN IMMEDIATE")
            with ExitStack() as undo:
                undo.callback(_roll_back, db)
                yield db
                db.execute("COMMIT")
                undo.pop_all()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The state after some transaction. One thread at a time."""
        with _translated(self._files), self._reader.held() as db:
            yield db

    def is_sound(self) -> bool:
        """Whether it can be used. Raises OSError when the system does not let us know."""
        try:
            with self._folder.locked(), _translated(self._files), self._writer.held() as db:
                return schema.is_sound(db)
        except IndexBrokenError:
            return False

    @contextmanager
    def recreating(self) -> Iterator[sqlite3.Connection]:
        """A new index in the one transaction that also fills it.

        When anything is raised what is left has no tables, and is not taken for an index.
        """
        with self._folder.locked(), _translated(self._files):
            self._writer.close()
            self._files.begin_anew()
            with self.writing() as db:
                schema.create(db)
                yield db

    def cost(self) -> int:
        """Bytes to count for the index, with room to grow in."""
        return self._files.cost()

    def close(self) -> None:
        """Waits until no other thread uses a connection."""
        self._reader.close()
        self._writer.close()


class _Connection:
    """One connection, held by one thread at a time, opened anew when the index is another."""

    def __init__(self, files: IndexFiles, *, looks_closely: bool) -> None:
        """Who `looks_closely` notices also that only the log is another."""
        self._files = files
        self._looks_closely = looks_closely
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._identity: Identity | None = None

    @contextmanager
    def held(self) -> Iterator[sqlite3.Connection]:
        """Raises IndexBrokenError, OSError or sqlite3.Error."""
        with self._lock:
            if self._db is not None and self._is_current():
                yield self._db
                return
            there = self._found()
            if self._identity is not None and there != self._identity:
                if there[0] == self._identity[0]:
                    # Another log for the same tables: SQLite would mix the two.
                    raise IndexBrokenError("the index's log is another")
                self.close()
            if self._db is None:
                self._db = self._open()
                self._identity = self._found()
            yield self._db

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                with suppress(sqlite3.Error):
                    self._db.close()
            self._db = self._identity = None

    def _is_current(self) -> bool:
        if self._looks_closely or self._identity is None:
            return False
        return self._files.has_table(self._identity[0])

    def _found(self) -> Identity:
        there = self._files.identity()
        if there is None:
            raise IndexBrokenError("the index is not there, or is no plain file of this user's")
        return there

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
            db.execute("PRAGMA user_version").fetchone()  # from now on the log is there
            undo.pop_all()
        return db


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
    except UnicodeDecodeError as error:  # SQLite quotes what it found in its messages
        raise IndexBrokenError(str(error)) from error


def one(db: sqlite3.Connection, sql: str) -> int:
    """The whole number that `sql` finds. Raises IndexBrokenError when there is none."""
    row = db.execute(sql).fetchone()
    if row is None:
        raise IndexBrokenError(f"expected a row in the index: {sql}")
    return whole(row[0])


def whole(value: object) -> int:
    """A value of the index that must be a whole number: SQLite keeps any type in any column."""
    if not isinstance(value, int):
        raise IndexBrokenError(f"expected a whole number in the index, got {type(value).__name__}")
    return value


def blob(value: object) -> bytes:
    """A value of the index that must be bytes."""
    if not isinstance(value, bytes):
        raise IndexBrokenError(f"expected bytes in the index, got {type(value).__name__}")
    return value
