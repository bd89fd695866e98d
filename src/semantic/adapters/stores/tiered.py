"""Two tiers as one store: a fast warm one and a durable cold one.

Implements `CacheStorePort`. Everything is written to both, as far as their quotas allow; nothing
moves between them. Does not know what either tier is.
"""

from __future__ import annotations

import heapq
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap

from semantic.application.agents.footprint import walk
from semantic.domain.block_hash import BlockHash, BlockKey, Part, Scope
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import (
    AgentName,
    BlockHeader,
    BlockRead,
    Body,
    Found,
    Manifest,
    Pinned,
    Place,
    StoredBlock,
    StoreStats,
)
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.store import CacheStorePort


class TieredStore:
    """Reads from `warm` what it has and the rest from `cold`, directly into the targets.

    A block read from `cold` is not copied to `warm`: the sequence that it is restored into puts it
    again. An agent's manifest in `cold` takes precedence, with its generation.

    Methods without a docstring: see `CacheStorePort`.
    """

    def __init__(self, warm: CacheStorePort, cold: CacheStorePort) -> None:
        """Raises InvalidRequestError when the two do not have the same secret."""
        if not hmac.compare_digest(warm.secret, cold.secret):
            raise InvalidRequestError("the warm store must be made with the cold store's secret")
        self._warm = warm
        self._cold = cold

    @property
    def warm(self) -> CacheStorePort:
        """The fast tier."""
        return self._warm

    @property
    def cold(self) -> CacheStorePort:
        """The durable tier."""
        return self._cold

    @property
    def secret(self) -> bytes:
        return self._cold.secret

    @property
    def holds_back(self) -> bool:
        return self._cold.holds_back

    # Blocks

    def put(self, block: StoredBlock) -> bool:
        """See `CacheStorePort.put`. True when either tier accepts it."""
        warm = self._warm.put(block)
        if block.interim and self._cold.holds_back:
            return warm
        return self._cold.put(block) or warm

    def drop(self, keys: Sequence[BlockKey]) -> None:
        self._warm.drop(keys)
        self._cold.drop(keys)

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        warm = self._warm.find(keys)
        return {**self._cold.find([key for key in keys if key not in warm]), **warm}

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """See `CacheStorePort.lacking`: what `cold` lacks, and what neither has."""
        return self._cold.lacking(keys) | (frozenset(keys) - self.find(keys).keys())

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        return _distinct(store.children(parent, part) for store in (self._warm, self._cold))

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        return _distinct(store.nearest(parent, part, like) for store in (self._warm, self._cold))

    def resident(self, headers: Sequence[BlockHeader]) -> Mapping[BlockKey, bytes | memoryview]:
        warm = self._warm.resident(headers)
        rest = [header for header in headers if header.key not in warm]
        return {**self._cold.resident(rest), **warm}

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        filled = list(self._warm.read_into(reads))
        rest = [i for i, done in enumerate(filled) if not done]
        cold = self._cold.read_into([reads[i] for i in rest]) if rest else ()
        for i, done in zip(rest, cold, strict=True):
            filled[i] = done
        return filled

    def read(self, header: BlockHeader) -> bytes | None:
        body = self._warm.read(header)
        return self._cold.read(header) if body is None else body

    def prefetch(self, header: BlockHeader) -> bool:
        """See `CacheStorePort.prefetch`. Reads a body of `cold` and puts it into `warm`."""
        if self._warm.prefetch(header) or self._cold.prefetch(header):
            return True
        found = self._cold.find([header.key]).get(header.key)
        body = None if found is None else self._body(header, found.n_bytes)
        return body is not None and self._warm.put(StoredBlock(header, body))

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._warm.touch(keys)
        self._cold.touch(keys)

    # Agents

    def save(self, manifest: Manifest) -> bool:
        """See `CacheStorePort.save`. True when either tier accepts it."""
        warm, cold = self._warm.save(manifest), self._cold.save(manifest)
        return warm or cold

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        manifest = self._cold.manifest(scope, agent_id)
        return self._warm.manifest(scope, agent_id) if manifest is None else manifest

    def manifests(self) -> Sequence[Manifest]:
        """See `CacheStorePort.manifests`. Those that `warm` has too are first."""
        warm = {(one.scope, one.agent_id): one for one in self._warm.manifests()}
        cold = {(one.scope, one.agent_id): one for one in self._cold.manifests()}
        return list({**warm, **cold}.values())

    def scopes(self) -> Sequence[Scope]:
        return list(dict.fromkeys([*self._warm.scopes(), *self._cold.scopes()]))

    def page(self, scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        """See `CacheStorePort.page`. Of `warm` those that `cold` does not have."""
        cold = ((one, True) for one in walk(self._cold, scope, limit, after))
        warm = ((one, False) for one in walk(self._warm, scope, limit, after))
        found: dict[str, Manifest] = {}
        for one, is_cold in heapq.merge(cold, warm, key=lambda one: one[0].place, reverse=True):
            name = one.agent_id
            if is_cold or (name not in found and self._cold.manifest(scope, name) is None):
                found[name] = one
            if len(found) == limit:  # before another is asked for: that would read a page more
                break
        return list(found.values())

    def child_agents(self, scope: Scope, parent: str) -> Sequence[str]:
        tiers = (self._warm, self._cold)
        return sorted({name for tier in tiers for name in tier.child_agents(scope, parent)})

    def users(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, frozenset[AgentName]]:
        """See `CacheStorePort.users`. Up to two of each tier."""
        warm, cold = self._warm.users(hashes), self._cold.users(hashes)
        nothing: frozenset[AgentName] = frozenset()
        return {one: warm.get(one, nothing) | cold.get(one, nothing) for one in hashes}

    def remove(self, scope: Scope, agent_id: str) -> bool:
        warm, cold = (
            self._warm.remove(scope, agent_id),
            self._cold.remove(scope, agent_id),
        )
        return warm or cold

    def pinned(self, tenant: bytes) -> Pinned:
        return self._cold.pinned(tenant)

    # Life

    def stats(self) -> Sequence[StoreStats]:
        return [*self._warm.stats(), *self._cold.stats()]

    def flush(self) -> None:
        self._warm.flush()
        self._cold.flush()

    def close(self) -> None:
        """See `CacheStorePort.close`. `cold` is closed even if closing `warm` raises."""
        try:
            self._warm.close()
        finally:
            self._cold.close()

    def _body(self, header: BlockHeader, n_bytes: int) -> Body | None:
        """A verified body of `cold`, in memory that nothing had to clear or copy: that would hold
        up the thread that steps the engine."""
        if header.part is Part.CHECKPOINT or not n_bytes:
            return self._cold.read(header)
        room = memoryview(mmap(-1, n_bytes // len(header.link.tokens) * BLOCK_TOKENS))
        [read] = self._cold.read_into([BlockRead(header, [room])])
        return _Prefetched(room[:n_bytes]) if read else None


@dataclass(frozen=True, slots=True)
class _Prefetched:
    """A body that has been read. See `DeferredBody`."""

    body: memoryview

    def __len__(self) -> int:
        return len(self.body)

    def wait(self) -> memoryview:
        return self.body


class SharedTiers(TieredStore):
    """Tiers of this machine, `warm`, in front of one that several machines share, `cold`.

    What `warm` has is not asked of `cold`, and what it has not is not asked of `warm`; what is read
    from `cold` is kept in `warm`, so that a network is asked once. Pins are for the quota of
    `warm`, and its drive is the one that wears out.
    """

    @property
    def holds_back(self) -> bool:
        return self.warm.holds_back or self.cold.holds_back

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        here = self.warm.find([read.header.key for read in reads])
        filled = [False] * len(reads)
        for store, places in (
            (self.warm, [i for i, read in enumerate(reads) if read.header.key in here]),
            (self.cold, range(len(reads))),
        ):
            rest = [i for i in places if not filled[i]]
            done = store.read_into([reads[i] for i in rest]) if rest else ()
            for i, good in zip(rest, done, strict=True):
                filled[i] = good
                if good and store is self.cold:
                    self._keep(reads[i].header, b"".join(reads[i].segments))
        return filled

    def read(self, header: BlockHeader) -> bytes | None:
        body = self.warm.read(header) if self.warm.find([header.key]) else None
        if body is not None:
            return body
        body = self.cold.read(header)
        if body is not None:
            self._keep(header, body)
        return body

    def _keep(self, header: BlockHeader, body: bytes) -> None:
        """Another machine has written it: this one's drive need not."""
        self.warm.put(StoredBlock(header, body, interim=True))

    def pinned(self, tenant: bytes) -> Pinned:
        return self.warm.pinned(tenant)


def _distinct(found: Iterable[Sequence[BlockHeader]]) -> list[BlockHeader]:
    return list({header.key: header for headers in found for header in headers}.values())
