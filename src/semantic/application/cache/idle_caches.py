"""Idle caches that stay in the pool, in the memory where they were computed.

Knows the pool, to give blocks back; not how a cache is computed.
"""

from __future__ import annotations

from collections import OrderedDict

from semantic.domain.entities import AgentBlocks
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CacheKey


class IdleCaches:
    """The last cache of each agent, the one used longest ago dropped first.

    A cache's blocks are held in the pool in the name of its agent. Not locked: whoever shares it
    between threads guards it.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._caches: OrderedDict[CacheKey, AgentBlocks] = OrderedDict()

    def get(self, key: CacheKey) -> AgentBlocks | None:
        """The agent's cache, or None. It stays here: read it, do not change it."""
        return self._caches.get(key)

    def put(self, key: CacheKey, blocks: AgentBlocks) -> None:
        """Keep `blocks` as the agent's cache, instead of an older one."""
        older = self._caches.pop(key, None)
        if older is not None and older is not blocks:
            self._drop(older)
        self._caches[key] = blocks

    def take(self, key: CacheKey) -> AgentBlocks | None:
        """The agent's cache, now the caller's, or None."""
        return self._caches.pop(key, None)

    def evict(self) -> bool:
        """Drop the cache that was used longest ago; False when there is none."""
        if not self._caches:
            return False
        _, blocks = self._caches.popitem(last=False)
        self._drop(blocks)
        return True

    def oldest_first(self) -> tuple[CacheKey, ...]:
        """Whose caches are kept, the one used longest ago first."""
        return tuple(self._caches)

    def _drop(self, blocks: AgentBlocks) -> None:
        self._pool.free(blocks.all_blocks(), blocks.owner)
        blocks.retire()
