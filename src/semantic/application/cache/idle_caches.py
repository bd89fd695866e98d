"""IdleCaches: the pool's LRU list of agents' caches that no request is using.

Knows the pool, to free evicted blocks; not how a cache is computed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from semantic.domain.entities import AgentBlocks
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CacheKey


class IdleCaches:
    """Each agent's newest cache, in least recently used order.

    The pool counts an agent as the holder of its cache's blocks, and these references as evictable.
    The tenant with most tokens in its caches is evicted from. Not thread-safe: the caller locks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._caches: OrderedDict[CacheKey, AgentBlocks] = OrderedDict()
        self._tenants: dict[str, OrderedDict[CacheKey, int]] = {}  # the tokens of each cache
        self._tokens: Counter[str] = Counter()  # of each tenant

    def get(self, key: CacheKey) -> AgentBlocks | None:
        """The agent's cache, or None; not a use. The caller must not change it."""
        return self._caches.get(key)

    def put(self, key: CacheKey, blocks: AgentBlocks) -> None:
        """Make `blocks` the agent's cache; an older one is freed."""
        older = self.take(key)
        if older is not None and older is not blocks:
            self._drop(older)
        self._caches[key] = blocks
        self._tenants.setdefault(key.tenant, OrderedDict())[key] = blocks.total_tokens
        self._tokens[key.tenant] += blocks.total_tokens
        self._pool.mark_evictable(blocks.all_blocks(), blocks.owner)

    def take(self, key: CacheKey) -> AgentBlocks | None:
        """Remove and return the agent's cache, or None."""
        blocks = self._caches.pop(key, None)
        if blocks is not None:
            self._uncount(key)
            self._pool.unmark_evictable(blocks.all_blocks(), blocks.owner)
        return blocks

    def evict(self) -> bool:
        """Free the least recently used cache of the tenant with most; False if there is none."""
        if not self._caches:
            return False
        largest = max(self._tokens, key=self._tokens.__getitem__)
        blocks = self.take(next(iter(self._tenants[largest])))
        if blocks is not None:
            self._drop(blocks)
        return True

    def lru_order(self) -> tuple[CacheKey, ...]:
        """Keys of all caches, least recently used first."""
        return tuple(self._caches)

    def _uncount(self, key: CacheKey) -> None:
        own = self._tenants[key.tenant]
        self._tokens[key.tenant] -= own.pop(key)
        if not own:
            del self._tenants[key.tenant], self._tokens[key.tenant]

    def _drop(self, blocks: AgentBlocks) -> None:
        self._pool.free(blocks.all_blocks(), blocks.owner)
        blocks.retire()
