"""Limits on a store's folder: the bytes of its contents, and the bytes written per day.

Counts all models, agents and processes together. Evicts quarantined files first, then blocks, then
agents.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date

from semantic.adapters.stores.disk import agent_rows, block_rows
from semantic.adapters.stores.disk.entries import (
    MAX_NUMBER,
    PAGE,
    Entries,
    block_entry,
    manifest_entry,
    unescape_name,
)
from semantic.adapters.stores.disk.files import Counts
from semantic.adapters.stores.disk.folder import Folder, read_small
from semantic.adapters.stores.disk.index import Index
from semantic.adapters.stores.disk.schema import number, one, whole
from semantic.domain.block_hash import BlockHash
from semantic.domain.errors import StoreError
from semantic.domain.fair_share import equal_part, pins_hold
from semantic.domain.stored import Pinned, Wear

_FIXED = 10 * PAGE
"""Bytes of the folder itself and its small files."""
SESSION = 3 * PAGE
"""Bytes of a process's folder for unfinished files."""


class Quota:
    """Keeps the folder within `max_bytes`. Call each method in a transaction of the index."""

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
        """Return the bytes that count against the quota."""
        files = number(db, "bytes")
        shards = one(db, "SELECT count(*) FROM shards")
        return files + shards * PAGE + _FIXED + self._index.cost()

    def pinned(self, db: sqlite3.Connection) -> int:
        """Return the bytes of the blocks and manifests of pinned agents."""
        return number(db, "pinned")

    def pinned_of(self, db: sqlite3.Connection, tenant: bytes) -> Pinned:
        _, n_bytes = agent_rows.bytes_of(db, tenant)
        return Pinned(n_bytes, equal_part(self.max_bytes, self._others(db, tenant)))

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
        """Reserve `cost` bytes for a tenant's file in `shard`; return the reservation's id.

        Evicts entries as needed, but never `hashes` and `agent`. Returns None if the file does not
        fit.
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
        """Delete a reservation, after the write."""
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
        """Evict until `needed` more bytes of a tenant fit. If they cannot fit, evict nothing and
        return False.

        Evicts entries of larger tenants before the tenant's own. Without a `tenant`, evicts only
        unpinned entries.
        """
        if self.used(db) + needed <= self.max_bytes:
            return True
        own, own_pinned = (-1, 0) if tenant is None else agent_rows.bytes_of(db, tenant)
        pins_stay = tenant is None or pins_hold(
            self._others(db, tenant), is_public=tenant == self._public
        )
        least = self._minimum(db, tenant, own + needed, own_pinned, pins_stay=pins_stay)
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
                if not pins_stay and other != tenant and evict_of(other, pinned=True):
                    return True
            return tenant is not None and evict_of(tenant, pinned=False)

        while self.used(db) + needed > self.max_bytes:
            if not self._evict_quarantined(db, delete=delete) and not evict():
                return False
        return True

    def _others(self, db: sqlite3.Connection, tenant: bytes) -> int:
        others = "SELECT count(*) FROM tenants WHERE bytes > 0 AND tag NOT IN (?, ?)"
        return whole(db.execute(others, (tenant, self._public)).fetchone()[0])

    def _minimum(
        self,
        db: sqlite3.Connection,
        tenant: bytes | None,
        then: int,
        own_pinned: int,
        *,
        pins_stay: bool,
    ) -> int:
        # `then` is the tenant's bytes after the write, `own_pinned` its pinned bytes.
        files = number(db, "bytes")
        fixed = one(db, "SELECT coalesce(sum(cost), 0) FROM others WHERE name NOT LIKE 'bad/%'")
        fixed += one(db, "SELECT coalesce(sum(cost), 0) FROM reservations")
        kept = self.pinned(db)
        if tenant is not None:
            others = (
                "SELECT coalesce(sum(max(min(bytes, ?), pinned * ?)), 0) FROM tenants"
                " WHERE tag != ?"
            )
            kept = own_pinned + whole(db.execute(others, (then, pins_stay, tenant)).fetchone()[0])
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
                    continue  # it stays and counts: try the next file
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
        # Delete the file before its row: a file without a row would not count, and another process
        # could write the file again just before the deletion.
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
    """Delete an agent's manifests. An interruption leaves the newest manifest."""
    for generation in reversed(agent_rows.generations(db, agent)):
        entries.delete(manifest_entry(agent, generation))


logger = logging.getLogger("semantic.store")

NAME = "written.json"
MOST_DAYS = 31
"""The maximum number of days in the ledger's file."""
SETTLE_BYTES = 64 << 20
SETTLE_SECONDS = 600.0
"""The ledger writes its file after this many bytes, or this many seconds."""
_MOST_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """The maximum number of bytes to write per day, and the total for which the drive is rated."""

    max_a_day: int | None = None
    rated: int | None = None


@dataclass(frozen=True, slots=True)
class _Written:
    since: str
    total: int = 0
    days: Mapping[str, int] = field(default_factory=dict)

    def plus(self, more: Mapping[str, int], day: str) -> _Written:
        days = Counter(self.days)
        days.update(more)
        kept = {*sorted(days)[-MOST_DAYS:], day} & days.keys()
        total = min(self.total + sum(more.values()), MAX_NUMBER)
        return _Written(self.since, total, {one: days[one] for one in sorted(kept)})


class WriteLedger:
    """Counts the bytes that a store writes on each day. Raises nothing. Thread-safe.

    Saves the count only occasionally, so `kill -9` loses some minutes.
    """

    def __init__(
        self,
        folder: Folder,
        limits: WriteLimits,
        *,
        durable: bool = True,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` returns Unix time; `clock` never jumps."""
        self._folder = folder
        self._limits = limits
        self._durable = durable
        self._now = now
        self._clock = clock
        self._mutex = threading.Lock()
        self._known = self._read(_Written(self._day()))
        self._pending: Counter[str] = Counter()
        self._settled = clock()
        self._reported = ""
        folder.on_written = self.add

    def add(self, n_bytes: int) -> None:
        """Count written bytes."""
        with self._mutex:
            self._pending[self._day()] += n_bytes

    def wear(self) -> Wear:
        with self._mutex:
            pending, known = Counter(self._pending), self._known
        day, limits = self._day(), self._limits
        found = known.plus(pending, day)
        return Wear(day, found.since, found.total, found.days, limits.max_a_day, limits.rated)

    @property
    def holds_back(self) -> bool:
        """See `CacheStorePort.holds_back`."""
        most, day = self._limits.max_a_day, self._day()
        if most is None:
            return False
        with self._mutex:
            is_reached = self._known.days.get(day, 0) + self._pending[day] >= most
        if is_reached and self._reported != day:
            self._reported = day
            logger.warning(
                "the store has written %.3g GiB today, its daily limit: until midnight it writes "
                "only the ends of turns",
                most / (1 << 30),
            )
        return is_reached

    def settle_if_due(self) -> None:
        """Save the byte counts if many bytes or much time have passed since the last save."""
        with self._mutex:
            is_due = (
                self._pending.total() >= SETTLE_BYTES
                or self._clock() - self._settled >= SETTLE_SECONDS
            )
        if is_due:
            self.settle()

    def settle(self) -> None:
        """Add the bytes written since the last save to the counts in the ledger's file."""
        with self._mutex:
            self._settled = self._clock()
            counted = Counter(self._pending)
        if not counted.total():
            return
        with suppress(OSError), self._folder.locked():
            written = self._read(self._known).plus(counted, self._day())
            self._folder.replace(NAME, _encoded(written), sync=self._durable)
            with self._mutex:
                self._known = written
                self._pending -= counted

    def _day(self) -> str:
        return date.fromtimestamp(self._now()).isoformat()  # noqa: DTZ012 - the operator's own day

    def _read(self, otherwise: _Written) -> _Written:
        try:
            data = read_small(self._folder.root / NAME, self._folder.files, _MOST_FILE_BYTES)
            return _decoded(data)
        except (OSError, StoreError, ValueError, RecursionError):
            return otherwise


def _encoded(written: _Written) -> bytes:
    fields = {"since": written.since, "total": written.total, "days": dict(written.days)}
    return json.dumps(fields).encode() + b"\n"


def _decoded(data: bytes) -> _Written:
    match json.loads(data):
        case {"since": str(since), "total": int(total), "days": dict(days)}:
            found = _Written(_date(since), _count(total))
            return replace(found, days={_date(day): _count(n) for day, n in days.items()})
        case _:
            raise ValueError("expected the fields since, total and days")


def _date(text: str) -> str:
    return date.fromisoformat(text).isoformat()


def _count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"expected a number of bytes, got {value!r:.40}")
    return value
