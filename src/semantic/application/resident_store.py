"""Idle caches that stay in the pool, in the memory where they were computed.

Implements `CacheStorePort`. Knows the pool, to give blocks back; not how a cache is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from semantic.domain.entities import AgentBlocks
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CacheKey

KV = TypeVar("KV")


class ResidentStore(Generic[KV]):
    """The last cache of each agent, the one used longest ago dropped first.

    A cache's blocks are held in the pool in the name of its agent. Not locked: whoever shares it
    between threads guards it.
    """

    def __init__(self, pool: BlockPool[KV]) -> None:
        self._pool = pool
        self._caches: OrderedDict[CacheKey, AgentBlocks[KV]] = OrderedDict()

    def get(self, key: CacheKey) -> AgentBlocks[KV] | None:
        """See `CacheStorePort.get`."""
        return self._caches.get(key)

    def put(self, key: CacheKey, blocks: AgentBlocks[KV]) -> None:
        """See `CacheStorePort.put`."""
        older = self._caches.pop(key, None)
        if older is not None and older is not blocks:
            self._drop(older)
        self._caches[key] = blocks

    def take(self, key: CacheKey) -> AgentBlocks[KV] | None:
        """See `CacheStorePort.take`."""
        return self._caches.pop(key, None)

    def evict(self) -> bool:
        """See `CacheStorePort.evict`."""
        if not self._caches:
            return False
        _, blocks = self._caches.popitem(last=False)
        self._drop(blocks)
        return True

    def oldest_first(self) -> tuple[CacheKey, ...]:
        """See `CacheStorePort.oldest_first`."""
        return tuple(self._caches)

    def _drop(self, blocks: AgentBlocks[KV]) -> None:
        self._pool.free(blocks.all_blocks(), blocks.agent_id)
        blocks.retire()
