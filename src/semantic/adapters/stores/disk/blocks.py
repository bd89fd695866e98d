"""Writing block files: quota reserved, temporary file, rename, index row; synced in batches.

Raises what goes wrong; `DiskStore` turns it into counters and misses.
"""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack

from semantic.adapters.stores.disk import block_rows
from semantic.adapters.stores.disk.block_file import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    encode_header,
)
from semantic.adapters.stores.disk.entries import (
    DamagedError,
    Entries,
    Entry,
    Kind,
    block_entry,
    cost_of,
    parse_block,
)
from semantic.adapters.stores.disk.files import Counts
from semantic.adapters.stores.disk.open_store import OpenStore
from semantic.domain.block_hash import BlockKey, BlockLink, Part
from semantic.domain.stored import StoredBlock


class Blocks:
    """The block files of an open store. Raises OSError or IndexBrokenError.

    The store's `write_lock` must be held by callers of `put`, `drop` and `sync`.
    """

    def __init__(self, store: OpenStore) -> None:
        self._store = store
        self._flusher = Flusher(store.entries, store.counts)

    def put(self, block: StoredBlock) -> bool:
        key = block.header.key
        if self._is_stored(key):
            return True
        if len(block.body) > MAX_BODY_BYTES:
            self._store.counts.add("dropped")
            return False
        store, entry = self._store, block_entry(key)
        cost = cost_of(HEADER_BYTES + len(block.body))
        with store.index.writing() as db:
            reservation = store.quota.reserve(
                db,
                store.folder.session,
                cost,
                f"{entry.kind}/{entry.shard}",
                tenant=block.header.link.scope.tenant,
                hashes=(key.hash, block.header.link.parent),
                evict=_is_reachable(db, block.header.link),
            )
        if reservation is None:
            store.counts.add("dropped")
            return False
        with ExitStack() as undo:
            undo.callback(store.release, reservation)
            self._write(block, entry, reservation)
            undo.pop_all()
        store.counts.add("written")
        self._flusher.add(entry)
        return True

    def sync(self) -> list[Entry]:
        """Make the blocks written since the last call survive power loss; those that failed."""
        return self._flusher.flush()

    def drop(self, entry: Entry) -> None:
        """Delete a block, file and row."""
        key = parse_block(entry.name)
        with self._store.index.writing() as db:
            self._store.entries.delete(entry)
            if key is not None:
                block_rows.drop(db, key)

    def forget_missing(self, key: BlockKey) -> None:
        """Drop the row of a block without a file."""
        with self._store.index.reading() as db:
            if block_rows.file_bytes(db, key) is None:
                return
        with self._store.index.writing() as db:
            if not self._store.entries.exists(block_entry(key)):
                block_rows.drop(db, key)

    def _is_stored(self, key: BlockKey) -> bool:
        """Whether the block has a row and its file; drops a row without its file."""
        with self._store.index.reading() as db:
            known = block_rows.file_bytes(db, key)
        if known is None:
            return False
        if self._store.entries.size(block_entry(key)) == known:
            return True
        with self._store.index.writing() as db:
            block_rows.drop(db, key)
        return False

    def _write(self, block: StoredBlock, entry: Entry, reservation: int) -> None:
        """Temporary file, rename, row: all or nothing."""
        store = self._store
        body = block.data()
        header = encode_header(block)
        with store.folder.temporary() as path:
            store.folder.create(path, header, rest=body)
            with store.folder.locked(), ExitStack() as undo:
                with store.index.writing() as db:
                    if block_rows.file_bytes(db, block.header.key) is None:
                        store.entries.install(path, entry)
                        undo.callback(store.unlink_uncommitted, entry)
                        used = 1 + block_rows.tick(db)
                        block_rows.add(db, block.header, len(block.body), used)
                    store.quota.release(db, reservation)
                undo.pop_all()
                store.stored(block.header)


class Flusher:
    """Block files that are not known to be durable. Not thread-safe: callers lock.

    Syncs the contents first, then the folders that name them; a manifest is written after both.
    """

    def __init__(self, entries: Entries, counts: Counts) -> None:
        self._entries = entries
        self._counts = counts
        self._waiting: dict[Entry, None] = {}

    def add(self, entry: Entry) -> None:
        """The block was written just now."""
        self._waiting[entry] = None

    def flush(self) -> list[Entry]:
        """Sync all that wait; those for which that failed, which must not be trusted.

        Never retried: after a failed sync the system may report the next one as successful though
        nothing was written.
        """
        waiting, self._waiting = list(self._waiting), {}
        failed = [entry for entry in waiting if not self._sync(entry)]
        bad = {shard for shard in {e.shard for e in waiting} if not self._sync_shard(shard)}
        return failed + [e for e in waiting if e.shard in bad and e not in failed]

    def _sync(self, entry: Entry) -> bool:
        try:
            self._entries.sync(entry)
        except FileNotFoundError:
            return True  # evicted meanwhile: nothing to trust
        except DamagedError:
            return False
        except OSError as error:
            self._counts.add_error("write_errors", error)
            return False
        return True

    def _sync_shard(self, shard: str) -> bool:
        try:
            self._entries.sync_shard(Kind.BLOCKS, shard)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._counts.add_error("write_errors", error)
            return False
        return True


def _is_reachable(db: sqlite3.Connection, link: BlockLink) -> bool:
    """Whether the parent is stored: without it the block is useless, and evicts nothing."""
    if link.parent == link.scope.root:
        return True
    return block_rows.file_bytes(db, BlockKey(link.parent, Part.FULL)) is not None
