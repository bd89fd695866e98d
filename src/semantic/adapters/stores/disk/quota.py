"""The budget: what everything in the folder takes, and what goes first when more is wanted.

Counts all models, agents and processes together, unfinished and damaged files and the index
included. Decides what goes; whoever calls says how a file is deleted.
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
    unshown,
)
from semantic.adapters.stores.disk.files import Counts
from semantic.adapters.stores.disk.index import Index
from semantic.adapters.stores.disk.schema import one
from semantic.domain.block_hash import BlockHash

_FIXED = 10 * PAGE
"""The folder, the four in it, FORMAT, secret and lock, with two to spare."""
SESSION = 3 * PAGE
"""A process's folder for unfinished files with its lock."""


class Room:
    """Makes room inside `max_bytes`. All calls belong into a transaction of the index."""

    def __init__(self, index: Index, entries: Entries, counts: Counts, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._index = index
        self._entries = entries
        self._counts = counts

    def used(self, db: sqlite3.Connection) -> int:
        """Bytes that the whole folder counts for."""
        files = one(db, "SELECT value FROM numbers WHERE name = 'bytes'")
        shards = one(db, "SELECT count(*) FROM shards")
        return files + shards * PAGE + _FIXED + self._index.cost()

    def pinned(self, db: sqlite3.Connection) -> int:
        """Bytes that may not go: of pinned agents' blocks and manifests."""
        blocks = one(db, "SELECT coalesce(sum(cost), 0) FROM blocks WHERE pinned")
        manifests = one(
            db,
            "SELECT coalesce(sum(m.cost), 0) FROM manifests AS m"
            " JOIN agents AS a ON a.id = m.agent WHERE a.pinned",
        )
        return blocks + manifests

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
        """Make room for a file of `cost` in `shard` and keep it; the reservation's number.

        None when it does not fit beside pins, or, without `evict`, not beside all that is there.
        `hashes` and `agent` do not go for it.
        """
        known = db.execute("SELECT 1 FROM shards WHERE name = ?", (shard,)).fetchone()
        wanted = cost if known else cost + PAGE
        if not evict and self.used(db) + wanted > self.max_bytes:
            return None
        if not self.make(db, wanted, hashes=hashes, agent=agent):
            return None
        db.execute("INSERT OR IGNORE INTO shards VALUES (?)", (shard,))
        return db.execute(
            "INSERT INTO reservations(session, cost) VALUES (?, ?)", (session, cost)
        ).lastrowid

    def release(self, db: sqlite3.Connection, reservation: int) -> None:
        """The file is in place and counted, or will never be."""
        db.execute("DELETE FROM reservations WHERE id = ?", (reservation,))

    def make(
        self,
        db: sqlite3.Connection,
        wanted: int,
        *,
        hashes: Sequence[BlockHash] = (),
        agent: bytes | None = None,
        delete: bool = True,
    ) -> bool:
        """Evict until `wanted` bytes more fit. Nothing goes when they cannot fit beside pins.

        Damaged files that were kept go first, then blocks, then agents. Without `delete` only
        the index is changed, so that the transaction can be undone.
        """
        if self.used(db) + wanted <= self.max_bytes:
            return True
        if self._least(db) + wanted > self.max_bytes:
            return False
        steps: tuple[Callable[[], bool], ...] = (
            lambda: self._evict_bad(db, delete=delete),
            lambda: self._evict_block(db, hashes, delete=delete),
            lambda: self._evict_agent(db, agent, delete=delete),
        )
        while self.used(db) + wanted > self.max_bytes:
            if not any(step() for step in steps):
                return False
        return True

    def _least(self, db: sqlite3.Connection) -> int:
        """What is still used when all that may go is gone."""
        may_go = one(db, "SELECT coalesce(sum(cost), 0) FROM others WHERE name LIKE 'bad/%'")
        may_go += one(db, "SELECT coalesce(sum(cost), 0) FROM blocks")
        may_go += one(db, "SELECT coalesce(sum(cost), 0) FROM manifests")
        return self.used(db) - may_go + self.pinned(db)

    def _evict_bad(self, db: sqlite3.Connection, *, delete: bool) -> bool:
        rows = db.execute("SELECT name FROM others WHERE name LIKE 'bad/%' ORDER BY name")
        for row in rows.fetchall():
            if delete:
                try:
                    self._entries.delete_bad(unshown(str(row[0])).removeprefix("bad/"))
                except OSError as error:
                    self._counts.add_error("write_errors", error)
                    continue  # it stays, and counts; others go
            db.execute("DELETE FROM others WHERE name = ?", row)
            return True
        return False

    def _evict_block(
        self, db: sqlite3.Connection, spared: Sequence[BlockHash], *, delete: bool
    ) -> bool:
        victim = block_rows.next_victim(db, spared)
        if victim is None:
            return False
        # The file goes before its row: one whose row is gone already would no longer count, and
        # could be deleted just when another process has written it again.
        if delete:
            self._entries.delete(block_entry(victim.key))
            self._counts.add("evicted")
        block_rows.drop(db, victim.key)
        return True

    def _evict_agent(self, db: sqlite3.Connection, spared: bytes | None, *, delete: bool) -> bool:
        agent = agent_rows.next_victim(db, spared)
        if agent is None:
            return False
        if delete:
            delete_manifests(db, self._entries, agent)
            self._counts.add("evicted manifests")
        agent_rows.drop(db, agent)
        return True


def delete_manifests(db: sqlite3.Connection, entries: Entries, agent: bytes) -> None:
    """Delete an agent's files, the newest last: interrupted, the agent is as it was."""
    for generation in reversed(agent_rows.generations(db, agent)):
        entries.delete(manifest_entry(agent, generation))
