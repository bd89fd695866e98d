"""The disk tier: blocks and manifests as files in one folder, for all models and processes.

A file that fails verification counts as missing. Calls wait for the disk.

    put    temporary file -> rename -> index row
    save   blocks synced -> manifest synced -> rename -> index row -> folder synced
    read   file -> checksums, hash and tokens compared -> the caller's memory

Do not fork a process that has a store open.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from semantic.adapters.stores.disk import agent_rows, block_rows, maintenance, schema
from semantic.adapters.stores.disk.entries import (
    DamagedError,
    Entries,
    Kind,
    MismatchError,
    NewerFormatError,
    agent_key,
    block_entry,
    parse_block,
    parse_manifest,
)
from semantic.adapters.stores.disk.files import FileSystem
from semantic.adapters.stores.disk.folder import read_format
from semantic.adapters.stores.disk.maintenance import CheckReport, CollectReport
from semantic.adapters.stores.disk.open_store import Limit, OpenStore
from semantic.adapters.stores.disk.quota import WriteLimits
from semantic.adapters.stores.disk.schema import IndexBrokenError
from semantic.adapters.stores.disk.writing import Agents, Blocks, QuotaExceededError
from semantic.domain.block_hash import BlockHash, BlockKey, Part, Scope
from semantic.domain.errors import StoreError
from semantic.domain.stored import (
    AgentName,
    BlockHeader,
    BlockRead,
    Found,
    Manifest,
    OnProgress,
    Pinned,
    Place,
    StoredBlock,
    StoreStats,
    Tier,
    no_progress,
)
from semantic.ports.store import BlockObserver

T = TypeVar("T")

NO_LIMITS = WriteLimits()
_UNREADABLE = {errno.EACCES, errno.EPERM, errno.EIO}
"""Lasting errors. The store quarantines the file, so that it can write the block again."""


@dataclass(frozen=True, slots=True)
class FolderView:
    """A summary of a store's folder."""

    format: int
    n_blocks: int
    n_agents: int
    n_bytes: int


class DiskStore:
    """Stores at most `max_bytes` in one folder, for all processes together. Thread-safe. Methods
    without a docstring: see the ports."""

    def __init__(self, store: OpenStore) -> None:
        self._store = store
        self._counts = store.counts
        self._blocks = Blocks(store)
        self._agents = Agents(store)
        self.refused = False

    @classmethod
    def open(
        cls,
        folder: Path,
        max_bytes: Limit,
        *,
        files: FileSystem | None = None,
        durable: bool = True,
        secret: bytes | None = None,
        writes: WriteLimits = NO_LIMITS,
        observer: BlockObserver | None = None,
    ) -> DiskStore:
        """Open the store in `folder`, or create it.

        `max_bytes` is the quota, or a function of the bytes in the folder. If `durable`, a saved
        agent survives power loss. A `secret` replaces the folder's own.

        Raises InvalidRequestError if the quota is below 1. Raises StoreError and changes nothing if
        the folder is unsafe or not a store.
        """
        files = files or FileSystem()
        return cls(
            OpenStore(
                folder,
                max_bytes,
                files,
                durable=durable,
                secret=secret,
                writes=writes,
                observer=observer,
            )
        )

    @staticmethod
    def inspect(folder: Path) -> FolderView | None:
        """Return a summary of `folder`; None if the folder has no store. Changes nothing. Raises
        StoreError if the store has a newer format or is unreadable."""
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
            raise StoreError(f"cannot read the store {folder}: {error}") from error
        names = [one.entry.name for one in listed if one.entry is not None]
        agents = {parsed[0] for parsed in map(parse_manifest, names) if parsed is not None}
        n_blocks = sum(parse_block(name) is not None for name in names)
        return FolderView(number, n_blocks, len(agents), sum(one.n_bytes or 0 for one in listed))

    @property
    def secret(self) -> bytes:
        return self._store.secret

    @property
    def holds_back(self) -> bool:
        return self._store.written.holds_back

    @property
    def agents(self) -> DiskStore:
        return self

    # Blocks

    def put(self, block: StoredBlock) -> bool:
        with self._store.write_lock:
            is_stored = self._change(lambda: self._blocks.put(block), failed=None)
            self.refused = is_stored is False
        self._store.written.settle_if_due()
        return is_stored is True

    def drop(self, keys: Sequence[BlockKey]) -> None:
        with self._store.write_lock:
            for entry in map(block_entry, keys):
                self._change(partial(self._blocks.drop, entry), failed=None)

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        return self._query(lambda db: block_rows.find(db, keys), failed={})

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        return frozenset(keys) - self.find(keys).keys()

    def roots(self, namespace: bytes) -> frozenset[BlockHash]:
        """Return the parent hashes of the first blocks in `namespace`."""
        return self._query(lambda db: block_rows.roots(db, namespace), failed=frozenset())

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        return self._query(lambda db: block_rows.children(db, parent, part), failed=[])

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        return self._query(
            lambda db: block_rows.nearest_children(db, parent, part, like), failed=[]
        )

    def resident(
        self,
        headers: Sequence[BlockHeader],  # noqa: ARG002
    ) -> Mapping[BlockKey, bytes | memoryview]:
        """See `CacheStorePort.resident`. Always empty."""
        return {}

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        return self._store.reader.each(self._read_into, reads)

    def read(self, header: BlockHeader) -> bytes | None:
        return self._verified(header.key, lambda: self._store.reader.body(header))

    def prefetch(self, header: BlockHeader) -> bool:  # noqa: ARG002
        """See `CacheStorePort.prefetch`. Always False."""
        return False

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._change(lambda: self._touch(keys), failed=None)

    # Agents

    def save(self, manifest: Manifest) -> bool:
        with self._store.write_lock:
            self.flush()
            try:
                return self._agents.save(manifest)
            except OSError as error:
                self._counts.add_error("write_errors", error)
            except QuotaExceededError:
                self._counts.add("dropped manifests")
            return False

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        return self._newest(agent_key(scope, agent_id))

    def scopes(self) -> Sequence[Scope]:
        tenants = self._query(agent_rows.tenants, failed=list[bytes]())
        return [scope for tenant in tenants for scope in self.scopes_of(tenant)]

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        found: list[Manifest] = []
        while len(found) < limit:
            query = partial(agent_rows.page, scope=scope, limit=limit - len(found), after=after)
            rows = self._query(query, failed=list[agent_rows.Listed]())
            if not rows:
                break
            newest = (self._newest(row.key) for row in rows)
            found += [one for one in newest if one is not None]  # some may be unreadable
            after = rows[-1].place
        return found

    def scopes_of(self, tenant: bytes) -> Sequence[Scope]:
        """Return the scopes in which a tenant has agents. Each model has its own scope."""
        found = self._query(lambda db: agent_rows.namespaces(db, tenant), failed=list[bytes]())
        return [Scope(namespace, tenant) for namespace in found]

    def count_of(self, tenant: bytes) -> int:
        """Return the number of a tenant's agents, for all models together."""
        return self._query(lambda db: agent_rows.count_of(db, tenant), failed=0)

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        return self._query(lambda db: agent_rows.children(db, scope, parent), failed=[])

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        return self._query(lambda db: agent_rows.users(db, hashes), failed={})

    def remove(self, scope: Scope, agent_id: str) -> bool:
        key = agent_key(scope, agent_id)
        with self._store.write_lock:
            return self._change(lambda: self._agents.remove(key), failed=False)

    def pinned(self, tenant: bytes) -> Pinned:
        part = self._store.quota.pinned_of
        return self._query(lambda db: part(db, tenant), failed=Pinned(0, None))

    # Life

    def stats(self) -> Sequence[StoreStats]:
        """See `CacheStorePort.stats`. `n_bytes` is the whole folder's total."""
        n_blocks, n_bytes, n_agents, pinned = self._query(self._sizes, failed=(0, 0, 0, 0))
        return [
            StoreStats(
                Tier.DISK,
                n_blocks=n_blocks,
                n_bytes=n_bytes,
                max_bytes=self._store.quota.max_bytes,
                n_agents=n_agents,
                pinned_bytes=pinned,
                counts=self._counts.snapshot(),
                wear=self._store.written.wear(),
            )
        ]

    def flush(self) -> None:
        """See `CacheStorePort.flush`. Drops blocks that are not durable."""
        if not self._store.durable:
            return
        with self._store.write_lock:
            for entry in self._blocks.sync():
                self._counts.add("dropped")
                self._change(partial(self._blocks.drop, entry), failed=None)

    def close(self) -> None:
        self.flush()
        self._store.close()

    # Maintenance

    def check(
        self,
        *,
        read_data: bool = False,
        subset: tuple[int, int] = (1, 1),
        on_progress: OnProgress = no_progress,
    ) -> CheckReport:
        """Verify the headers of all files, and every byte if `read_data`. Changes nothing.

        A `subset` (n, m) checks the n-th of m parts of the files. Raises InvalidRequestError for an
        invalid `subset`, or StoreError.
        """
        known, done = sum(one.n_blocks + one.n_agents for one in self.stats()), count(1)
        total = known // max(1, subset[1])

        def on_file() -> None:
            number = next(done)
            on_progress(number, max(number, total))

        return maintenance.check(self._store, read_data=read_data, subset=subset, on_file=on_file)

    def gc(self, *, dry_run: bool, on_progress: OnProgress = no_progress) -> CollectReport:
        """Delete unneeded and damaged files, and blocks beyond the quota. If `dry_run`, only count
        these files. Raises StoreError."""
        return maintenance.collect(self._store, dry_run=dry_run, on_progress=on_progress)

    def rebuild_index(self) -> None:
        """Build a new index from the files. Raises StoreError."""
        try:
            with self._store.write_lock:
                self._store.rebuild()
        except (OSError, IndexBrokenError) as error:
            raise StoreError(f"cannot rebuild the index: {error}") from error

    # Failures count

    def _query(self, query: Callable[[sqlite3.Connection], T], *, failed: T) -> T:
        def read() -> T:
            with self._store.index.reading() as db:
                return query(db)

        try:
            return self._store.with_recovery(read)
        except OSError as error:
            self._counts.add_error("read_errors", error)
            return failed

    def _change(self, action: Callable[[], T], *, failed: T) -> T:
        try:
            return self._store.with_recovery(action)
        except OSError as error:
            self._counts.add_error("write_errors", error)
            return failed

    def _verified(self, key: BlockKey, read: Callable[[], T]) -> T | None:
        # Counts the reason if `read` fails
        try:
            result = read()
        except DamagedError as damage:
            self._store.quarantine(block_entry(key), damage)
        except NewerFormatError:
            self._counts.add("newer format")
        except MismatchError as error:
            self._counts.add("mismatches", str(error))
        except OSError as error:
            self._counts.add_error("read_errors", error)
            if isinstance(error, FileNotFoundError):
                self._change(lambda: self._blocks.forget_missing(key), failed=None)
            elif error.errno in _UNREADABLE and self._is_unreadable(key):
                self._store.quarantine(block_entry(key), DamagedError("unreadable"))
        else:
            self._counts.add("hits")
            return result
        self._counts.add("misses")
        return None

    def _is_unreadable(self, key: BlockKey) -> bool:
        # A failure may be transient: read the file again.
        try:
            self._store.reader.check(key)
        except OSError as error:
            return error.errno in _UNREADABLE
        except (DamagedError, NewerFormatError):
            return False  # the next read will try again
        return False

    def _read_into(self, read: BlockRead) -> bool:
        def fill() -> bool:
            self._store.reader.fill(read)
            return True

        return self._verified(read.header.key, fill) is not None

    def _touch(self, keys: Sequence[BlockKey]) -> None:
        with self._store.index.writing() as db:
            block_rows.touch(db, keys)

    def _newest(self, key: bytes) -> Manifest | None:
        try:
            return self._agents.newest(key)
        except (OSError, IndexBrokenError) as error:
            reported = error if isinstance(error, OSError) else OSError(str(error))
            self._counts.add_error("read_errors", reported)
            return None

    def _sizes(self, db: sqlite3.Connection) -> tuple[int, int, int, int]:
        quota = self._store.quota
        n_blocks, n_agents = schema.number(db, "blocks"), schema.number(db, "agents")
        return n_blocks, quota.used(db), n_agents, quota.pinned(db)
