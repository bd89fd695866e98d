"""The cold tier: blocks and manifests as files in a folder, for all models and processes.

Implements `CacheStorePort`. What cannot be proven to be what was stored is a miss. Calls block
until the disk has answered; whoever cannot wait puts a queue before it.

    put    temporary file -> rename -> index row
    save   blocks onto the drive -> manifest onto the drive -> rename -> index row
    read   file -> checksums, hash and tokens compared -> the caller's memory

Forking a process that has a store open is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from semantic.adapters.stores.disk import agent_rows
from semantic.adapters.stores.disk.agents import Agents
from semantic.adapters.stores.disk.blocks import Blocks
from semantic.adapters.stores.disk.entries import Entries, Kind, parse_block, parse_manifest
from semantic.adapters.stores.disk.files import FileSystem
from semantic.adapters.stores.disk.folder import read_format
from semantic.adapters.stores.disk.maintenance import CheckReport, CollectReport, Maintenance
from semantic.adapters.stores.disk.open_store import OpenStore
from semantic.domain.block_hash import BlockHash, BlockKey, Part, Scope
from semantic.domain.errors import StoreError
from semantic.domain.stored import (
    BlockHeader,
    BlockRead,
    Found,
    Manifest,
    StoredBlock,
    StoreStats,
    Tier,
)


@dataclass(frozen=True, slots=True)
class FolderView:
    """A store's folder as it lies there: its format, how many files, bytes of all of them."""

    format: int
    n_blocks: int
    n_agents: int
    n_bytes: int


class DiskStore:
    """At most `max_bytes` in one folder, whoever writes there. Any thread may call."""

    def __init__(self, store: OpenStore) -> None:
        """See `open`."""
        self._store = store
        self._blocks = Blocks(store)
        self._agents = Agents(store, self._blocks)
        self._maintenance = Maintenance(store)

    @classmethod
    def open(
        cls,
        folder: Path,
        max_bytes: int,
        *,
        files: FileSystem | None = None,
        durable: bool = True,
    ) -> DiskStore:
        """The store in `folder`, made when there is none. Deletes nothing, also over the budget.

        `durable` makes a saved agent survive a power loss; without it only the program's end is
        survived, and a torn file is a miss. Raises StoreError, with nothing changed, when the
        folder is not ours, not safe, of a newer format or cannot be written, and
        InvalidRequestError for a budget below 1.
        """
        return cls(OpenStore(folder, max_bytes, files or FileSystem(), durable=durable))

    @staticmethod
    def look(folder: Path) -> FolderView | None:
        """What lies in `folder`, without opening or changing it; None when it is no store.

        Raises StoreError when it is one of a newer format, or cannot be read.
        """
        files = FileSystem()
        try:
            number = read_format(folder, files)
            if number is None:
                return None
            entries = Entries(folder, files)
            listed = [one for kind in Kind for one in entries.listed(kind)]
        except StoreError:
            raise
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"the store {folder} cannot be read: {error}") from error
        names = [one.entry.name for one in listed if one.entry is not None]
        agents = {parsed[0] for parsed in map(parse_manifest, names) if parsed is not None}
        n_blocks = sum(parse_block(name) is not None for name in names)
        return FolderView(number, n_blocks, len(agents), sum(one.n_bytes or 0 for one in listed))

    @property
    def secret(self) -> bytes:
        """See `CacheStorePort.secret`."""
        return self._store.folder.secret

    # Blocks

    def put(self, block: StoredBlock) -> bool:
        """See `CacheStorePort.put`."""
        return self._blocks.put(block)

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        """See `CacheStorePort.find`."""
        return self._blocks.find(keys)

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """See `CacheStorePort.lacking`."""
        return frozenset(keys) - self.find(keys).keys()

    def children(
        self, parent: BlockHash, part: Part, like: Sequence[int] | None = None
    ) -> Sequence[BlockHeader]:
        """See `CacheStorePort.children`."""
        return self._blocks.children(parent, part, like)

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        """See `CacheStorePort.read_into`."""
        return self._blocks.read_into(reads)

    def read(self, header: BlockHeader) -> bytes | None:
        """See `CacheStorePort.read`."""
        return self._blocks.read(header)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `CacheStorePort.touch`."""
        self._blocks.touch(keys)

    # Agents

    def save(self, manifest: Manifest) -> bool:
        """See `CacheStorePort.save`."""
        return self._agents.save(manifest)

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        """See `CacheStorePort.manifest`."""
        return self._agents.manifest(scope, agent_id)

    def manifests(self) -> Sequence[Manifest]:
        """See `CacheStorePort.manifests`."""
        return self._agents.manifests()

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """See `CacheStorePort.remove`."""
        return self._agents.remove(scope, agent_id)

    # Life

    def stats(self) -> Sequence[StoreStats]:
        """See `CacheStorePort.stats`. `n_bytes` is what counts against the budget: whole pages,
        folders, manifests, the index and damaged files that are kept included.
        """
        store = self._store
        try:
            n_blocks, n_bytes, n_agents, pinned = store.on_index(self._sizes)
        except OSError as error:
            store.counts.add_error("read_errors", error)
            n_blocks = n_bytes = n_agents = pinned = 0
        return [
            StoreStats(
                Tier.DISK,
                n_blocks=n_blocks,
                n_bytes=n_bytes,
                max_bytes=store.room.max_bytes,
                n_agents=n_agents,
                pinned_bytes=pinned,
                counts=store.counts.snapshot(),
            )
        ]

    def flush(self) -> None:
        """See `CacheStorePort.flush`."""
        self._blocks.flush()

    def close(self) -> None:
        """See `CacheStorePort.close`."""
        self._blocks.flush()
        self._store.close()

    # For a person

    def check(self, *, read_data: bool = False, subset: tuple[int, int] = (1, 1)) -> CheckReport:
        """Look at all files, changing none; with `read_data` every byte is read and proven.

        `subset` (n, m) looks at the n-th of m equal shares. Raises InvalidRequestError when there
        is no such share, and StoreError when the folder cannot be read.
        """
        return self._maintenance.check(read_data=read_data, subset=subset)

    def gc(self, *, dry_run: bool) -> CollectReport:
        """Delete what belongs to no agent, what was left unfinished or put aside, and what is
        over the budget; or say what would be. Raises StoreError when that fails.
        """
        return self._maintenance.collect(dry_run=dry_run)

    def rebuild_index(self) -> None:
        """Derive the index from the files anew. Raises StoreError when that fails."""
        self._maintenance.rebuild()

    def _sizes(self) -> tuple[int, int, int, int]:
        with self._store.index.reading() as db:
            (n_blocks,) = db.execute("SELECT count(*) FROM blocks").fetchone()
            room = self._store.room
            return n_blocks, room.used(db), agent_rows.count(db), room.pinned(db)
