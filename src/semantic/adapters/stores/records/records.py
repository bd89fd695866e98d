"""Bytes by their keys in one SQLite file, inside one budget of bytes. They survive the process.

Every row has a proof; one that does not fit is no row. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final

from semantic.adapters.stores.records.database import BrokenDatabaseError, RecordDatabase
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
