"""The memory tier: blocks and manifests in this process, within one quota of bytes, LRU-evicted.

Implements `StorePort` and `AgentIndexPort`. Nothing survives the process; knows no files and starts
no thread.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import threading
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TypeAlias, TypeVar

from cachetools import FIFOCache

from semantic.adapters.stores.neighbours import Children
from semantic.domain.block_hash import (
    PUBLIC_TENANT,
    BlockHash,
    BlockKey,
    BlockLink,
    Part,
    Scope,
    pack_tokens,
    tenant_tag,
    unpack_tokens,
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
    left_at,
)
from semantic.ports.store import BlockObserver

ENTRY_BYTES = 1024
"""What a block or manifest costs beside its body and tokens: objects, keys, table entries."""
TOKEN_BYTES = 48
"""What a token costs: an int and two pointers. Ints shared by entries count in each."""
LINK_BYTES = 640
"""What a manifest costs for each of its blocks: the hash, and which agents need it."""
_CHARACTER_BYTES = 4
_MAX_REFUSED = 1000
"""Refused blocks that are remembered. Dropping one too early only worsens an eviction."""
_SECRET_BYTES = 32

K = TypeVar("K")
V = TypeVar("V")

_Agent: TypeAlias = AgentName
_Entry: TypeAlias = BlockKey | _Agent


@dataclass(frozen=True, slots=True)
class _Saved:
    """A manifest without its tokens, which are packed, and the blocks that follow from it."""

    bare: Manifest
    tokens: bytes
    chain: tuple[BlockHash, ...]
    last: tuple[BlockLink, ...]
    """The last block, if there is any."""

    @classmethod
    def of(cls, manifest: Manifest) -> _Saved:
        links = list(manifest.scope.chain(manifest.token_ids))
        tokens, chain = pack_tokens(manifest.token_ids), tuple(link.hash for link in links)
        return cls(replace(manifest, token_ids=()), tokens, chain, tuple(links[-1:]))

    @property
    def manifest(self) -> Manifest:
        return replace(self.bare, token_ids=unpack_tokens(self.tokens))

    @property
    def n_bytes(self) -> int:
        bare = self.bare
        texts = (bare.agent_id, bare.model, bare.parent or "", bare.note)
        n_bytes = ENTRY_BYTES + len(self.tokens) + LINK_BYTES * len(self.chain)
        n_bytes += TOKEN_BYTES * sum(len(link.tokens) for link in self.last)
        return n_bytes + _CHARACTER_BYTES * sum(map(len, texts))


@dataclass(slots=True)
class _Tenant:
    """A tenant's entries, least recently used first, each with when that was by a counter of uses:
    those that are not pinned, those of them that agents left, and those that are pinned."""

    lru: OrderedDict[_Entry, int] = field(default_factory=OrderedDict)
    left: OrderedDict[_Entry, int] = field(default_factory=OrderedDict)
    pinned: OrderedDict[_Entry, int] = field(default_factory=OrderedDict)
    n_bytes: int = 0
    pinned_bytes: int = 0
    uses: int = 0

    def add(self, entry: _Entry, size: int, *, pinned: bool) -> None:
        self._insert(self.pinned if pinned else self.lru, entry)
        self.n_bytes += size
        self.pinned_bytes += size if pinned else 0

    def remove(self, entry: _Entry, size: int) -> None:
        self.n_bytes -= size
        if self._take(entry) is self.pinned:
            self.pinned_bytes -= size

    def is_evictable(self, entry: _Entry) -> bool:
        """Whether the entry is here and not pinned."""
        return entry in self.lru or entry in self.left

    def entries(self, *, pinned: bool) -> Iterator[_Entry]:
        """In order of eviction, with or without those that are `pinned`."""
        used = heapq.merge(self.left.items(), self.lru.items(), key=itemgetter(1))
        return itertools.chain(map(itemgetter(0), used), self.pinned if pinned else ())

    def abandon(self, entries: Iterable[_Entry]) -> None:
        """Evict `entries` as if they had been used last at `left_at`."""
        firsts = (next(iter(one.values()), self.uses) for one in (self.lru, self.left))
        at = left_at(min(firsts), self.uses)
        for entry in entries:
            if self.lru.get(entry, at) > at:
                del self.lru[entry]
                self.left[entry] = at

    def use(self, entry: _Entry) -> None:
        taken = self._take(entry)
        self._insert(self.pinned if taken is self.pinned else self.lru, entry)

    def _insert(self, order: OrderedDict[_Entry, int], entry: _Entry) -> None:
        self.uses += 1
        order[entry] = self.uses

    def _take(self, entry: _Entry) -> OrderedDict[_Entry, int]:
        """Remove the entry; where it was."""
        orders = (self.lru, self.left, self.pinned)
        order = next(one for one in orders if entry in one)
        del order[entry]
        return order


class MemoryStore:
    """At most `max_bytes` of the most recently used blocks and manifests. Thread-safe.

    A block counts its body, its tokens and `ENTRY_BYTES`; a manifest likewise. The least recently
    used entry is evicted first, manifests too, and before a block the blocks that depend on it.
    What an agent's newest manifest needs no more counts as used longer ago, see `left_at`, if no
    other agent needs it. A block never evicts its ancestors, so a chain that is too long retains
    its head. Only calls that return all entries cost more because more exist.

    For a tenant entries of those that have more are evicted first, of the largest, pinned ones
    last, and otherwise its own that are not pinned. Public prefixes count as no tenant: beside them
    alone a tenant may pin everything, and its pins hold against them.

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
        """Without `counts_bodies` the quota is for what is known of blocks: their bodies are
        elsewhere.

        Raises InvalidRequestError for a quota below 1 or a secret of other than 32 bytes.
        """
        if max_bytes < 1:
            raise InvalidRequestError(f"max_bytes must be at least 1, got {max_bytes}")
        if secret is not None and len(secret) != _SECRET_BYTES:
            raise InvalidRequestError(f"secret must be {_SECRET_BYTES} bytes, got {len(secret)}")
        self.secret = secrets.token_bytes(_SECRET_BYTES) if secret is None else secret
        self._public = tenant_tag(self.secret, PUBLIC_TENANT)
        self._max_bytes = max_bytes
        self._counts_bodies = counts_bodies
        self._observer = observer
        self._n_bytes = 0
        self._lock = threading.Lock()
        self._blocks: dict[BlockKey, StoredBlock] = {}
        self._children = Children()
        self._agents: OrderedDict[_Agent, _Saved] = OrderedDict()
        self._listed: dict[Scope, list[Place]] = {}  # sorted
        self._names: dict[tuple[Scope, str], dict[str, None]] = {}  # of agents, by parent
        self._tenants: dict[bytes, _Tenant] = {}  # those that have entries
        self._users: dict[BlockHash, dict[_Agent, None]] = {}
        self._pinned: Counter[BlockHash] = Counter()
        self._refused: FIFOCache[BlockHash, None] = FIFOCache(maxsize=_MAX_REFUSED)
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    @property
    def holds_back(self) -> bool:
        """See `CacheStorePort.holds_back`. Never: nothing is written."""
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
                self._refuse(key.hash)
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
        """The parents of the first blocks of all chains in `namespace`."""
        with self._lock:
            links = [block.header.link for block in self._blocks.values()]
        return frozenset(
            link.parent for link in links if not link.start and link.scope.namespace == namespace
        )

    def header(self, key: BlockKey) -> BlockHeader | None:
        """The header of a block that is here, or None."""
        with self._lock:
            block = self._blocks.get(key)
        return None if block is None else block.header

    def headers(self) -> Sequence[BlockHeader]:
        """The headers of all blocks that are here."""
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
        found: dict[BlockKey, bytes | memoryview] = {}
        for header, block in zip(headers, blocks, strict=True):
            data = None if block is None or block.header != header else data_of(block)
            if data is not None:
                found[header.key] = data
        with self._lock:
            self._counts["hits"] += len(found)
        return found

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        with self._lock:
            blocks = [self._blocks.get(read.header.key) for read in reads]
        filled = [
            block is not None and fill(read, block)
            for read, block in zip(reads, blocks, strict=True)
        ]
        self._count_reads(filled)
        return filled

    def read(self, header: BlockHeader) -> bytes | None:
        with self._lock:
            block = self._blocks.get(header.key)
        found = None if block is None or block.header != header else data_of(block)
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
        """`save` with the generation that another store has given `manifest`."""
        return self._save(manifest, manifest.generation)

    def _save(self, manifest: Manifest, generation: int | None = None) -> bool:
        agent = manifest.scope, manifest.agent_id
        saved = _Saved.of(manifest)
        with self._lock:
            older = self._agents.get(agent)
            self._mark_used(_keys(saved.chain))
            n_more = saved.n_bytes - (older.n_bytes if older else 0)
            if not self._evict_for(manifest.scope.tenant, n_more, {agent}):
                self._counts["dropped manifests"] += 1
                return False
            if older is not None:
                self._drop_agent(agent)
            next_one = 1 + (older.bare.generation if older else 0)
            self._insert_agent(agent, saved, next_one if generation is None else generation)
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
            return [scope for scope, places in self._listed.items() if places]

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        with self._lock:
            places = self._listed.get(scope, [])
            stop = len(places) if after is None else bisect_left(places, after)
            names = [name for _, name in reversed(places[max(0, stop - limit) : stop])]
            agents = [(scope, name.decode("utf-8", "surrogatepass")) for name in names]
            saved = [self._agents[agent] for agent in agents]
        return [one.manifest for one in saved]

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        with self._lock:
            return sorted(self._names.get((scope, parent), ()))

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        with self._lock:
            users = {one: self._users.get(one, {}) for one in hashes}
            return {one: frozenset(itertools.islice(some, 2)) for one, some in users.items()}

    def remove(self, scope: Scope, agent_id: str) -> bool:
        with self._lock:
            if (scope, agent_id) not in self._agents:
                return False
            self._drop_agent((scope, agent_id))
            return True

    def pinned(self, tenant: bytes) -> Pinned:
        with self._lock:
            n_bytes = self._tenants.get(tenant, _Tenant()).pinned_bytes
            n_tenants = len(self._tenants.keys() - {self._public} | {tenant})
        return Pinned(n_bytes, None if n_tenants == 1 else self._max_bytes // n_tenants)

    # Life

    def stats(self) -> Sequence[StoreStats]:
        """See `CacheStorePort.stats`. Also counts manifests, "dropped" and "evicted", and partial
        blocks that were dropped because a longer block contains them, "superseded".
        """
        with self._lock:
            return [
                StoreStats(
                    Tier.MEMORY,
                    n_blocks=len(self._blocks),
                    n_bytes=self._n_bytes,
                    max_bytes=self._max_bytes,
                    n_agents=len(self._agents),
                    pinned_bytes=sum(one.pinned_bytes for one in self._tenants.values()),
                    counts=dict(self._counts),
                )
            ]

    def release(self, n_bytes: int) -> bool:
        """Evict so many bytes, the largest tenants' least recently used first; whether any was.

        Pinned entries stay.
        """
        with self._lock:
            order = self._in_order_of_eviction(b"", 0, frozenset(), pins_hold=True)
            victims, _ = self._first(order, n_bytes)
            for victim in victims:
                self._evict(victim)
        return bool(victims)

    def flush(self) -> None:
        """See `CacheStorePort.flush`. Does nothing."""

    def close(self) -> None:
        """See `CacheStorePort.close`. Drops everything."""
        with self._lock:
            self._blocks.clear()
            self._children.clear()
            self._agents.clear()
            self._listed.clear()
            self._names.clear()
            self._tenants.clear()
            self._users.clear()
            self._pinned.clear()
            self._refused.clear()
            self._n_bytes = 0

    # Order of use. From here on the lock is held

    def _mark_used(self, keys: Sequence[BlockKey]) -> None:
        for key in reversed(keys):
            if key in self._blocks:
                self._tenants[self._tenant(key)].use(key)

    def _abandon(self, chain: Sequence[BlockHash]) -> None:
        """Let the blocks of `chain` that no agent needs any more be evicted sooner, its end
        first."""
        left = (name for name in reversed(chain) if name not in self._users)
        keys = [key for key in _keys(left) if key in self._blocks]
        if keys:
            self._tenants[self._tenant(keys[0])].abandon(keys)

    def _evict_for_block(self, block: StoredBlock) -> bool:
        n_bytes = self._block_bytes(block)
        if self._n_bytes + n_bytes <= self._max_bytes:
            return True
        # A descendant of a refused block would evict the head of its own chain, which `_lineage`
        # does not see beyond the gap. Other gaps are fine: a colder tier may fill them.
        if block.header.link.parent in self._refused:
            return False
        link = block.header.link
        return self._evict_for(link.scope.tenant, n_bytes, self._lineage(link))

    def _refuse(self, name: BlockHash) -> None:
        self._counts["dropped"] += 1
        self._refused.setdefault(name, None)

    def _evict_for(
        self, tenant: bytes, n_bytes: int, spared: AbstractSet[BlockHash | _Agent]
    ) -> bool:
        """Evict until `n_bytes` more of `tenant` fit; False, with nothing evicted, when they do not
        fit beside its pinned and spared entries and what others keep."""
        excess = self._n_bytes + n_bytes - self._max_bytes
        if excess <= 0:
            return True
        own = self._tenants.get(tenant, _Tenant())
        then = own.n_bytes + n_bytes
        others = [one for tag, one in self._tenants.items() if tag != tenant]
        pins_hold = tenant == self._public and len(others) == 1
        kept = own.pinned_bytes + self._unpinned_bytes(own, spared)
        for one in others:
            kept += max(min(then, one.n_bytes), one.pinned_bytes if pins_hold else 0)
        if kept + n_bytes > self._max_bytes:
            return False
        order = self._in_order_of_eviction(tenant, then, spared, pins_hold=pins_hold)
        victims, n_found = self._first(order, excess)
        if n_found < excess:
            return False
        for victim in victims:
            self._evict(victim)
        return True

    def _first(self, order: Iterable[_Entry], n_bytes: int) -> tuple[dict[_Entry, None], int]:
        """The first different entries that have `n_bytes`, or all, and what they have."""
        found: dict[_Entry, None] = {}
        total = 0
        for entry in order:
            if entry not in found:
                found[entry] = None
                total += self._size(entry)
            if total >= n_bytes:
                break
        return found, total

    def _in_order_of_eviction(
        self,
        tenant: bytes,
        then: int,
        spared: AbstractSet[BlockHash | _Agent],
        *,
        pins_hold: bool,
    ) -> Iterator[_Entry]:
        """Everything evictable for `tenant`, which will have `then` bytes; some entries repeatedly.

        Of the others what each has above that, the largest first; what is pinned last, or, if
        `pins_hold`, not at all.
        """
        larger = [
            (-one.n_bytes, tag)
            for tag, one in self._tenants.items()
            if tag != tenant and one.n_bytes > then
        ]
        heapq.heapify(larger)
        queues = {
            tag: self._of(self._tenants[tag].entries(pinned=not pins_hold), spared)
            for _, tag in larger
        }
        seen: set[_Entry] = set()
        while larger:
            n_bytes, tag = heapq.heappop(larger)
            entry = next(queues[tag], None)
            if entry is None:
                continue
            yield entry
            n_bytes += 0 if entry in seen else self._size(entry)
            seen.add(entry)
            if -n_bytes > then:
                heapq.heappush(larger, (n_bytes, tag))
        if tenant in self._tenants:
            yield from self._of(self._tenants[tenant].entries(pinned=False), spared)

    def _of(
        self, entries: Iterable[_Entry], spared: AbstractSet[BlockHash | _Agent]
    ) -> Iterator[_Entry]:
        """`entries` that are not spared, each preceded by what depends on it."""
        for entry in entries:
            if (entry.hash if isinstance(entry, BlockKey) else entry) in spared:
                continue
            if isinstance(entry, BlockKey):
                yield from self._dependents_first(entry)
            else:
                yield entry

    def _dependents_first(self, key: BlockKey) -> Sequence[BlockKey]:
        """`key`, preceded by everything that depends on it.

        A block with pinned or spared dependents is pinned or spared itself: none is skipped.
        """
        found = {key: None}
        waiting = [key]
        while waiting:
            after = [one for one in self._dependents(waiting.pop()) if one not in found]
            found.update(dict.fromkeys(after))
            waiting += after
        return list(reversed(found))

    def _dependents(self, key: BlockKey) -> Iterator[BlockKey]:
        if key.part is not Part.FULL:
            return
        others = (BlockKey(key.hash, part) for part in Part if part is not Part.FULL)
        yield from (other for other in others if other in self._blocks)
        for part in Part:
            yield from (header.key for header in self._children.of(key.hash, part))

    def _lineage(self, link: BlockLink) -> set[BlockHash | _Agent]:
        """The block and its ancestors, up to the first that is not stored."""
        found: set[BlockHash | _Agent] = {link.hash}
        parent = self._blocks.get(BlockKey(link.parent, Part.FULL))
        while parent is not None and parent.header.link.hash not in found:
            found.add(parent.header.link.hash)
            parent = self._blocks.get(BlockKey(parent.header.link.parent, Part.FULL))
        return found

    def _unpinned_bytes(self, own: _Tenant, names: AbstractSet[BlockHash | _Agent]) -> int:
        """Bytes of a tenant's entries of these names that are not pinned."""
        entries: list[_Entry] = []
        for name in names:
            if isinstance(name, tuple):
                entries.append(name)
            else:
                entries += [BlockKey(name, part) for part in Part]
        return sum(self._size(entry) for entry in entries if own.is_evictable(entry))

    def _tenant(self, entry: _Entry) -> bytes:
        if isinstance(entry, BlockKey):
            return self._blocks[entry].header.link.scope.tenant
        return entry[0].tenant

    def _is_pinned(self, entry: _Entry) -> bool:
        if isinstance(entry, BlockKey):
            return entry.hash in self._pinned
        return self._agents[entry].bare.pinned

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
            self._drop_agent(entry)
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

    def _enter(self, entry: _Entry) -> None:
        """Count an entry and make it the most recently used."""
        size = self._size(entry)
        self._n_bytes += size
        own = self._tenants.setdefault(self._tenant(entry), _Tenant())
        own.add(entry, size, pinned=self._is_pinned(entry))

    def _leave(self, entry: _Entry) -> None:
        """Undo `_enter`."""
        size, tag = self._size(entry), self._tenant(entry)
        self._n_bytes -= size
        self._tenants[tag].remove(entry, size)
        if not self._tenants[tag].n_bytes:
            del self._tenants[tag]

    def _pin(self, chain: Sequence[BlockHash], n: int) -> None:
        """Change the number of pinned agents that need the blocks of `chain` by `n`."""
        stored = [key for key in _keys(reversed(chain)) if key in self._blocks]
        for key in stored:
            self._leave(key)
        if n > 0:
            self._pinned.update(chain)
        else:
            _subtract(self._pinned, chain)
        for key in stored:
            self._enter(key)

    def _insert_agent(self, agent: _Agent, saved: _Saved, generation: int) -> None:
        manifest = replace(saved.bare, generation=generation)
        self._agents[agent] = replace(saved, bare=manifest)
        self._enter(agent)
        insort(self._listed.setdefault(manifest.scope, []), manifest.place)
        if manifest.parent is not None:
            children = self._names.setdefault((manifest.scope, manifest.parent), {})
            children[manifest.agent_id] = None
        for name in saved.chain:
            self._users.setdefault(name, {})[agent] = None
        if manifest.pinned:
            self._pin(saved.chain, 1)

    def _drop_agent(self, agent: _Agent) -> None:
        self._leave(agent)
        saved = self._agents.pop(agent)
        manifest = saved.bare
        places = self._listed[manifest.scope]
        del places[bisect_left(places, manifest.place)]
        if manifest.parent is not None:
            _discard(self._names, (manifest.scope, manifest.parent), manifest.agent_id)
        for name in saved.chain:
            _discard(self._users, name, agent)
        if manifest.pinned:
            self._pin(saved.chain, -1)

    def _drop_superseded(self, before: Sequence[BlockLink], after: Sequence[BlockLink]) -> None:
        """Drop partial blocks that no agent needs and a longer block begins with.

        Of `before`, and of those that a block of `after` begins with.
        """
        keys = (link.key(Part.FULL) for link in before)
        found = [self._blocks[key].header for key in keys if key in self._blocks]
        for link in after:
            found += self._children.nearest(link.parent, Part.FULL, link.tokens)
        for header in found:
            link, key = header.link, header.key
            if link.is_full or link.hash in self._users or key not in self._blocks:
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


def _discard(groups: dict[K, dict[V, None]], group: K, member: V) -> None:
    """Remove a member, and its group with the last one; a chain may name a block twice."""
    members = groups.get(group, {})
    members.pop(member, None)
    if not members:
        groups.pop(group, None)


def _subtract(counts: Counter[BlockHash], chain: Sequence[BlockHash]) -> None:
    for name in chain:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]


def data_of(block: StoredBlock) -> bytes | memoryview | None:
    """The block's bytes, waited for; None if they never come."""
    try:
        return block.data()
    except OSError:
        return None


def fill(read: BlockRead, block: StoredBlock) -> bool:
    """Copy the body of `block` into the targets of `read`.

    False, with the targets unchanged, when the headers differ in any field or the body does not
    have the size of the targets.
    """
    if block.header != read.header:
        return False
    data = data_of(block)
    if data is None or sum(map(len, read.segments)) != len(data):
        return False
    body = memoryview(data)
    at = 0
    for segment in read.segments:
        segment[:] = body[at : at + len(segment)]
        at += len(segment)
    return True
