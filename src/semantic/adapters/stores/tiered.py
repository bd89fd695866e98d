"""Two tiers as one store: a fast `warm` tier and a durable `cold` tier.

Writes every block to both tiers, as far as their quotas allow.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap

from semantic.adapters.stores.agent_index import TierAgents
from semantic.domain.block_hash import BlockHash, BlockKey, Part
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import BlockHeader, BlockRead, Body, Found, StoredBlock, StoreStats
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.store import StorePort


class TieredStore:
    """Reads blocks from `warm`, or from `cold` if `warm` lacks them. A read copies no block to
    `warm`: the engine saves restored sequences again.

    Methods without a docstring: see `CacheStorePort`.
    """

    def __init__(self, warm: StorePort, cold: StorePort) -> None:
        """Raises InvalidRequestError unless both tiers have the same secret."""
        if not hmac.compare_digest(warm.secret, cold.secret):
            raise InvalidRequestError("the warm store must be made with the cold store's secret")
        self.warm = warm
        self.cold = cold
        self.agents = TierAgents(warm.agents, cold.agents, cold.agents)
        self.secret = cold.secret

    @property
    def holds_back(self) -> bool:
        return self.cold.holds_back

    # Blocks

    def put(self, block: StoredBlock) -> bool:
        """See `CacheStorePort.put`. Returns True if either tier accepts the block."""
        warm = self.warm.put(block)
        if block.interim and self.cold.holds_back:
            return warm
        return self.cold.put(block) or warm

    def drop(self, keys: Sequence[BlockKey]) -> None:
        self.warm.drop(keys)
        self.cold.drop(keys)

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        warm = self.warm.find(keys)
        return {**self.cold.find([key for key in keys if key not in warm]), **warm}

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """See `CacheStorePort.lacking`: the keys that `cold` lacks, and the keys that both tiers
        lack."""
        return self.cold.lacking(keys) | (frozenset(keys) - self.find(keys).keys())

    def children(self, parent: BlockHash, part: Part) -> Sequence[BlockHeader]:
        return _distinct(store.children(parent, part) for store in (self.warm, self.cold))

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        return _distinct(store.nearest(parent, part, like) for store in (self.warm, self.cold))

    def resident(self, headers: Sequence[BlockHeader]) -> Mapping[BlockKey, bytes | memoryview]:
        warm = self.warm.resident(headers)
        rest = [header for header in headers if header.key not in warm]
        return {**self.cold.resident(rest), **warm}

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        filled = list(self.warm.read_into(reads))
        rest = [i for i, done in enumerate(filled) if not done]
        cold = self.cold.read_into([reads[i] for i in rest]) if rest else ()
        for i, done in zip(rest, cold, strict=True):
            filled[i] = done
        return filled

    def read(self, header: BlockHeader) -> bytes | None:
        body = self.warm.read(header)
        return self.cold.read(header) if body is None else body

    def prefetch(self, header: BlockHeader) -> bool:
        """See `CacheStorePort.prefetch`."""
        if self.warm.prefetch(header) or self.cold.prefetch(header):
            return True
        found = self.cold.find([header.key]).get(header.key)
        body = None if found is None else self._body(header, found.n_bytes)
        return body is not None and self.warm.put(StoredBlock(header, body))

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self.warm.touch(keys)
        self.cold.touch(keys)

    # Life

    def stats(self) -> Sequence[StoreStats]:
        return [*self.warm.stats(), *self.cold.stats()]

    def flush(self) -> None:
        self.warm.flush()
        self.cold.flush()

    def close(self) -> None:
        """See `CacheStorePort.close`."""
        try:
            self.warm.close()
        finally:
            self.cold.close()

    def _body(self, header: BlockHeader, n_bytes: int) -> Body | None:
        # Neither clear nor copy memory here: that would delay the stepping thread.
        if header.part is Part.CHECKPOINT or not n_bytes:
            return self.cold.read(header)
        room = memoryview(mmap(-1, n_bytes // len(header.link.tokens) * BLOCK_TOKENS))
        [read] = self.cold.read_into([BlockRead(header, [room])])
        return _Prefetched(room[:n_bytes]) if read else None


@dataclass(frozen=True, slots=True)
class _Prefetched:
    body: memoryview

    def __len__(self) -> int:
        return len(self.body)

    def wait(self) -> memoryview:
        return self.body


class SharedTiers(TieredStore):
    """This machine's tiers as `warm`, in front of a `cold` store of several machines.

    Blocks from `cold` also go into `warm`, so that each crosses the network once. Pins count
    against the quota of `warm`.
    """

    def __init__(self, warm: StorePort, cold: StorePort) -> None:
        super().__init__(warm, cold)
        self.agents = TierAgents(warm.agents, cold.agents, warm.agents)

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
        # As an interim block: another machine has written it already.
        self.warm.put(StoredBlock(header, body, interim=True))


def _distinct(found: Iterable[Sequence[BlockHeader]]) -> list[BlockHeader]:
    return list({header.key: header for headers in found for header in headers}.values())
