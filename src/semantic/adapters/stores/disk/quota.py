"""The disk quota: what everything in the folder costs, and LRU eviction when more is needed.

Counts all models, agents and processes together, unfinished and quarantined files and the index
included. Evicts quarantined files first, then blocks, then agents; never what is pinned.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

from semantic.adapters.stores.disk import agent_rows, block_rows
from semantic.adapters.stores.disk.entries import (
    PAGE,
    Entries,
    block_entry,
    manifest_entry,
    unescape_name,
)
from semantic.adapters.stores.disk.files import Counts
from semantic.adapters.stores.disk.index import Index
from semantic.adapters.stores.disk.schema import number, one
from semantic.domain.block_hash import BlockHash

_FIXED = 10 * PAGE
"""The folder, its four subfolders, FORMAT, secret and lock, and two pages to spare."""
SESSION = 3 * PAGE
"""A process's folder for unfinished files, with its lock file."""


class Quota:
    """At most `max_bytes` in the folder. Call every method inside a transaction of the index."""

    def __init__(self, index: Index, entries: Entries, counts: Counts, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._index = index
        self._entries = entries
        self._counts = counts

    def used(self, db: sqlite3.Connection) -> int:
        """Bytes that the whole folder counts for."""
        files = number(db, "bytes")
        shards = one(db, "SELECT count(*) FROM shards")
        return files + shards * PAGE + _FIXED + self._index.cost()

    def pinned(self, db: sqlite3.Connection) -> int:
        """Bytes that are not evicted: blocks and manifests of pinned agents."""
        return number(db, "pinned")

    def reserve(
        self,
        db: sqlite3.Connection,
        session: str,
        cost: int,
        shard: str,
        *,
        hashes: Sequence[BlockHash] = (),
        agent: bytes | None = None,
        evict: bool = True,
    ) -> int | None:
        """Reserve `cost` bytes for a file in `shard`; the id of the reservation.

        Evicts as needed, but neither `hashes` nor `agent`. None when the file does not fit beside
        what is pinned, or, without `evict`, beside everything stored.
        """
        known = db.execute("SELECT 1 FROM shards WHERE name = ?", (shard,)).fetchone()
        needed = cost if known else cost + PAGE
        if not evict and self.used(db) + needed > self.max_bytes:
            return None
        if not self.evict_until_fits(db, needed, hashes=hashes, agent=agent):
            return None
        db.execute("INSERT OR IGNORE INTO shards VALUES (?)", (shard,))
        return db.execute(
            "INSERT INTO reservations(session, cost) VALUES (?, ?)", (session, cost)
        ).lastrowid

    def release(self, db: sqlite3.Connection, reservation: int) -> None:
        """End a reservation: its file is installed and counted, or was given up."""
        db.execute("DELETE FROM reservations WHERE id = ?", (reservation,))

    def evict_until_fits(
        self,
        db: sqlite3.Connection,
        needed: int,
        *,
        hashes: Sequence[BlockHash] = (),
        agent: bytes | None = None,
        delete: bool = True,
    ) -> bool:
        """Evict until `needed` more bytes fit: quarantined files, then blocks, then agents.

        False, with nothing evicted, when they do not fit beside what is pinned. Without `delete`
        only the index is changed, so that a rolled-back transaction has evicted nothing.
        """
        if self.used(db) + needed <= self.max_bytes:
            return True
        if self._minimum(db) + needed > self.max_bytes:
            return False
        steps: tuple[Callable[[], bool], ...] = (
            lambda: self._evict_quarantined(db, delete=delete),
            lambda: self._evict_block(db, hashes, delete=delete),
            lambda: self._evict_agent(db, agent, delete=delete),
        )
        while self.used(db) + needed > self.max_bytes:
            if not any(step() for step in steps):
                return False
        return True

    def _minimum(self, db: sqlite3.Connection) -> int:
        """Bytes used once everything evictable is evicted."""
        files = number(db, "bytes")
        fixed = one(db, "SELECT coalesce(sum(cost), 0) FROM others WHERE name NOT LIKE 'bad/%'")
        fixed += one(db, "SELECT coalesce(sum(cost), 0) FROM reservations")
        return self.used(db) - files + fixed + self.pinned(db)

    def _evict_quarantined(self, db: sqlite3.Connection, *, delete: bool) -> bool:
        rows = db.execute("SELECT name FROM others WHERE name LIKE 'bad/%' ORDER BY name")
        for row in rows.fetchall():
            if delete:
                try:
                    self._entries.delete_quarantined(
                        unescape_name(str(row[0])).removeprefix("bad/")
                    )
                except OSError as error:
                    self._counts.add_error("write_errors", error)
                    continue  # it remains, and counts; try the next
            db.execute("DELETE FROM others WHERE name = ?", row)
            return True
        return False

    def _evict_block(
        self, db: sqlite3.Connection, spared: Sequence[BlockHash], *, delete: bool
    ) -> bool:
        victim = block_rows.lru_victim(db, spared)
        if victim is None:
            return False
        # The file before its row: a file without a row would no longer count, and could be
        # deleted just after another process has written it again.
        if delete:
            self._entries.delete(block_entry(victim.key))
            self._counts.add("evicted")
        block_rows.drop(db, victim.key)
        return True

    def _evict_agent(self, db: sqlite3.Connection, spared: bytes | None, *, delete: bool) -> bool:
        agent = agent_rows.lru_victim(db, spared)
        if agent is None:
            return False
        if delete:
            delete_manifests(db, self._entries, agent)
            self._counts.add("evicted manifests")
        agent_rows.drop(db, agent)
        return True


def delete_manifests(db: sqlite3.Connection, entries: Entries, agent: bytes) -> None:
    """Delete an agent's files, the newest last: if interrupted, the agent is unchanged."""
    for generation in reversed(agent_rows.generations(db, agent)):
        entries.delete(manifest_entry(agent, generation))
