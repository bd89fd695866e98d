"""The disk quota: what everything in the folder costs, and LRU eviction when more is needed.

Counts all models, agents and processes together, unfinished and quarantined files and the index
included. Evicts quarantined files first, then blocks, then agents, those of the tenant that has
most. A pin holds against its own tenant, and against others up to an equal part of the quota.
Public prefixes count as no tenant: of one beside them all pins hold.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

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
from semantic.adapters.stores.disk.schema import number, one, whole
from semantic.domain.block_hash import BlockHash
from semantic.domain.stored import Pinned

_FIXED = 10 * PAGE
"""The folder, its four subfolders, FORMAT, secret and lock, and two pages to spare."""
SESSION = 3 * PAGE
"""A process's folder for unfinished files, with its lock file."""


class Quota:
    """At most `max_bytes` in the folder. Call every method inside a transaction of the index."""

    def __init__(
        self, index: Index, entries: Entries, counts: Counts, max_bytes: int, *, public: bytes
    ) -> None:
        """`public` is the tag of public prefixes."""
        self.max_bytes = max_bytes
        self._public = public
        self._index = index
        self._entries = entries
        self._counts = counts

    def used(self, db: sqlite3.Connection) -> int:
        """Bytes that the whole folder counts for."""
        files = number(db, "bytes")
        shards = one(db, "SELECT count(*) FROM shards")
        return files + shards * PAGE + _FIXED + self._index.cost()

    def pinned(self, db: sqlite3.Connection) -> int:
        """Bytes of the blocks and manifests of pinned agents."""
        return number(db, "pinned")

    def pinned_of(self, db: sqlite3.Connection, tenant: bytes) -> Pinned:
        _, n_bytes = agent_rows.bytes_of(db, tenant)
        n_others = self._others(db, tenant)
        return Pinned(n_bytes, self.max_bytes // (1 + n_others) if n_others else None)

    def reserve(
        self,
        db: sqlite3.Connection,
        session: str,
        cost: int,
        shard: str,
        *,
        tenant: bytes,
        hashes: Sequence[BlockHash] = (),
        agent: bytes | None = None,
        evict: bool = True,
    ) -> int | None:
        """Reserve `cost` bytes for a tenant's file in `shard`; the id of the reservation.

        Evicts as needed, but neither `hashes` nor `agent`. None when the file does not fit beside
        what is kept for others and what its tenant has pinned, or, without `evict`, beside
        everything stored.
        """
        known = db.execute("SELECT 1 FROM shards WHERE name = ?", (shard,)).fetchone()
        needed = cost if known else cost + PAGE
        if not evict and self.used(db) + needed > self.max_bytes:
            return None
        if not self.evict_until_fits(db, needed, tenant=tenant, hashes=hashes, agent=agent):
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
        tenant: bytes | None = None,
        hashes: Sequence[BlockHash] = (),
        agent: bytes | None = None,
        delete: bool = True,
    ) -> bool:
        """Evict until `needed` more bytes of a tenant fit: quarantined files, then what the largest
        of the tenants has that are then larger than this one, then its own that is not pinned.

        Of each tenant blocks before agents, and what is not pinned before what is. Without a
        `tenant` of all, the largest first, but nothing that is pinned. False, with nothing evicted,
        when the bytes do not fit. Without `delete` only the index is changed, so that a rolled-back
        transaction has evicted nothing.
        """
        if self.used(db) + needed <= self.max_bytes:
            return True
        own, own_pinned = (-1, 0) if tenant is None else agent_rows.bytes_of(db, tenant)
        pins_hold = tenant is None or (tenant == self._public and self._others(db, tenant) == 1)
        least = self._minimum(db, tenant, own + needed, own_pinned, pins_hold=pins_hold)
        if least + needed > self.max_bytes:
            return False

        def evict_of(other: bytes, *, pinned: bool) -> bool:
            return self._evict_block(
                db, other, hashes, pinned=pinned, delete=delete
            ) or self._evict_agent(db, other, agent, pinned=pinned, delete=delete)

        def evict() -> bool:
            for other in agent_rows.larger(db, own + needed if tenant is not None else own):
                if evict_of(other, pinned=False):
                    return True
                if not pins_hold and other != tenant and evict_of(other, pinned=True):
                    return True
            return tenant is not None and evict_of(tenant, pinned=False)

        while self.used(db) + needed > self.max_bytes:
            if not self._evict_quarantined(db, delete=delete) and not evict():
                return False
        return True

    def _others(self, db: sqlite3.Connection, tenant: bytes) -> int:
        """How many other tenants have bytes."""
        others = "SELECT count(*) FROM tenants WHERE bytes > 0 AND tag NOT IN (?, ?)"
        return whole(db.execute(others, (tenant, self._public)).fetchone()[0])

    def _minimum(
        self,
        db: sqlite3.Connection,
        tenant: bytes | None,
        then: int,
        own_pinned: int,
        *,
        pins_hold: bool,
    ) -> int:
        """Bytes used once everything is evicted that may be for a tenant.

        It will have `then` bytes, and `own_pinned` of its are pinned. `pins_hold`: nothing that is
        pinned may be.
        """
        files = number(db, "bytes")
        fixed = one(db, "SELECT coalesce(sum(cost), 0) FROM others WHERE name NOT LIKE 'bad/%'")
        fixed += one(db, "SELECT coalesce(sum(cost), 0) FROM reservations")
        kept = self.pinned(db)
        if tenant is not None:
            others = (
                "SELECT coalesce(sum(max(min(bytes, ?), pinned * ?)), 0) FROM tenants"
                " WHERE tag != ?"
            )
            kept = own_pinned + whole(db.execute(others, (then, pins_hold, tenant)).fetchone()[0])
        return self.used(db) - files + fixed + kept

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
        self,
        db: sqlite3.Connection,
        tenant: bytes,
        spared: Sequence[BlockHash],
        *,
        pinned: bool,
        delete: bool,
    ) -> bool:
        victim = block_rows.lru_victim(db, tenant, spared, pinned=pinned)
        if victim is None:
            return False
        # The file before its row: a file without a row would no longer count, and could be
        # deleted just after another process has written it again.
        if delete:
            self._entries.delete(block_entry(victim.key))
            self._counts.add("evicted")
        block_rows.drop(db, victim.key)
        return True

    def _evict_agent(
        self,
        db: sqlite3.Connection,
        tenant: bytes,
        spared: bytes | None,
        *,
        pinned: bool,
        delete: bool,
    ) -> bool:
        agent = agent_rows.lru_victim(db, tenant, spared, pinned=pinned)
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
