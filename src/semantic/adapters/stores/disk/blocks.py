"""The blocks of the disk store: written once, found by the index, proven when they are read."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

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
    MismatchError,
    NewerFormatError,
    block_entry,
    cost_of,
    parse_block,
)
from semantic.adapters.stores.disk.files import Counts
from semantic.adapters.stores.disk.open_store import OpenStore
from semantic.domain.block_hash import BlockHash, BlockKey, BlockLink, Part
from semantic.domain.stored import BlockHeader, BlockRead, Found, StoredBlock

T = TypeVar("T")

_UNREADABLE = {errno.EACCES, errno.EPERM, errno.EIO}
"""A file with these would be a miss for ever: it makes room for being written anew."""


class Blocks:
    """See `CacheStorePort`; nothing here raises for what goes wrong with the disk."""

    def __init__(self, store: OpenStore) -> None:
        self._store = store
        self._counts = store.counts
        self._flusher = Flusher(store.entries, store.counts)

    def put(self, block: StoredBlock) -> bool:
        """See `CacheStorePort.put`."""
        with self._store.changing:
            try:
                return self._store.on_index(lambda: self._put(block))
            except OSError as error:
                self._counts.add_error("write_errors", error)
                return False

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        """See `CacheStorePort.find`."""
        try:
            return self._store.on_index(lambda: self._find(keys))
        except OSError as error:
            self._counts.add_error("read_errors", error)
            return {}

    def children(
        self, parent: BlockHash, part: Part, like: Sequence[int] | None = None
    ) -> Sequence[BlockHeader]:
        """See `CacheStorePort.children`."""
        try:
            return self._store.on_index(lambda: self._children(parent, part, like))
        except OSError as error:
            self._counts.add_error("read_errors", error)
            return []

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        """See `CacheStorePort.read_into`."""
        return self._store.reader.each(self._read_into, reads)

    def read(self, header: BlockHeader) -> bytes | None:
        """See `CacheStorePort.read`."""
        return self._proven(header.key, lambda: self._store.reader.body(header))

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `CacheStorePort.touch`."""
        try:
            self._store.on_index(lambda: self._touch(keys))
        except OSError as error:
            self._counts.add_error("write_errors", error)

    def flush(self) -> None:
        """Bring all blocks onto the drive; those for which that fails are dropped."""
        if not self._store.durable:
            return
        with self._store.changing:
            for entry in self._flusher.flush():
                self._counts.add("dropped")
                try:
                    self._store.on_index(partial(self._drop, entry))
                except OSError as error:
                    self._counts.add_error("write_errors", error)

    # Writing

    def _put(self, block: StoredBlock) -> bool:
        key = block.header.key
        if self._is_there(key):
            return True
        if len(block.body) > MAX_BODY_BYTES:
            self._counts.add("dropped")
            return False
        store, entry = self._store, block_entry(key)
        cost = cost_of(HEADER_BYTES + len(block.body))
        with store.index.writing() as db:
            reservation = store.room.reserve(
                db,
                store.folder.session,
                cost,
                f"{entry.kind}/{entry.shard}",
                hashes=(key.hash, block.header.link.parent),
                evict=_is_reachable(db, block.header.link),
            )
        if reservation is None:
            self._counts.add("dropped")
            return False
        with ExitStack() as undo:
            undo.callback(store.release, reservation)
            self._write(block, entry, reservation)
            undo.pop_all()
        self._counts.add("written")
        self._flusher.add(entry)
        return True

    def _is_there(self, key: BlockKey) -> bool:
        """Whether the block is known and its file in place; forgets it when that is not so."""
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
        """Write aside, rename, and remember: all of it or nothing."""
        store = self._store
        header = encode_header(block)
        with store.folder.temporary() as path:
            store.folder.create(path, header, rest=block.body)
            with store.folder.locked(), ExitStack() as undo:
                with store.index.writing() as db:
                    if block_rows.file_bytes(db, block.header.key) is None:
                        store.entries.install(path, entry)
                        undo.callback(store.delete_unremembered, entry)
                        used = 1 + block_rows.tick(db)
                        block_rows.add(db, block.header, len(block.body), used)
                    store.room.release(db, reservation)
                undo.pop_all()

    def _touch(self, keys: Sequence[BlockKey]) -> None:
        with self._store.index.writing() as db:
            block_rows.touch(db, keys)

    def _drop(self, entry: Entry) -> None:
        key = parse_block(entry.name)
        with self._store.index.writing() as db:
            self._store.entries.delete(entry)
            if key is not None:
                block_rows.drop(db, key)

    # Reading

    def _find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        with self._store.index.reading() as db:
            return block_rows.find(db, keys)

    def _children(
        self, parent: BlockHash, part: Part, like: Sequence[int] | None
    ) -> Sequence[BlockHeader]:
        with self._store.index.reading() as db:
            return block_rows.children(db, parent, part, like)

    def _read_into(self, read: BlockRead) -> bool:
        def fill() -> bool:
            self._store.reader.fill(read)
            return True

        return self._proven(read.header.key, fill) is not None

    def _proven(self, key: BlockKey, action: Callable[[], T]) -> T | None:
        """What `action` reads, or None for whatever reason, which is counted."""
        try:
            result = action()
        except DamagedError as damage:
            self._store.put_aside(block_entry(key), damage)
        except NewerFormatError:
            self._counts.add("newer format")
        except MismatchError as error:
            self._counts.add("mismatches", str(error))
        except OSError as error:
            self._counts.add_error("read_errors", error)
            if isinstance(error, FileNotFoundError):
                self._forget(key)
            elif error.errno in _UNREADABLE and self._is_unreadable(key):
                self._store.put_aside(block_entry(key), DamagedError("unreadable"))
        else:
            self._counts.add("hits")
            return result
        self._counts.add("misses")
        return None

    def _is_unreadable(self, key: BlockKey) -> bool:
        """Whether reading the file fails again: what failed once may have been passing."""
        try:
            self._store.reader.check(key)
        except OSError as error:
            return error.errno in _UNREADABLE
        except (DamagedError, NewerFormatError):
            return False  # the next read says so
        return False

    def _forget(self, key: BlockKey) -> None:
        """The block's file was not found: neither shall its row be."""
        try:
            self._store.on_index(lambda: self._forget_if_gone(key))
        except OSError as error:
            self._counts.add_error("write_errors", error)

    def _forget_if_gone(self, key: BlockKey) -> None:
        with self._store.index.reading() as db:
            if block_rows.file_bytes(db, key) is None:
                return
        with self._store.index.writing() as db:
            if not self._store.entries.exists(block_entry(key)):
                block_rows.drop(db, key)


def _is_reachable(db: sqlite3.Connection, link: BlockLink) -> bool:
    """Whether the block before is there: without it this one is of no use, and worth no other."""
    if link.parent == link.scope.root:
        return True
    return block_rows.file_bytes(db, BlockKey(link.parent, Part.FULL)) is not None


class Flusher:
    """Remembers which blocks are not known to be on the drive."""

    def __init__(self, entries: Entries, counts: Counts) -> None:
        self._entries = entries
        self._counts = counts
        self._waiting: dict[Entry, None] = {}

    def add(self, entry: Entry) -> None:
        """The block was written just now."""
        self._waiting[entry] = None

    def flush(self) -> list[Entry]:
        """Sync all that waits. Those for which that failed are not to be believed any more.

        After a failed sync the system may say that the next one went well though nothing was
        written: it is never tried again.
        """
        waiting, self._waiting = list(self._waiting), {}
        failed = [entry for entry in waiting if not self._sync(entry)]
        lost = {shard for shard in {e.shard for e in waiting} if not self._sync_shard(shard)}
        return failed + [e for e in waiting if e.shard in lost and e not in failed]

    def _sync(self, entry: Entry) -> bool:
        try:
            self._entries.sync(entry)
        except FileNotFoundError:
            return True  # evicted since: nothing is there to be believed
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
