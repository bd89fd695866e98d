"""Two stores as one: a warm one that is fast and a cold one that lasts.

Implements `CacheStorePort`. Everything is kept in both, as far as each has room; nothing moves
between them. Knows neither where they keep it nor how.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence

from semantic.domain.block_hash import BlockHash, BlockKey, Part, Scope
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import (
    BlockHeader,
    BlockRead,
    Found,
    Manifest,
    StoredBlock,
    StoreStats,
)
from semantic.ports.store import CacheStorePort


class TieredStore:
    """Reads from `warm` what is there and from `cold` the rest, straight into the targets.

    What only `cold` has is not copied to `warm`: it is on its way into a sequence, and comes
    back as new blocks do. Of an agent's manifests the one in `cold` counts, with its generation,
    and that in `warm` only when `cold` has none.
    """

    def __init__(self, warm: CacheStorePort, cold: CacheStorePort) -> None:
        """Raises InvalidRequestError when the two do not have the same secret."""
        if not hmac.compare_digest(warm.secret, cold.secret):
            raise InvalidRequestError("the warm store must be made with the cold store's secret")
        self._warm = warm
        self._cold = cold

    @property
    def secret(self) -> bytes:
        """See `CacheStorePort.secret`."""
        return self._cold.secret

    # Blocks

    def put(self, block: StoredBlock) -> bool:
        """See `CacheStorePort.put`. True when either keeps it."""
        warm, cold = self._warm.put(block), self._cold.put(block)
        return warm or cold

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        """See `CacheStorePort.find`."""
        warm = self._warm.find(keys)
        return {**self._cold.find([key for key in keys if key not in warm]), **warm}

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """See `CacheStorePort.lacking`: what `cold` lacks, and what is nowhere."""
        return self._cold.lacking(keys) | (frozenset(keys) - self.find(keys).keys())

    def children(
        self, parent: BlockHash, part: Part, like: Sequence[int] | None = None
    ) -> Sequence[BlockHeader]:
        """See `CacheStorePort.children`."""
        stores = self._warm, self._cold
        headers = [header for store in stores for header in store.children(parent, part, like)]
        return list({header.key: header for header in headers}.values())

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        """See `CacheStorePort.read_into`."""
        filled = list(self._warm.read_into(reads))
        rest = [i for i, done in enumerate(filled) if not done]
        cold = self._cold.read_into([reads[i] for i in rest]) if rest else ()
        for i, done in zip(rest, cold, strict=True):
            filled[i] = done
        return filled

    def read(self, header: BlockHeader) -> bytes | None:
        """See `CacheStorePort.read`."""
        body = self._warm.read(header)
        return self._cold.read(header) if body is None else body

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `CacheStorePort.touch`."""
        self._warm.touch(keys)
        self._cold.touch(keys)

    # Agents

    def save(self, manifest: Manifest) -> bool:
        """See `CacheStorePort.save`. True when either keeps it."""
        warm, cold = self._warm.save(manifest), self._cold.save(manifest)
        return warm or cold

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        """See `CacheStorePort.manifest`."""
        manifest = self._cold.manifest(scope, agent_id)
        return self._warm.manifest(scope, agent_id) if manifest is None else manifest

    def manifests(self) -> Sequence[Manifest]:
        """See `CacheStorePort.manifests`. Those that `warm` knows too come first."""
        warm = {(one.scope, one.agent_id): one for one in self._warm.manifests()}
        cold = {(one.scope, one.agent_id): one for one in self._cold.manifests()}
        return list({**warm, **cold}.values())

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """See `CacheStorePort.remove`."""
        warm, cold = self._warm.remove(scope, agent_id), self._cold.remove(scope, agent_id)
        return warm or cold

    # Life

    def stats(self) -> Sequence[StoreStats]:
        """See `CacheStorePort.stats`."""
        return [*self._warm.stats(), *self._cold.stats()]

    def flush(self) -> None:
        """See `CacheStorePort.flush`."""
        self._warm.flush()
        self._cold.flush()

    def close(self) -> None:
        """See `CacheStorePort.close`. `cold` is closed whatever happens to `warm`."""
        try:
            self._warm.close()
        finally:
            self._cold.close()
