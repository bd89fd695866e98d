"""The agents of the disk store: a manifest each, its newest generation and the one before.

A manifest is on the drive after the blocks it needs, and before the older one goes.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from semantic.adapters.stores.disk import agent_rows, block_rows
from semantic.adapters.stores.disk.blocks import Blocks
from semantic.adapters.stores.disk.entries import (
    MOST_NUMBER,
    DamagedError,
    Entry,
    NewerFormatError,
    agent_key,
    block_entry,
    cost_of,
    manifest_entry,
)
from semantic.adapters.stores.disk.manifest_file import (
    FiledManifest,
    ManifestFile,
    encode_manifest,
    read_manifest,
)
from semantic.adapters.stores.disk.open_store import OpenStore
from semantic.adapters.stores.disk.quota import delete_manifests
from semantic.adapters.stores.disk.schema import IndexBrokenError
from semantic.domain.block_hash import BlockHash, Scope
from semantic.domain.stored import Manifest

_TRIES = 64
"""How often another process may be faster before a call gives up."""
_KEPT_GENERATIONS = 2
"""The newest, and one to fall back to when that turns out to be damaged."""


class Agents:
    """See `CacheStorePort`; nothing here raises for what goes wrong with the disk."""

    def __init__(self, store: OpenStore, blocks: Blocks) -> None:
        self._store = store
        self._blocks = blocks
        self._counts = store.counts

    def save(self, manifest: Manifest) -> bool:
        """See `CacheStorePort.save`."""
        with self._store.changing:
            self._blocks.flush()
            try:
                return any(
                    self._store.on_index(lambda: self._save(manifest)) for _ in range(_TRIES)
                )
            except OSError as error:
                self._counts.add_error("write_errors", error)
            except _NoRoomError:
                self._counts.add("dropped manifests")
            return False

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        """See `CacheStorePort.manifest`."""
        return self._newest(agent_key(scope, agent_id))

    def manifests(self) -> Sequence[Manifest]:
        """See `CacheStorePort.manifests`."""
        try:
            keys = self._store.on_index(self._keys)
        except OSError as error:
            self._counts.add_error("read_errors", error)
            return []
        found = (self._newest(key) for key in keys)
        return [manifest for manifest in found if manifest is not None]

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """See `CacheStorePort.remove`."""
        key = agent_key(scope, agent_id)
        with self._store.changing:
            try:
                return self._store.on_index(lambda: self._remove(key))
            except OSError as error:
                self._counts.add_error("write_errors", error)
                return False

    # Saving

    def _save(self, manifest: Manifest) -> bool:
        """One try; False when another process has just saved the same generation.

        Raises _NoRoomError when it does not fit.
        """
        store = self._store
        key = agent_key(manifest.scope, manifest.agent_id)
        with store.index.writing() as db:
            generation = self._next_generation(agent_rows.generations(db, key), key)
            order = min(1 + block_rows.tick(db), MOST_NUMBER)
            filed = FiledManifest(replace(manifest, generation=generation), order)
            try:
                data = encode_manifest(filed)
            except ValueError:
                raise _NoRoomError from None
            entry = manifest_entry(key, generation)
            hashes = [link.hash for link in manifest.scope.chain(manifest.token_ids)]
            reservation = store.room.reserve(
                db,
                store.folder.session,
                cost_of(len(data)),
                f"{entry.kind}/{entry.shard}",
                agent=key,
            )
        if reservation is None:
            raise _NoRoomError
        with ExitStack() as undo:
            undo.callback(store.release, reservation)
            before = self._install(filed, entry, data, reservation)
            undo.pop_all()
        if before is None:
            return False
        if store.durable:
            store.entries.sync_shard(entry.kind, entry.shard)
        self._tidy(filed, {manifest.scope.root, *before, *hashes})
        return True

    def _next_generation(self, known: Sequence[int], key: bytes) -> int:
        """One more than the newest; a file that the index does not know is not overwritten.

        Raises OSError when there is none: somebody made a manifest with the last of all numbers.
        """
        generation = 1 + max(known, default=0)
        while self._store.entries.exists(manifest_entry(key, generation)):
            generation += 1
        if generation > MOST_NUMBER:
            raise OSError(errno.EOVERFLOW, "an agent's generations are used up")
        return generation

    def _install(
        self, filed: FiledManifest, entry: Entry, data: bytes, reservation: int
    ) -> list[BlockHash] | None:
        """Put the file in place and remember it; the agent's blocks before, None if too late.

        Under the folder's lock nobody can take the name between the look and the rename.
        """
        store = self._store
        with store.folder.temporary() as path:
            store.folder.create(path, data, sync=store.durable)
            with store.folder.locked(), ExitStack() as undo:
                with store.index.writing() as db:
                    store.room.release(db, reservation)
                    newest = max(agent_rows.generations(db, filed.key), default=0)
                    if newest >= filed.manifest.generation or store.entries.exists(entry):
                        return None
                    store.entries.install(path, entry)
                    undo.callback(store.delete_unremembered, entry)
                    before = agent_rows.chain_of(db, filed.key)
                    hashes = agent_rows.add(db, filed, ManifestFile.of(data))
                    block_rows.touch_chain(db, hashes)
                undo.pop_all()
        return before

    def _tidy(self, filed: FiledManifest, parents: set[BlockHash]) -> None:
        """Delete what the saved manifest makes needless. Failing is harmless: it is kept longer."""
        store = self._store
        try:
            with store.index.writing() as db:
                for old in agent_rows.generations(db, filed.key)[_KEPT_GENERATIONS:]:
                    store.entries.delete(manifest_entry(filed.key, old))
                    agent_rows.drop_generation(db, filed.key, old)
                for key in block_rows.superseded(db, parents):
                    store.entries.delete(block_entry(key))
                    block_rows.drop(db, key)
                    self._counts.add("superseded")
        except OSError as error:
            self._counts.add_error("write_errors", error)
        except IndexBrokenError:
            self._counts.add("index mended")
            with suppress(OSError, IndexBrokenError):
                store.mend()

    # Finding and removing

    def _keys(self) -> list[bytes]:
        with self._store.index.reading() as db:
            return agent_rows.keys(db)

    def _newest(self, key: bytes) -> Manifest | None:
        try:
            for _ in range(_TRIES):
                generations = self._store.on_index(lambda: self._generations(key))
                found = self._first_sound(key, generations)
                if found is not None or generations == self._generations(key):
                    return None if found is None else found.manifest
        except (OSError, IndexBrokenError) as error:
            reported = error if isinstance(error, OSError) else OSError(str(error))
            self._counts.add_error("read_errors", reported)
        return None

    def _generations(self, key: bytes) -> list[int]:
        with self._store.index.reading() as db:
            return agent_rows.generations(db, key)

    def _first_sound(self, key: bytes, generations: Sequence[int]) -> FiledManifest | None:
        """The first that is what it should be; those before it are put aside or forgotten."""
        for generation in generations:
            try:
                filed, file = read_manifest(self._store.entries, key, generation)
            except DamagedError as damage:
                self._store.put_aside(manifest_entry(key, generation), damage)
            except NewerFormatError:
                self._counts.add("newer format")
            except FileNotFoundError:
                self._forget(key, generation)
            else:
                if generation != generations[0]:
                    with self._store.index.writing() as db:
                        if generation in agent_rows.generations(db, key)[:1]:
                            agent_rows.add(db, filed, file)  # its blocks are the agent's again
                return filed
        return None

    def _forget(self, key: bytes, generation: int) -> None:
        with self._store.index.writing() as db:
            if not self._store.entries.exists(manifest_entry(key, generation)):
                agent_rows.drop_generation(db, key, generation)

    def _remove(self, key: bytes) -> bool:
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


class _NoRoomError(Exception):
    """A manifest does not fit into the budget."""
