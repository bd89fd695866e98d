"""MemoryStore: the memory tier, blocks and manifests within one quota of bytes."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from cachetools import FIFOCache

from semantic.adapters.stores.agent_index import ENTRY_BYTES, TOKEN_BYTES, AgentTable, SavedAgent
from semantic.adapters.stores.eviction_order import EvictionOrder
from semantic.adapters.stores.neighbours import Children
from semantic.domain.block_hash import (
    PUBLIC_TENANT,
    BlockHash,
    BlockKey,
    BlockLink,
    Part,
    Scope,
    tenant_tag,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import (
    COUNTERS,
    AgentName,
    BlockHeader,
    BlockRead,
    Found,
    Manifest,
    Pinned,
    Place,
    StoredBlock,
    StoreStats,
    Tier,
)
from semantic.ports.store import BlockObserver

_MAX_REFUSED = 1000
"""The number of refused blocks to remember."""
_SECRET_BYTES = 32

_Entry: TypeAlias = BlockKey | AgentName


class MemoryStore:
    """Keeps the most recently used blocks and manifests, up to `max_bytes`. Thread-safe.

    Methods without a docstring: see its ports.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        secret: bytes | None = None,
        counts_bodies: bool = True,
        observer: BlockObserver | None = None,
    ) -> None:
        """The quota includes bodies only if `counts_bodies`. Raises InvalidRequestError for a quota
        below 1, or a secret of other than 32 bytes."""
        if max_bytes < 1:
            raise InvalidRequestError(f"max_bytes must be at least 1, got {max_bytes}")
        if secret is not None and len(secret) != _SECRET_BYTES:
            raise InvalidRequestError(f"secret must be {_SECRET_BYTES} bytes, got {len(secret)}")
        self.secret = secrets.token_bytes(_SECRET_BYTES) if secret is None else secret
        public = tenant_tag(self.secret, PUBLIC_TENANT)
        self._order = EvictionOrder[_Entry](max_bytes, public, self._size, self._dependents)
        self._counts_bodies = counts_bodies
        self._observer = observer
        self._lock = threading.Lock()
        self._blocks: dict[BlockKey, StoredBlock] = {}
        self._children = Children()
        self._agents = AgentTable()
        self._pinned: Counter[BlockHash] = Counter()
        self._refused: FIFOCache[BlockHash, None] = FIFOCache(maxsize=_MAX_REFUSED)
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    @property
    def holds_back(self) -> bool:
        """See `CacheStorePort.holds_back`. Always False."""
        return False

    @property
    def agents(self) -> MemoryStore:
        return self

    # Blocks

    def put(self, block: StoredBlock) -> bool:
        key = block.header.key
        with self._lock:
            if key in self._blocks:
                return True
            if not self._evict_for_block(block):
                self._counts["dropped"] += 1
                self._refused.setdefault(key.hash, None)
                return False
            self._refused.pop(key.hash, None)
            self._blocks[key] = block
            self._children.add(block.header)
            self._enter(key)
            self._counts["written"] += 1
            if self._observer is not None and block.header.is_whole_block:
                self._count_unpublished(self._observer.stored(block.header, Tier.MEMORY))
            return True

    def drop(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in dict.fromkeys(keys):
                if key in self._blocks:
                    self._drop(key)

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        with self._lock:
            blocks = {key: self._blocks[key] for key in keys if key in self._blocks}
        return {key: Found(len(block.body), Tier.MEMORY) for key, block in blocks.items()}

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        with self._lock:
            return frozenset(key for key in keys if key not in self._blocks)

    def roots(self, namespace: bytes) -> frozenset[BlockHash]:
        """Return the parent hashes of the first blocks in `namespace`."""
        with self._lock:
            links = [block.header.link for block in self._blocks.values()]
        return frozenset(
            link.parent for link in links if not link.start and link.scope.namespace == namespace
        )

    def header(self, key: BlockKey) -> BlockHeader | None:
        """Return the header of a stored block, or None."""
        with self._lock:
            block = self._blocks.get(key)
        return None if block is None else block.header

    def headers(self) -> Sequence[BlockHeader]:
        with self._lock:
            return [block.header for block in self._blocks.values()]

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        with self._lock:
            return self._children.of(parent, part)

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        with self._lock:
            return self._children.nearest(parent, part, like)

    def resident(self, headers: Sequence[BlockHeader]) -> Mapping[BlockKey, bytes | memoryview]:
        with self._lock:
            blocks = [self._blocks.get(header.key) for header in headers]
        each = zip(headers, blocks, strict=True)
        found = {one.key: data for one, block in each if (data := data_of(block, one)) is not None}
        with self._lock:
            self._counts["hits"] += len(found)
        return found

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        with self._lock:
            blocks = [self._blocks.get(read.header.key) for read in reads]
        filled = [fill(read, block) for read, block in zip(reads, blocks, strict=True)]
        self._count_reads(filled)
        return filled

    def read(self, header: BlockHeader) -> bytes | None:
        with self._lock:
            block = self._blocks.get(header.key)
        found = data_of(block, header)
        self._count_reads([found is not None])
        return None if found is None else bytes(found)

    def prefetch(self, header: BlockHeader) -> bool:
        with self._lock:
            self._mark_used([header.key])
            return header.key in self._blocks

    def touch(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            self._mark_used(keys)

    # Agents

    def save(self, manifest: Manifest) -> bool:
        return self._save(manifest)

    def remember(self, manifest: Manifest) -> bool:
        """Save `manifest` with a generation from another store."""
        return self._save(manifest, manifest.generation)

    def _save(self, manifest: Manifest, generation: int | None = None) -> bool:
        saved = SavedAgent.of(manifest)
        with self._lock:
            older = self._agents.get(saved.name)
            self._mark_used(_keys(saved.chain))
            n_more = saved.n_bytes - (older.n_bytes if older else 0)
            if not self._evict_for(manifest.scope.tenant, n_more, {saved.name}):
                self._counts["dropped manifests"] += 1
                return False
            if older is not None:
                self._drop_agent(older)
            if generation is None:
                generation = 1 + (older.bare.generation if older else 0)
            self._insert_agent(replace(saved, bare=replace(saved.bare, generation=generation)))
            self._drop_superseded(older.last if older else (), saved.last)
            if older is not None:
                self._abandon(older.chain)
            return True

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        with self._lock:
            saved = self._agents.get((scope, agent_id))
        return None if saved is None else saved.manifest

    def scopes(self) -> Sequence[Scope]:
        with self._lock:
            return self._agents.scopes()

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        with self._lock:
            saved = self._agents.page(scope, limit, after)
        return [one.manifest for one in saved]

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        with self._lock:
            return self._agents.child_agents(scope, parent)

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        with self._lock:
            return self._agents.users_of(hashes)

    def remove(self, scope: Scope, agent_id: str) -> bool:
        with self._lock:
            saved = self._agents.get((scope, agent_id))
            if saved is not None:
                self._drop_agent(saved)
            return saved is not None

    def pinned(self, tenant: bytes) -> Pinned:
        with self._lock:
            return self._order.pinned_of(tenant)

    # Life

    def stats(self) -> Sequence[StoreStats]:
        """See `CacheStorePort.stats`."""
        with self._lock:
            return [
                StoreStats(
                    Tier.MEMORY,
                    n_blocks=len(self._blocks),
                    n_bytes=self._order.n_bytes,
                    max_bytes=self._order.max_bytes,
                    n_agents=len(self._agents),
                    pinned_bytes=self._order.pinned_bytes,
                    counts=dict(self._counts),
                )
            ]

    def release(self, n_bytes: int) -> bool:
        """Evict unpinned entries with at least `n_bytes`; return whether it evicted any."""
        with self._lock:
            victims = self._order.oldest(n_bytes)
            for victim in victims:
                self._evict(victim)
        return bool(victims)

    def flush(self) -> None:
        """See `CacheStorePort.flush`. Does nothing."""

    def close(self) -> None:
        """See `CacheStorePort.close`. Drops all entries."""
        with self._lock:
            self._blocks.clear()
            self._children.clear()
            self._agents.clear()
            self._order.clear()
            self._pinned.clear()
            self._refused.clear()

    # Order of use. Callers of the following methods hold the lock

    def _mark_used(self, keys: Sequence[BlockKey]) -> None:
        for key in reversed(keys):
            if key in self._blocks:
                self._order.use(self._tenant(key), key)

    def _abandon(self, chain: Sequence[BlockHash]) -> None:
        # The last block of the chain goes first.
        left = (name for name in reversed(chain) if name not in self._agents.users)
        keys = [key for key in _keys(left) if key in self._blocks]
        if keys:
            self._order.abandon(self._tenant(keys[0]), keys)

    def _evict_for_block(self, block: StoredBlock) -> bool:
        n_bytes = self._block_bytes(block)
        if self._order.n_bytes + n_bytes <= self._order.max_bytes:
            return True
        # A descendant of a refused block would evict the beginning of its own chain, because
        # `_lineage` stops at the gap. Other gaps do no harm: a colder tier may fill them.
        if block.header.link.parent in self._refused:
            return False
        link = block.header.link
        return self._evict_for(link.scope.tenant, n_bytes, {*_keys(self._lineage(link))})

    def _evict_for(self, tenant: bytes, n_bytes: int, spared: Collection[_Entry]) -> bool:
        """Evict until `n_bytes` more fit. If this is impossible, evict nothing and return False."""
        victims = self._order.victims(tenant, n_bytes, spared)
        for victim in victims or ():
            self._evict(victim)
        return victims is not None

    def _dependents(self, key: _Entry) -> Iterator[BlockKey]:
        if not isinstance(key, BlockKey) or key.part is not Part.FULL:
            return
        others = (BlockKey(key.hash, part) for part in Part if part is not Part.FULL)
        yield from (other for other in others if other in self._blocks)
        for part in Part:
            yield from (header.key for header in self._children.of(key.hash, part))

    def _lineage(self, link: BlockLink) -> set[BlockHash]:
        # Ends at the first missing ancestor
        found = {link.hash}
        parent = self._blocks.get(BlockKey(link.parent, Part.FULL))
        while parent is not None and parent.header.link.hash not in found:
            found.add(parent.header.link.hash)
            parent = self._blocks.get(BlockKey(parent.header.link.parent, Part.FULL))
        return found

    def _tenant(self, key: BlockKey) -> bytes:
        return self._blocks[key].header.link.scope.tenant

    def _size(self, entry: _Entry) -> int:
        if isinstance(entry, BlockKey):
            return self._block_bytes(self._blocks[entry])
        return self._agents[entry].n_bytes

    def _block_bytes(self, block: StoredBlock) -> int:
        known = ENTRY_BYTES + TOKEN_BYTES * len(block.header.link.tokens)
        return known + (len(block.body) if self._counts_bodies else 0)

    # Inserting and dropping

    def _evict(self, entry: _Entry) -> None:
        if isinstance(entry, BlockKey):
            self._drop(entry)
            self._counts["evicted"] += 1
        else:
            self._drop_agent(self._agents[entry])
            self._counts["evicted manifests"] += 1

    def _drop(self, key: BlockKey) -> None:
        self._leave(key)
        header = self._blocks.pop(key).header
        self._children.remove(header)
        if self._observer is not None and header.is_whole_block:
            self._count_unpublished(self._observer.removed(key.hash, Tier.MEMORY))

    def _count_unpublished(self, is_taken: bool) -> None:
        if not is_taken:
            self._counts["unpublished"] += 1

    def _enter(self, key: BlockKey) -> None:
        self._order.add(self._tenant(key), key, pinned=key.hash in self._pinned)

    def _leave(self, key: BlockKey) -> None:
        self._order.remove(self._tenant(key), key)

    def _pin(self, chain: Sequence[BlockHash], n: int) -> None:
        stored = [key for key in _keys(reversed(chain)) if key in self._blocks]
        for key in stored:
            self._leave(key)
        for name in chain:
            self._pinned[name] += n
            if not self._pinned[name]:
                del self._pinned[name]
        for key in stored:
            self._enter(key)

    def _insert_agent(self, saved: SavedAgent) -> None:
        self._agents.add(saved)
        self._order.add(saved.bare.scope.tenant, saved.name, pinned=saved.bare.pinned)
        if saved.bare.pinned:
            self._pin(saved.chain, 1)

    def _drop_agent(self, saved: SavedAgent) -> None:
        self._order.remove(saved.bare.scope.tenant, saved.name)
        self._agents.remove(saved)
        if saved.bare.pinned:
            self._pin(saved.chain, -1)

    def _drop_superseded(self, before: Sequence[BlockLink], after: Sequence[BlockLink]) -> None:
        keys = (link.key(Part.FULL) for link in before)
        found = [self._blocks[key].header for key in keys if key in self._blocks]
        for link in after:
            found += self._children.nearest(link.parent, Part.FULL, link.tokens)
        for header in found:
            link, key = header.link, header.key
            if link.is_full or link.hash in self._agents.users or key not in self._blocks:
                continue
            if self._children.longer(header):
                self._drop(key)
                self._counts["superseded"] += 1

    def _count_reads(self, found: Sequence[bool]) -> None:
        with self._lock:
            self._counts["hits"] += sum(found)
            self._counts["misses"] += len(found) - sum(found)


def _keys(names: Iterable[BlockHash]) -> list[BlockKey]:
    return [BlockKey(name, part) for name in names for part in Part]


def data_of(block: StoredBlock | None, header: BlockHeader) -> bytes | memoryview | None:
    """Return the body of `block`, or None. Waits until the body arrives."""
    if block is None or block.header != header:
        return None
    try:
        return block.data()
    except OSError:
        return None


def fill(read: BlockRead, block: StoredBlock | None) -> bool:
    """Copy the body of `block` into the targets of `read`. Returns False if header or size
    differ."""
    data = data_of(block, read.header)
    if data is None or sum(map(len, read.segments)) != len(data):
        return False
    body = memoryview(data)
    at = 0
    for segment in read.segments:
        segment[:] = body[at : at + len(segment)]
        at += len(segment)
    return True
