"""The objects that this process has put, read or looked up. An entry is only a hint: the object may
be missing.

`BodyTable` maps a body's name to a record, which is a bytes object:

    offset  bytes
         0      8  the first bytes of the hash, to distinguish two bodies with the same name
         8      8  the name of the full block before it
        16      4  its depth, see `depth_of`
        20      8  size of the body; the lowest 16 bits are the number of its scope
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from semantic.adapters.stores.disk.entries import agent_key, manifest_entry
from semantic.adapters.stores.disk.files import Counts
from semantic.adapters.stores.memory import MemoryStore
from semantic.application.agents.footprint import walk
from semantic.domain.block_hash import BlockHash, BlockKey, Part, Scope
from semantic.domain.stored import BlockHeader, Found, Manifest, StoredBlock, StoreStats, Tier
from semantic.ports.store import AgentIndexPort
from semantic_fleet.objects.names import depth_of, has_tail, name_of_body
from semantic_fleet.objects.objects import Objects, UnavailableError
from semantic_fleet.objects.uses import LOG_SECONDS, Evictions, UseLog, name_of

ENTRY_BYTES = 160
"""The maximum memory for the record of a body, in bytes."""
GENERATIONS = 12
"""The number of generations of records. When the newest one is full, the table drops the oldest."""
_RECORD = struct.Struct("<8sQIQ")
_SCOPE_BITS = 16
_MOST_SCOPES = 1 << _SCOPE_BITS


class Known(NamedTuple):
    """The size, scope and depth of a body. `before` is the name of the previous full block."""

    n_bytes: int
    scope: Scope
    depth: int
    before: int


class BodyTable:
    """Records of the known bodies, in at most `max_bytes` of memory. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._most = max(1, max_bytes // ENTRY_BYTES // GENERATIONS)
        self._generations: deque[dict[int, bytes]] = deque([{}], GENERATIONS)
        self._scopes: list[Scope | None] = []  # None: the table has dropped this generation
        self._numbers: dict[Scope, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._generations))

    def add(self, header: BlockHeader, n_bytes: int) -> None:
        """Record a body with a use now. Ignores the body if 65,536 other scopes are known."""
        scope = header.link.scope
        number = self._numbers.setdefault(scope, len(self._scopes))
        if number == len(self._scopes):
            if number == _MOST_SCOPES:
                del self._numbers[scope]
                return
            self._scopes.append(scope)
        name, before = name_of_body(header.key), BlockKey(header.link.parent, Part.FULL)
        self._take(name)
        self._insert(
            name,
            _RECORD.pack(
                _mark(header.link.hash),
                name_of_body(before),
                depth_of(header),
                n_bytes << _SCOPE_BITS | number,
            ),
        )

    def get(self, key: BlockKey) -> Known | None:
        """Return the record of a body, or None."""
        record = self._record(name_of_body(key))
        return self._known(record) if record and record.startswith(_mark(key.hash)) else None

    def named(self, name: int) -> Known | None:
        """Return the record of the body called `name`, or None."""
        record = self._record(name)
        return None if record is None else self._known(record)

    def use(self, keys: Iterable[BlockKey]) -> None:
        """Record a use of each known body among `keys`."""
        for name in map(name_of_body, keys):
            if name not in self._generations[0] and (record := self._take(name)) is not None:
                self._insert(name, record)

    def drop(self, name: int) -> None:
        self._take(name)

    def drop_tenant(self, tenant: bytes) -> None:
        """Forget all bodies of a tenant. Takes constant time."""
        for scope in [one for one in self._numbers if one.tenant == tenant]:
            self._scopes[self._numbers.pop(scope)] = None

    def clear(self) -> None:
        self._generations.clear()
        self._generations.append({})

    def _insert(self, name: int, record: bytes) -> None:
        if len(self._generations[0]) >= self._most:
            self._generations.appendleft({})
        self._generations[0][name] = record

    def _record(self, name: int) -> bytes | None:
        for one in self._generations:
            if name in one:
                return one[name]
        return None

    def _take(self, name: int) -> bytes | None:
        for one in self._generations:
            if name in one:
                return one.pop(name)
        return None

    def _known(self, record: bytes) -> Known | None:
        _, before, depth, both = _RECORD.unpack(record)
        scope = self._scopes[both & (_MOST_SCOPES - 1)]
        return None if scope is None else Known(both >> _SCOPE_BITS, scope, depth, before)


def _mark(name: BlockHash) -> bytes:
    return name[:8]


class Tally(Counts):
    """Counts events, and failed calls of the object store. Thread-safe."""

    def count(self, *names: str) -> None:
        for name in names:
            self.add(name)

    @contextmanager
    def misses(self, name: str = "unavailable") -> Iterator[None]:
        """Ignore a failure of the object store in the `with` block. Counts it under `name`."""
        try:
            yield
        except (UnavailableError, FileNotFoundError):
            self.count(name)


CATALOG_BYTES = 256 << 20
"""The memory for the catalog in bytes. It is enough for a million bodies."""
_TAILS = 5 / 16
"""The share of the catalog's memory for manifests and for complete headers."""
_RECENT = 1 / 16
"""The share of the catalog's memory for recent headers."""


class KnownBody:
    """A body in the object store. This process knows only the size of the body."""

    __slots__ = ("_n_bytes",)

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes

    def __len__(self) -> int:
        return self._n_bytes

    def wait(self) -> memoryview:
        """Raise OSError, because only the body's header locates the body."""
        raise OSError("the body is in the object store")


class Catalog:
    """The bodies and manifests in the object store that this process knows. Thread-safe. Has
    complete headers only where a look-up needs their tokens."""

    def __init__(
        self, max_bytes: int, secret: bytes, is_forgotten: Callable[[Hashable], bool]
    ) -> None:
        """`is_forgotten` returns True for a body or an agent that is about to be deleted."""
        for_tails, for_recent = (max(1, int(max_bytes * part)) for part in (_TAILS, _RECENT))
        self._tails = MemoryStore(for_tails, secret=secret, counts_bodies=False)
        self._recent = MemoryStore(for_recent, secret=secret, counts_bodies=False)
        self._table = BodyTable(max_bytes - for_tails - for_recent)
        self._lock = threading.Lock()  # guards the table, and orders `learn` and `drop`
        self._max_bytes = max_bytes
        self.is_forgotten = is_forgotten

    # Bodies

    def learn(self, header: BlockHeader, n_bytes: int) -> None:
        """Record a stored body of `n_bytes`."""
        known = StoredBlock(header, KnownBody(n_bytes))
        with self._lock:  # `drop` runs once `is_forgotten` is true, so it or this check acts
            if self.is_forgotten(header.key):
                return
            if has_tail(header):
                self._tails.put(known)
            else:
                self._table.add(header, n_bytes)
                self._recent.put(known)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Forget the bodies with these `keys`."""
        with self._lock:
            for key in keys:
                self._table.drop(name_of_body(key))
            self._tails.drop(keys)
            self._recent.drop(keys)

    def drop_named(self, names: AbstractSet[int] | None) -> None:
        """Forget the bodies with these names. None means all bodies."""
        if names is None:
            with self._lock:
                self._table.clear()
        for name in names or ():  # a hundred thousand names: release the lock in between
            with self._lock:
                self._table.drop(name)
        for store in (self._tails, self._recent):
            keys = [one.key for one in store.headers()]
            store.drop([one for one in keys if names is None or name_of_body(one) in names])

    def drop_tenant(self, tenant: bytes) -> None:
        """Forget all bodies and manifests of a tenant."""
        with self._lock:
            self._table.drop_tenant(tenant)
        for store in (self._tails, self._recent):
            store.drop([one.key for one in store.headers() if one.link.scope.tenant == tenant])
        for scope in [one for one in self._tails.scopes() if one.tenant == tenant]:
            for agent in list(walk(self._tails, scope)):
                self._tails.remove(scope, agent.agent_id)

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        sizes = {key: one.n_bytes for key, one in self._tails.find(keys).items()}
        with self._lock:
            known = ((key, self._table.get(key)) for key in keys)
            sizes.update((key, one.n_bytes) for key, one in known if one is not None)
        return {key: Found(n_bytes, Tier.REMOTE) for key, n_bytes in sizes.items()}

    def n_bytes(self, key: BlockKey) -> int | None:
        """Return the size of a body in bytes, or None."""
        found = self.find([key]).get(key)
        return None if found is None else found.n_bytes

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Return the keys among `keys` that this catalog does not know."""
        return frozenset(keys) - self.find(keys).keys()

    def touch(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            self._table.use(reversed(keys))
        self._tails.touch(keys)
        self._recent.touch(keys)

    def place(self, key: BlockKey) -> tuple[Scope, BlockHash | None] | None:
        """Return a body's scope. For a partial block, also return the previous block. Returns None
        for an unknown body."""
        tail = self._tails.header(key)
        if tail is not None:
            return tail.link.scope, tail.link.parent
        with self._lock:
            known = self._table.get(key)
        return None if known is None else (known.scope, None)

    def lineage(self, key: BlockKey) -> Iterator[tuple[int, int]]:
        """Yield the name and depth of a body, and those of each known full block before it."""
        name, tail = name_of_body(key), self._tails.header(key)
        if tail is not None:
            yield name, depth_of(tail)
            name = name_of_body(BlockKey(tail.link.parent, Part.FULL))
        while (known := self._named(name)) is not None:
            yield name, known.depth
            name = known.before

    def tail(self, key: BlockKey) -> BlockHeader | None:
        """Return the header of a body that only a separate object locates, or None."""
        return self._tails.header(key)

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        return [*self._tails.children(parent, part), *self._recent.children(parent, part)]

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        tails = self._tails.nearest(parent, part, like)
        return [*tails, *self._recent.nearest(parent, part, like)]

    # Agents

    @property
    def agents(self) -> AgentIndexPort:
        """The index of the agents' manifests."""
        return self._tails

    def learn_agent(self, manifest: Manifest) -> None:
        """Record the newest manifest of an agent."""
        with self._lock:  # as in `learn`
            if not self.is_forgotten((manifest.scope, manifest.agent_id)):
                self._tails.remember(manifest)

    def drop_agent(self, scope: Scope, agent_id: str) -> bool:
        """Forget an agent's manifest. Returns False if the manifest was unknown."""
        with self._lock:
            return self._tails.remove(scope, agent_id)

    # Life

    def stats(self) -> StoreStats:
        """Return the number and the total bytes of the known objects."""
        [tails], [recent] = self._tails.stats(), self._recent.stats()
        with self._lock:
            n_named = len(self._table)
        n_bytes = tails.n_bytes + recent.n_bytes + n_named * ENTRY_BYTES
        n_blocks = tails.n_blocks + n_named
        return replace(tails, n_blocks=n_blocks, n_bytes=n_bytes, max_bytes=self._max_bytes)

    def close(self) -> None:
        with self._lock:
            self._table.clear()
        self._tails.close()
        self._recent.close()

    def _named(self, name: int) -> Known | None:
        with self._lock:
            return self._table.named(name)


class Notices:
    """Tells the janitor which objects this process used, and learns which objects the janitor
    deleted. Thread-safe."""

    def __init__(
        self,
        objects: Objects,
        secret: bytes,
        catalog: Catalog,
        tally: Tally,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._tally = tally
        self._clock = clock
        self._uses = UseLog(objects, secret, clock=clock)
        self._evictions = Evictions(objects, secret)
        self._hearing = threading.Lock()
        self._heard: float | None = None
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def hear(self, within: float = LOG_SECONDS) -> None:
        """Forget the objects that the janitor deleted. Does nothing if the last call was less than
        `within` seconds ago. Raises UnavailableError."""
        with self._hearing:
            if self._heard is not None and self._clock() - self._heard < within:
                return
            evicted = self._evictions.new()
            self._heard = self._clock()
        if evicted is None or evicted:
            self._catalog.drop_named(evicted)

    def record_new(self, header: BlockHeader) -> None:
        """Record a use of a new body, and of the blocks before it."""
        name = name_of_body(header.key)
        if name not in self._uses:
            self._uses.add(name, depth_of(header))
            self.record([BlockKey(header.link.parent, Part.FULL)])

    def record(self, keys: Iterable[BlockKey]) -> None:
        """Record a use of bodies."""
        for key in keys:
            for name, depth in self._catalog.lineage(key):
                if name in self._uses:
                    break
                self._uses.add(name, depth)
        self._write_in_time()

    def record_agent(self, manifest: Manifest) -> None:
        """Record a use of an agent and of its blocks."""
        entry = manifest_entry(agent_key(manifest.scope, manifest.agent_id), manifest.generation)
        self._uses.add(name_of(entry.name), 2 * len(manifest.token_ids) + 2)
        links = manifest.scope.chain(manifest.token_ids)
        self.record(link.key(part) for link in links for part in Part)

    def write(self) -> None:
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        with self._tally.misses("write_errors"):
            self._uses.write()

    def _write_in_time(self) -> None:
        left = self._uses.seconds_left
        if left == 0:
            with self._tally.misses():
                self._uses.write()
        elif left is not None:
            with self._lock:
                if self._timer is None:
                    self._timer = threading.Timer(left, self.write)
                    self._timer.name, self._timer.daemon = "remote", True
                    self._timer.start()
