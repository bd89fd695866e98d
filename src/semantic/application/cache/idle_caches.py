"""IdleCaches: the pool's LRU list of agents' caches that no request is using.

Knows the pool, to free evicted blocks, and what agents hint; not how a cache is computed.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from typing import NamedTuple

from semantic.domain.entities import AgentBlocks
from semantic.domain.identity import Hints
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CacheKey
from semantic.ports.generation import Clock

_LONGEST_EXPECTED = 300.0
"""Seconds. An agent that is away for longer is as any other: in `benchmarks.absence` wrong hints do
more harm where they are believed for longer, and right ones gain nothing more."""

_DONE, _IDLE, _EXPECTED = range(3)


class IdleCaches:
    """Each agent's newest cache, in least recently used order.

    The pool counts an agent as the holder of its cache's blocks, and these references as evictable.
    The tenant with most tokens in its caches is evicted from; what its agents hint changes the
    order of its own caches only. Not thread-safe: the caller locks.
    """

    def __init__(
        self,
        pool: BlockPool,
        clock: Clock = time.monotonic,
        *,
        longest_expected: float = _LONGEST_EXPECTED,
    ) -> None:
        """An agent that is away for more than `longest_expected` seconds is as any other."""
        self._pool = pool
        self._longest_expected = longest_expected
        self._clock = clock
        self._caches: OrderedDict[CacheKey, AgentBlocks] = OrderedDict()
        self._tenants: dict[str, _Order] = {}
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
        self._tenants.setdefault(key.tenant, _Order()).add(key, self._clock())
        self._tokens[key.tenant] += blocks.total_tokens
        self._pool.mark_evictable(blocks.all_blocks(), blocks.owner)

    def heed(self, key: CacheKey, hints: Hints) -> None:
        """Evict the agent's cache before its tenant's others if it is done, and after them until it
        is back; then it counts as used. Without a cache or a hint nothing changes."""
        own = self._tenants.get(key.tenant)
        if own is None or key not in self._caches:
            return
        if hints.done:
            own.move(key, _DONE, self._clock())
        elif hints.back_in is not None and hints.back_in <= self._longest_expected:
            own.move(key, _EXPECTED, self._clock() + hints.back_in)

    def take(self, key: CacheKey) -> AgentBlocks | None:
        """Remove and return the agent's cache, or None."""
        blocks = self._caches.pop(key, None)
        if blocks is not None:
            self._uncount(key, blocks.total_tokens)
            self._pool.unmark_evictable(blocks.all_blocks(), blocks.owner)
        return blocks

    def evict(self) -> bool:
        """Free a cache of the tenant with most; False if there is none.

        First those of agents that are done, then the least recently used, then the one whose agent
        is expected last.
        """
        if not self._caches:
            return False
        largest = max(self._tokens, key=self._tokens.__getitem__)
        blocks = self.take(self._tenants[largest].first(self._clock()))
        if blocks is not None:
            self._drop(blocks)
        return True

    def __len__(self) -> int:
        return len(self._caches)

    def lru_order(self) -> tuple[CacheKey, ...]:
        """Keys of all caches, least recently used first."""
        return tuple(self._caches)

    def _uncount(self, key: CacheKey, n_tokens: int) -> None:
        own = self._tenants[key.tenant]
        own.remove(key)
        self._tokens[key.tenant] -= n_tokens
        if not own:
            del self._tenants[key.tenant], self._tokens[key.tenant]

    def _drop(self, blocks: AgentBlocks) -> None:
        self._pool.free(blocks.all_blocks(), blocks.owner)
        blocks.retire()


class _Place(NamedTuple):
    """A cache's place in its tenant's order; no two have the same `number`.

    `at` is when it was used, or, negative, when its agent is expected: the latest comes first.
    """

    rank: int
    at: float
    number: int
    key: CacheKey


class _Order:
    """One tenant's caches, in the order in which they are evicted."""

    def __init__(self) -> None:
        self._order: list[_Place] = []
        self._places: dict[CacheKey, _Place] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._order)

    def add(self, key: CacheKey, now: float) -> None:
        """Add a cache that was used now."""
        self._added += 1
        self._insert(_Place(_IDLE, now, self._added, key))

    def move(self, key: CacheKey, rank: int, at: float) -> None:
        """Give a cache another place."""
        number = self._places[key].number
        self.remove(key)
        self._insert(_Place(rank, -at if rank == _EXPECTED else at, number, key))

    def remove(self, key: CacheKey) -> None:
        """Remove a cache."""
        del self._order[bisect_left(self._order, self._places.pop(key))]

    def first(self, now: float) -> CacheKey:
        """The cache to evict; there must be one."""
        while (last := self._order[-1]).rank == _EXPECTED and -last.at <= now:
            self.move(last.key, _IDLE, -last.at)
        return self._order[0].key

    def _insert(self, place: _Place) -> None:
        insort(self._order, place)
        self._places[place.key] = place
