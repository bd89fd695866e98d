"""Catalog: what this process knows of the object store, from what it has put, read and looked up.

What it has is a hint: an object may be gone, and one that is there may not be known. Asks the
object store nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from semantic.adapters.stores.memory import MemoryStore
from semantic.adapters.stores.remote.names import depth_of, has_tail, name_of_body
from semantic.domain.block_hash import BlockHash, BlockKey, Part, Scope
from semantic.domain.stored import (
    AgentName,
    BlockHeader,
    Found,
    Manifest,
    Place,
    StoredBlock,
    StoreStats,
    Tier,
)

CATALOG_BYTES = 128 << 20
"""Memory for what is known of the object store: some ten thousand blocks."""


class KnownBody:
    """A body in the object store, of which this process has the size only."""

    __slots__ = ("_n_bytes",)

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes

    def __len__(self) -> int:
        return self._n_bytes

    def wait(self) -> memoryview:
        """See `DeferredBody.wait`: raises OSError, it is read by its header."""
        raise OSError("the body is in the object store")


class Catalog:
    """Bodies and manifests that are in the object store as far as is known here. Thread-safe."""

    def __init__(
        self, max_bytes: int, secret: bytes, is_forgotten: Callable[[Hashable], bool]
    ) -> None:
        """What `is_forgotten` holds for, a BlockKey or an AgentName, is not learned: it is about
        to be deleted."""
        self._details = MemoryStore(max_bytes, secret=secret, counts_bodies=False)
        self.is_forgotten = is_forgotten

    # Bodies

    def learn(self, header: BlockHeader, n_bytes: int) -> None:
        """A body of so many bytes is there."""
        if not self.is_forgotten(header.key):
            self._details.put(StoredBlock(header, KnownBody(n_bytes)))

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """These bodies are gone."""
        self._details.drop(keys)

    def drop_named(self, names: AbstractSet[int] | None) -> None:
        """What has these names, see `name_of_body`, is gone; None: any may be."""
        headers = self._details.headers()
        keys = [one.key for one in headers if names is None or name_of_body(one.key) in names]
        self._details.drop(keys)

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        """See `CacheStorePort.find`."""
        found = self._details.find(keys)
        return {key: replace(one, tier=Tier.REMOTE) for key, one in found.items()}

    def n_bytes(self, key: BlockKey) -> int | None:
        """Bytes of a body, or None."""
        found = self.find([key]).get(key)
        return None if found is None else found.n_bytes

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Those of `keys` that are not known."""
        return self._details.lacking(keys)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `CacheStorePort.touch`."""
        self._details.touch(keys)

    def place(self, key: BlockKey) -> tuple[Scope, BlockHash | None] | None:
        """The scope of a body, and the block that its tail follows, if it has one; or None."""
        header = self._details.header(key)
        if header is None:
            return None
        return header.link.scope, header.link.parent if has_tail(header) else None

    def lineage(self, key: BlockKey) -> Iterator[tuple[int, int]]:
        """The name of a body and how deep it is, see `names`; then those of all full blocks
        that it follows, as far as is known."""
        header = self._details.header(key)
        while header is not None:
            yield name_of_body(header.key), depth_of(header)
            header = self._details.header(BlockKey(header.link.parent, Part.FULL))

    def header(self, key: BlockKey) -> BlockHeader | None:
        """The header of a body, or None."""
        return self._details.header(key)

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        """See `CacheStorePort.children`."""
        return self._details.children(parent, part)

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        """See `CacheStorePort.nearest`."""
        return self._details.nearest(parent, part, like)

    # Agents

    def learn_agent(self, manifest: Manifest) -> None:
        """This is an agent's newest manifest, with its generation."""
        if not self.is_forgotten((manifest.scope, manifest.agent_id)):
            self._details.remember(manifest)

    def drop_agent(self, scope: Scope, agent_id: str) -> bool:
        """An agent's manifest is gone; whether it was known."""
        return self._details.remove(scope, agent_id)

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        """See `CacheStorePort.manifest`."""
        return self._details.manifest(scope, agent_id)

    def manifests(self) -> Sequence[Manifest]:
        """See `CacheStorePort.manifests`."""
        return self._details.manifests()

    def scopes(self) -> Sequence[Scope]:
        """See `CacheStorePort.scopes`."""
        return self._details.scopes()

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        """See `CacheStorePort.page`."""
        return self._details.page(scope, limit, after)

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        """See `CacheStorePort.child_agents`."""
        return self._details.child_agents(scope, parent)

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        """See `CacheStorePort.users`."""
        return self._details.users(hashes)

    # Life

    def stats(self) -> StoreStats:
        """Numbers and bytes of what is known."""
        [found] = self._details.stats()
        return found

    def close(self) -> None:
        """Forget everything."""
        self._details.close()
