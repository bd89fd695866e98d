"""Writes blocks and manifests.

A manifest becomes durable after its blocks.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from semantic.adapters.stores.disk import agent_rows, block_rows
from semantic.adapters.stores.disk.block_file import HEADER_BYTES, MAX_BODY_BYTES, encode_header
from semantic.adapters.stores.disk.entries import (
    MAX_NUMBER,
    DamagedError,
    Entries,
    Entry,
    Kind,
    NewerFormatError,
    agent_key,
    block_entry,
    cost_of,
    manifest_entry,
    parse_block,
)
from semantic.adapters.stores.disk.files import Counts
from semantic.adapters.stores.disk.manifest_file import (
    FiledManifest,
    ManifestFile,
    encode_manifest,
    read_manifest,
)
from semantic.adapters.stores.disk.open_store import OpenStore
from semantic.adapters.stores.disk.quota import delete_manifests
from semantic.adapters.stores.disk.schema import IndexBrokenError
from semantic.domain.block_hash import BlockHash, BlockKey, BlockLink, Part
from semantic.domain.prefix import continues, ends_of_turn
from semantic.domain.stored import Manifest, StoredBlock

_TRIES = 64
"""The number of lost races against other processes after which a call fails."""
_GENERATIONS = 2
"""The number of manifests to keep per agent: the newest, and a spare."""


class QuotaExceededError(Exception):
    """A manifest does not fit into the quota."""


class Agents:
    """The manifests of an open store. Methods raise OSError or IndexBrokenError. Callers of
    `save` and `remove` hold `write_lock`."""

    def __init__(self, store: OpenStore) -> None:
        self._store = store
        self._counts = store.counts

    def save(self, manifest: Manifest) -> bool:
        """Write `manifest` as its agent's next generation. Returns False after too many lost
        races. Raises QuotaExceededError."""
        return any(self._store.with_recovery(lambda: self._save(manifest)) for _ in range(_TRIES))

    def newest(self, key: bytes) -> Manifest | None:
        """Return an agent's newest intact manifest, or None."""
        for _ in range(_TRIES):
            generations = self._store.with_recovery(lambda: self._generations(key))
            found = self._first_sound(key, generations)
            if found is not None or generations == self._generations(key):
                return None if found is None else found.manifest
        return None

    def remove(self, key: bytes) -> bool:
        """Delete the agent's manifests; return False if the agent has none."""
        store = self._store
        with store.index.writing() as db:
            if not agent_rows.generations(db, key):
                return False
            delete_manifests(db, store.entries, key)
            agent_rows.drop(db, key)
        if store.durable:
            entry = manifest_entry(key, 0)
            store.entries.sync_shard(entry.kind, entry.shard)
        return True

    # Saving

    def _save(self, manifest: Manifest) -> bool:
        """Save the manifest; return False if another process was first."""
        store = self._store
        key = agent_key(manifest.scope, manifest.agent_id)
        with store.index.writing() as db:
            generation = self._next_generation(agent_rows.generations(db, key), key)
            order = min(1 + block_rows.tick(db), MAX_NUMBER)
            filed = FiledManifest(replace(manifest, generation=generation), order)
            try:
                data = encode_manifest(filed)
            except ValueError:
                raise QuotaExceededError from None
            entry = manifest_entry(key, generation)
            reservation = store.quota.reserve(
                db,
                store.folder.session,
                cost_of(len(data)),
                f"{entry.kind}/{entry.shard}",
                tenant=manifest.scope.tenant,
                agent=key,
            )
        if reservation is None:
            raise QuotaExceededError
        with ExitStack() as undo:
            undo.callback(store.release, reservation)
            before = self._install(filed, entry, data, reservation)
            undo.pop_all()
        if before is None:
            return False
        if store.durable:
            store.entries.sync_shard(entry.kind, entry.shard)
        self._delete_superseded(filed, before)
        return True

    def _next_generation(self, known: Sequence[int], key: bytes) -> int:
        # Above all `known` numbers and those of files
        generation = 1 + max(known, default=0)
        while self._store.entries.exists(manifest_entry(key, generation)):
            generation += 1
        if generation > MAX_NUMBER:
            raise OSError(errno.EOVERFLOW, "an agent has no generation number left")
        return generation

    def _install(
        self, filed: FiledManifest, entry: Entry, data: bytes, reservation: int
    ) -> list[BlockHash] | None:
        # Holds the folder's lock, so that no process takes the name between check and rename.
        store = self._store
        with store.folder.temporary() as path:
            store.folder.create(path, data, sync=store.durable)
            with store.folder.locked(), ExitStack() as undo:
                with store.index.writing() as db:
                    store.quota.release(db, reservation)
                    newest = max(agent_rows.generations(db, filed.key), default=0)
                    if newest >= filed.manifest.generation or store.entries.exists(entry):
                        return None
                    store.entries.install(path, entry)
                    undo.callback(store.unlink_uncommitted, entry)
                    before = agent_rows.chain_of(db, filed.key)
                    hashes = agent_rows.add(db, filed, ManifestFile.of(data))
                    block_rows.touch_chain(db, hashes)
                undo.pop_all()
        return before

    def _delete_superseded(self, filed: FiledManifest, before: Sequence[BlockHash]) -> None:
        # A failure only delays the deletion.
        store, manifest = self._store, filed.manifest
        known = set(before)
        links = list(manifest.scope.chain(manifest.token_ids))
        gone = known - {link.hash for link in links}
        new = [link for link in links if link.hash not in known]
        try:
            ends_of: dict[int, list[BlockHash]] = {}
            with suppress(IndexBrokenError):  # another process is replacing it
                ends_of = self._ends_of_old_turns(filed.key, links[-1:])
            with store.index.writing() as db:
                ends: list[BlockHash] = []
                for old in agent_rows.generations(db, filed.key)[_GENERATIONS:]:
                    ends += ends_of.get(old, ())
                    store.entries.delete(manifest_entry(filed.key, old))
                    agent_rows.drop_generation(db, filed.key, old)
                points = block_rows.unneeded_checkpoints(db, ends)
                for key in (*block_rows.superseded(db, gone, new), *points):
                    store.entries.delete(block_entry(key))
                    block_rows.drop(db, key)
                    self._counts.add("superseded")
                block_rows.abandon(db, manifest.scope.tenant, gone)
        except OSError as error:
            self._counts.add_error("write_errors", error)
        except IndexBrokenError:
            self._counts.add("index mended")
            with suppress(OSError, IndexBrokenError):
                store.recover()

    def _ends_of_old_turns(
        self, key: bytes, last: Sequence[BlockLink]
    ) -> dict[int, list[BlockHash]]:
        # Reads the manifests before it locks the index.
        with self._store.index.reading() as db:
            if not block_rows.find(db, [link.key(Part.CHECKPOINT) for link in last]):
                return {}
        known = self._generations(key)
        each = zip(known[1:], known, strict=False)
        return {
            old: self._ends_of_turn(key, old, newer) for old, newer in [*each][_GENERATIONS - 1 :]
        }

    def _ends_of_turn(self, key: bytes, generation: int, newer: int) -> list[BlockHash]:
        # Empty if the newer turn does not continue the prompt: the agent may return to it.
        try:
            old, after = (
                read_manifest(self._store.entries, key, one)[0].manifest
                for one in (generation, newer)
            )
        except (DamagedError, NewerFormatError, OSError):
            return []
        return [link.hash for link in ends_of_turn(old)] if continues(after, old) else []

    # Reading

    def _generations(self, key: bytes) -> list[int]:
        with self._store.index.reading() as db:
            return agent_rows.generations(db, key)

    def _first_sound(self, key: bytes, generations: Sequence[int]) -> FiledManifest | None:
        """Return the first intact manifest. Quarantines damaged manifests, and drops the rows of
        missing ones."""
        for generation in generations:
            try:
                filed, file = read_manifest(self._store.entries, key, generation)
            except DamagedError as damage:
                self._store.quarantine(manifest_entry(key, generation), damage)
            except NewerFormatError:
                self._counts.add("newer format")
            except FileNotFoundError:
                self._forget_missing(key, generation)
            else:
                if generation != generations[0]:
                    with self._store.index.writing() as db:
                        if generation in agent_rows.generations(db, key)[:1]:
                            agent_rows.add(db, filed, file)  # make its chain the agent's again
                return filed
        return None

    def _forget_missing(self, key: bytes, generation: int) -> None:
        with self._store.index.writing() as db:
            if not self._store.entries.exists(manifest_entry(key, generation)):
                agent_rows.drop_generation(db, key, generation)


class Blocks:
    """The block files of an open store. Methods raise OSError or IndexBrokenError. Callers of
    `put`, `drop` and `sync` hold `write_lock`."""

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
        """Make the blocks written so far durable; return the entries that failed."""
        return self._flusher.flush()

    def drop(self, entry: Entry) -> None:
        """Delete a block's file and row."""
        key = parse_block(entry.name)
        with self._store.index.writing() as db:
            self._store.entries.delete(entry)
            if key is not None:
                block_rows.drop(db, key)

    def forget_missing(self, key: BlockKey) -> None:
        """Drop the row of a missing file."""
        with self._store.index.reading() as db:
            if block_rows.file_bytes(db, key) is None:
                return
        with self._store.index.writing() as db:
            if not self._store.entries.exists(block_entry(key)):
                block_rows.drop(db, key)

    def _is_stored(self, key: BlockKey) -> bool:
        # Drops a row without a file
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
        # All three steps happen, or none.
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
    """Makes block files durable: first their contents, then their names. Not thread-safe."""

    def __init__(self, entries: Entries, counts: Counts) -> None:
        self._entries = entries
        self._counts = counts
        self._waiting: dict[Entry, None] = {}

    def add(self, entry: Entry) -> None:
        """Add a block that was just written."""
        self._waiting[entry] = None

    def flush(self) -> list[Entry]:
        """Sync all waiting files; return those that failed. Never retries, as a second sync may
        succeed without a write."""
        waiting, self._waiting = list(self._waiting), {}
        failed = [entry for entry in waiting if not self._sync(entry)]
        bad = {shard for shard in {e.shard for e in waiting} if not self._sync_shard(shard)}
        return failed + [e for e in waiting if e.shard in bad and e not in failed]

    def _sync(self, entry: Entry) -> bool:
        try:
            self._entries.sync(entry)
        except FileNotFoundError:
            return True  # evicted meanwhile: nothing left to sync
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
    # A write of an unreachable block must not evict entries.
    if link.parent == link.scope.root:
        return True
    return block_rows.file_bytes(db, BlockKey(link.parent, Part.FULL)) is not None
