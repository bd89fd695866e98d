"""Records: small durable records in one SQLite file, as bytes by key.

A row that does not match its checksum counts as missing. A corrupt file is quarantined and
replaced.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from semantic.domain.errors import StoreError
from semantic.domain.identity import digest

VERSION: Final = 2
ROW_BYTES: Final = 512
"""The size of a row in bytes, without its data."""

_APPLICATION: Final = 0x736D5263
"""SQLite's application id, which marks a file of this module."""

_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")
_OWNER_ONLY: Final = 0o600
_WAL_PAGES: Final = 256
_WAL_BYTES: Final = 1 << 20
_WAIT_SECONDS: Final = 2.0
"""The longest wait for another process's lock."""

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

_OWNERS: Final = """
ALTER TABLE records ADD COLUMN owner BLOB NOT NULL DEFAULT x''
--
CREATE INDEX records_by_owner ON records(owner, number)
--
CREATE TABLE owners(owner BLOB PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID
--
CREATE INDEX owners_by_size ON owners(bytes)
--
INSERT INTO owners SELECT x'', bytes FROM total WHERE bytes > 0
--
CREATE TRIGGER owners_come AFTER INSERT ON records BEGIN
    INSERT INTO owners VALUES (new.owner, new.cost)
        ON CONFLICT (owner) DO UPDATE SET bytes = bytes + new.cost; END
--
CREATE TRIGGER owners_go AFTER DELETE ON records BEGIN
    UPDATE owners SET bytes = bytes - old.cost WHERE owner = old.owner;
    DELETE FROM owners WHERE owner = old.owner AND bytes <= 0; END
"""
"""The changes for version 2. Older records get the empty owner."""

FileId = tuple[int, int]
"""Device and inode."""

_CORRUPT: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
"""SQLite's codes for a corrupt file."""

_REFUSALS: Final = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}
"""SQLite's codes for a lack of permission."""

_TRANSIENT: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}


class BrokenDatabaseError(Exception):
    """The database file was corrupt and is now in quarantine."""


class UnusableFileError(StoreError):
    """The database file is unusable; the failed call changed nothing."""


class Records:
    """Records in one file, created on first use. Thread-safe.

    Beyond `max_bytes`, deletes the oldest records of larger owners, then the writing owner's. Calls
    `notify` after quarantining a corrupt file.
    """

    def __init__(
        self, path: Path, max_bytes: int, noun: str, notify: Callable[[str], None]
    ) -> None:
        self._max_bytes = max_bytes
        self._noun = noun
        self._database = RecordDatabase(path, noun, notify)

    def get(self, key: bytes) -> bytes | None:
        """Return the record under `key`; None if missing or damaged. Raises StoreError."""
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

    def put(self, key: bytes, data: bytes, owner: bytes = b"") -> None:
        """Store `data` under `key`, replacing any earlier record. Raises StoreError."""
        try:
            self._put(key, data, owner)
        except BrokenDatabaseError:
            try:
                self._put(key, data, owner)
            except BrokenDatabaseError as error:
                raise StoreError(f"cannot store {self._noun}: {error}") from error

    def delete(self, key: bytes) -> bool:
        """Delete and overwrite a record; return False for an unknown key. Raises StoreError."""
        try:
            with self._database.held() as db:
                gone = db.execute("DELETE FROM records WHERE key = ?", (key,)).rowcount
                if gone:
                    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except BrokenDatabaseError:
            return False
        return gone > 0

    def close(self) -> None:
        """Close the file. The next call opens it again."""
        self._database.close()

    def _put(self, key: bytes, data: bytes, owner: bytes) -> None:
        cost = len(data) + ROW_BYTES
        with self._database.held() as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("DELETE FROM records WHERE key = ?", (key,))
            if cost <= self._max_bytes:
                self._evict_for(db, cost, owner)
                db.execute(
                    "INSERT INTO records(key, cost, proof, data, owner) VALUES (?, ?, ?, ?, ?)",
                    (key, cost, _proof_of(key, data), data, owner),
                )
            db.execute("COMMIT")

    def _evict_for(self, db: sqlite3.Connection, cost: int, owner: bytes) -> None:
        over = db.execute("SELECT bytes FROM total").fetchone()[0] + cost - self._max_bytes
        own = db.execute("SELECT bytes FROM owners WHERE owner = ?", (owner,)).fetchone() or (0,)
        while over > 0:
            oldest = _oldest_of_larger(db, owner, own[0] + cost) or _oldest(db, owner)
            oldest = oldest or _oldest_of_larger(db, owner, 0)
            if oldest is None:
                return
            db.execute("DELETE FROM records WHERE number = ?", (oldest[0],))
            over -= oldest[1]


def _oldest(db: sqlite3.Connection, owner: bytes) -> tuple[int, int] | None:
    sql = "SELECT number, cost FROM records WHERE owner = ? ORDER BY number LIMIT 1"
    found: tuple[int, int] | None = db.execute(sql, (owner,)).fetchone()
    return found


def _oldest_of_larger(db: sqlite3.Connection, owner: bytes, n_bytes: int) -> tuple[int, int] | None:
    # None if no other owner has more than `n_bytes`
    sql = "SELECT owner FROM owners WHERE owner != ? AND bytes > ? ORDER BY bytes DESC LIMIT 1"
    found = db.execute(sql, (owner, n_bytes)).fetchone()
    return None if found is None else _oldest(db, found[0])


class RecordDatabase:
    """One connection to the database file at `path`, opened on first use."""

    def __init__(self, path: Path, noun: str, notify: Callable[[str], None]) -> None:
        self._path = path
        self._noun = noun
        self._notify = notify
        self._db: sqlite3.Connection | None = None
        self._file: FileId | None = None
        self._folder: FileId | None = None
        self._mutex = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection to one thread at a time. An exception undoes the transaction.

        Raises StoreError. Quarantines a corrupt file and raises BrokenDatabaseError; the next call
        starts with an empty file.
        """
        with self._mutex:
            try:
                db = self._opened()
                yield db
            except sqlite3.Error as error:
                self._roll_back()
                if not _is_corrupt(error):
                    raise _system_fault(error, self._noun) from error
                self._quarantine(str(error))
                raise BrokenDatabaseError(str(error)) from error
            except UnicodeDecodeError as error:  # SQLite quotes stored values in its messages
                self._roll_back()
                self._quarantine("it is unreadable")
                raise BrokenDatabaseError(str(error)) from error

    def close(self) -> None:
        """Close the connection once no thread uses it."""
        with self._mutex:
            self._close()

    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            try:
                self._db = self._open()
            except (BrokenDatabaseError, sqlite3.DatabaseError) as error:
                if isinstance(error, sqlite3.Error) and not _is_corrupt(error):
                    raise
                self._quarantine(str(error))
                self._db = self._open_again()
        return self._db

    def _open_again(self) -> sqlite3.Connection:
        try:
            return self._open()
        except BrokenDatabaseError as error:
            raise UnusableFileError(f"cannot store {self._noun} on disk: {error}") from error

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
        """Create the file if missing; return its identity. Raises BrokenDatabaseError for a link
        or another kind of file."""
        self._file = None
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._require_folder()
            for suffix in _SUFFIXES:
                self._check_file(suffix)
            with suppress(FileExistsError):
                # Create it here, so that SQLite's own files inherit its permissions.
                os.close(os.open(self._path, flags, _OWNER_ONLY))
            return _file_id(self._path)
        except OSError as error:
            kind = StoreError if error.errno in _TRANSIENT else UnusableFileError
            raise kind(f"cannot store {self._noun} on disk: {error.strerror or error}") from error

    def _require_folder(self) -> None:
        """Raise UnusableFileError for a replaced folder, because SQLite would follow a link."""
        found = self._path.parent.lstat()
        here = found.st_dev, found.st_ino
        if not stat.S_ISDIR(found.st_mode) or self._folder not in (None, here):
            raise UnusableFileError(
                f"cannot store {self._noun} on disk: {self._path.parent} was replaced"
            )
        self._folder = here

    def _check_file(self, suffix: str) -> None:
        path = self._path.with_name(self._path.name + suffix)
        try:
            found = path.lstat()
        except FileNotFoundError:
            return
        plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        if not plain or found.st_uid != os.geteuid():
            raise BrokenDatabaseError(f"{path.name} is not a plain file of this user")
        if stat.S_IMODE(found.st_mode) != _OWNER_ONLY:
            path.chmod(_OWNER_ONLY)

    def _roll_back(self) -> None:
        if self._db is not None and self._db.in_transaction:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def _quarantine(self, reason: str) -> None:
        """Rename the database's files to make way for new files. Raises StoreError."""
        self._close()
        end = f".bad-{time.time_ns()}"
        try:
            if self._file is not None and _file_id(self._path) != self._file:
                return  # another process has already done it
            for suffix in _SUFFIXES:
                path = self._path.with_name(self._path.name + suffix)
                with suppress(FileNotFoundError):
                    path.rename(path.with_name(path.name + end))
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnusableFileError(
                f"cannot store {self._noun} on disk: {error.strerror or error}"
            ) from error
        self._notify(
            f"the file of {self._noun} was broken ({reason}); its new name is "
            f"{self._path.name}{end}; earlier {self._noun} are unavailable"
        )

    def _close(self) -> None:
        if self._db is not None:
            db, self._db = self._db, None
            with suppress(sqlite3.Error):
                db.close()


def _configure(db: sqlite3.Connection) -> None:
    # Raises BrokenDatabaseError for another program's file, UnusableFileError for a later version's
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA secure_delete = ON")
    db.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
    db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    db.execute("BEGIN IMMEDIATE")  # keeps other processes from creating the tables meanwhile
    try:
        _require_tables(db)
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def _require_tables(db: sqlite3.Connection) -> None:
    [application] = db.execute("PRAGMA application_id").fetchone()
    [version] = db.execute("PRAGMA user_version").fetchone()
    is_ours = application == _APPLICATION
    if is_ours and version == VERSION:
        return
    if is_ours:
        if version > VERSION:
            raise UnusableFileError(
                f"the file has format {version}, written by a later version; "
                f"expected at most {VERSION}"
            )
    elif db.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
        raise BrokenDatabaseError("it belongs to another program")
    for statement in (_OWNERS if is_ours else f"{_TABLES}--{_OWNERS}").split("--"):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {_APPLICATION}")
    db.execute(f"PRAGMA user_version = {VERSION}")


def _proof_of(key: bytes, data: bytes) -> bytes:
    # Covers the key too, to detect swapped rows
    return digest("record-v1", key, data)


def _file_id(path: Path) -> FileId:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _is_corrupt(error: sqlite3.Error) -> bool:
    return _code(error) in _CORRUPT


def _system_fault(error: sqlite3.Error, noun: str) -> StoreError:
    kind = UnusableFileError if _code(error) in _REFUSALS else StoreError
    return kind(f"cannot store {noun} on disk: {error}")


def _code(error: sqlite3.Error) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None
