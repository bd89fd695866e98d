"""Bytes by their keys in one SQLite file, inside one budget of bytes. They survive the process.

Every row has a proof; one that does not fit is no row. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from semantic.domain.digest import digest
from semantic.domain.errors import StoreError

ROW_BYTES: Final = 512
"""What a row takes beside its data: key, proof, places in two trees, the rest of a page."""


class Records:
    """The file is made when it is first needed; its folder must be there.

    When they have `max_bytes`, the oldest go. `noun` is what they are, for people; `tell` gets a
    sentence when a broken file was moved aside. Any thread may call it.
    """

    def __init__(self, path: Path, max_bytes: int, noun: str, tell: Callable[[str], None]) -> None:
        self._max_bytes = max_bytes
        self._noun = noun
        self._database = RecordDatabase(path, noun, tell)

    def get(self, key: bytes) -> bytes | None:
        """What was put under `key`; None when it is not there as it was put. Raises StoreError."""
        try:
            with self._database.held() as db:
                row = db.execute("SELECT proof, data FROM records WHERE key = ?", (key,)).fetchone()
        except BrokenDatabaseError:
            return None
        if row is None:
            return None
        proof, data = row
        good = isinstance(data, bytes) and proof == _proof_of(key, data)
        return data if good else None

    def put(self, key: bytes, data: bytes) -> None:
        """Keep `data`, in the place of what was under `key`. Raises StoreError."""
        try:
            self._put(key, data)
        except BrokenDatabaseError:
            try:
                self._put(key, data)
            except BrokenDatabaseError as error:
                raise StoreError(f"{self._noun} cannot be kept: {error}") from error

    def delete(self, key: bytes) -> bool:
        """Whether there was anything. It is overwritten, in the log too. Raises StoreError."""
        try:
            with self._database.held() as db:
                gone = db.execute("DELETE FROM records WHERE key = ?", (key,)).rowcount
                if gone:
                    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except BrokenDatabaseError:
            return False
        return gone > 0

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        self._database.close()

    def _put(self, key: bytes, data: bytes) -> None:
        cost = len(data) + ROW_BYTES
        with self._database.held() as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("DELETE FROM records WHERE key = ?", (key,))
            if cost <= self._max_bytes:
                self._make_room(db, cost)
                db.execute(
                    "INSERT INTO records(key, cost, proof, data) VALUES (?, ?, ?, ?)",
                    (key, cost, _proof_of(key, data), data),
                )
            db.execute("COMMIT")

    def _make_room(self, db: sqlite3.Connection, cost: int) -> None:
        """Delete the oldest until `cost` more bytes fit."""
        over = db.execute("SELECT bytes FROM total").fetchone()[0] + cost - self._max_bytes
        while over > 0:
            oldest = db.execute(
                "SELECT number, cost FROM records ORDER BY number LIMIT 1"
            ).fetchone()
            if oldest is None:
                return
            db.execute("DELETE FROM records WHERE number = ?", (oldest[0],))
            over -= oldest[1]


def _proof_of(key: bytes, data: bytes) -> bytes:
    """A hash by which damage to a row is noticed, also when it is one row's data under another's
    key."""
    return digest("record-v1", key, data)


VERSION: Final = 1

_APPLICATION: Final = 0x736D5263
"""Stands in the file's head: this is ours."""

_OURS: Final = ("", "-wal", "-shm", "-journal")
_OWNER_ONLY: Final = 0o600
_WAL_PAGES: Final = 256
_WAL_BYTES: Final = 1 << 20
_WAIT_SECONDS: Final = 2.0
"""How long another process may keep us waiting."""

_TABLES: Final = """
CREATE TABLE records(
    number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, cost INTEGER NOT NULL,
    proof BLOB NOT NULL, data BLOB NOT NULL)
--
CREATE TABLE total(bytes INTEGER NOT NULL)
--
INSERT INTO total VALUES (0)
--
CREATE TRIGGER records_come AFTER INSERT ON records
    BEGIN UPDATE total SET bytes = bytes + new.cost; END
--
CREATE TRIGGER records_go AFTER DELETE ON records
    BEGIN UPDATE total SET bytes = bytes - old.cost; END
"""

FileId = tuple[int, int]
"""Device and number."""

_BROKEN: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
"""SQLITE_ERROR is a table that is not as we made it: our statements do not change."""

_REFUSALS: Final = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}


class BrokenDatabaseError(Exception):
    """The file is not what we wrote."""


class UnusableFileError(StoreError):
    """There is a reason that does not pass by itself; nothing was changed."""


class RecordDatabase:
    """One connection to the file at `path`, which is opened when it is first needed.

    `noun` is what the records are, for people. `tell` gets a sentence when a broken file was moved
    aside.
    """

    def __init__(self, path: Path, noun: str, tell: Callable[[str], None]) -> None:
        self._path = path
        self._noun = noun
        self._tell = tell
        self._db: sqlite3.Connection | None = None
        self._file: FileId | None = None
        self._mutex = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread at a time; what is raised undoes its transaction.

        Raises StoreError for what cannot be done now. When the file turns out to be broken, it is
        moved aside, and BrokenDatabaseError raised: the next one is empty.
        """
        with self._mutex:
            try:
                db = self._opened()
                yield db
            except sqlite3.Error as error:
                self._undo()
                if not _is_broken(error):
                    raise _system_fault(error, self._noun) from error
                self._set_aside(str(error))
                raise BrokenDatabaseError(str(error)) from error
            except UnicodeDecodeError as error:  # SQLite quotes what it found in its messages
                self._undo()
                self._set_aside("it cannot be read")
                raise BrokenDatabaseError(str(error)) from error

    def close(self) -> None:
        """Waits until no other thread uses the connection."""
        with self._mutex:
            self._close()

    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            try:
                self._db = self._open()
            except (BrokenDatabaseError, sqlite3.DatabaseError) as error:
                if isinstance(error, sqlite3.Error) and not _is_broken(error):
                    raise
                self._set_aside(str(error))
                self._db = self._open_anew()
        return self._db

    def _open_anew(self) -> sqlite3.Connection:
        try:
            return self._open()
        except BrokenDatabaseError as error:
            raise UnusableFileError(f"{self._noun} cannot be kept on disk: {error}") from error

    def _open(self) -> sqlite3.Connection:
        self._file = self._prepare_files()
        db = sqlite3.connect(
            self._path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False
        )
        with ExitStack() as undo:
            undo.callback(db.close)
            _configure(db)
            undo.pop_all()
        return db

    def _prepare_files(self) -> FileId:
        """Let SQLite find a plain file of ours that nobody else may read; says which it is.

        Raises BrokenDatabaseError for anything else of that name, a link included.
        """
        self._file = None
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            for suffix in _OURS:
                self._check_file(suffix)
            with suppress(FileExistsError):
                # Made here, so that SQLite's own files take over its permissions.
                os.close(os.open(self._path, flags, _OWNER_ONLY))
            return _file_id(self._path)
        except OSError as error:
            raise UnusableFileError(
                f"{self._noun} cannot be kept on disk: {error.strerror or error}"
            ) from error

    def _check_file(self, suffix: str) -> None:
        path = self._path.with_name(self._path.name + suffix)
        try:
            found = path.lstat()
        except FileNotFoundError:
            return
        plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        if not plain or found.st_uid != os.geteuid():
            raise BrokenDatabaseError(f"{path.name} is no plain file of this user's")
        if stat.S_IMODE(found.st_mode) != _OWNER_ONLY:
            path.chmod(_OWNER_ONLY)

    def _undo(self) -> None:
        if self._db is not None and self._db.in_transaction:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def _set_aside(self, reason: str) -> None:
        """Give the files other names, so that new ones can be made. Raises StoreError."""
        self._close()
        end = f".bad-{time.time_ns()}"
        try:
            if self._file is not None and _file_id(self._path) != self._file:
                return  # another process has done it
            for suffix in _OURS:
                path = self._path.with_name(self._path.name + suffix)
                with suppress(FileNotFoundError):
                    path.rename(path.with_name(path.name + end))
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnusableFileError(
                f"{self._noun} cannot be kept on disk: {error.strerror or error}"
            ) from error
        self._tell(
            f"the file of {self._noun} was broken ({reason}) and is now {self._path.name}{end}; "
            f"{self._noun} of before are not known any more"
        )

    def _close(self) -> None:
        if self._db is not None:
            db, self._db = self._db, None
            with suppress(sqlite3.Error):
                db.close()


def _configure(db: sqlite3.Connection) -> None:
    """Raises BrokenDatabaseError for a file of another program, UnusableFileError for one of a
    later version."""
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA secure_delete = ON")
    db.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
    db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    db.execute("BEGIN IMMEDIATE")  # nobody else makes the tables meanwhile
    try:
        _require_tables(db)
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def _require_tables(db: sqlite3.Connection) -> None:
    [application] = db.execute("PRAGMA application_id").fetchone()
    [version] = db.execute("PRAGMA user_version").fetchone()
    if application == _APPLICATION:
        if version > VERSION:
            raise UnusableFileError(
                f"the file has format {version}, made by a later version; "
                f"expected at most {VERSION}"
            )
        return
    if db.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
        raise BrokenDatabaseError("it holds something else")
    for statement in _TABLES.split("--"):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {_APPLICATION}")
    db.execute(f"PRAGMA user_version = {VERSION}")


def _file_id(path: Path) -> FileId:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _is_broken(error: sqlite3.Error) -> bool:
    """Whether the file is to blame, not the system."""
    return _code(error) in _BROKEN


def _system_fault(error: sqlite3.Error, noun: str) -> StoreError:
    kind = UnusableFileError if _code(error) in _REFUSALS else StoreError
    return kind(f"{noun} cannot be kept on disk: {error}")


def _code(error: sqlite3.Error) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None
