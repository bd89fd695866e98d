"""IdleCaches: the agents' caches in the pool between requests, and their order of eviction."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from semantic.domain.entities import AgentBlocks
from semantic.domain.identity import Hints
from semantic.domain.prefix import PromptDigests, digests_of
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import BLOCK_TOKENS, CacheKey
from semantic.ports.generation import Clock

_LONGEST_EXPECTED = 300.0
"""The longest absence, in seconds, that a hint may announce. In `benchmarks.absence`, longer
absences gain no more, and cost more if the hint is wrong."""

_DONE, _IDLE, _EXPECTED = range(3)


class IdleCaches:
    """Holds each agent's newest cache. Evicts first from the tenant with the most cached tokens.
    Not thread-safe."""

    def __init__(
        self,
        pool: BlockPool,
        clock: Clock = time.monotonic,
        *,
        longest_expected: float = _LONGEST_EXPECTED,
        finds_alike: bool = True,
    ) -> None:
        """Ignores hints of an absence longer than `longest_expected` seconds. Unless `finds_alike`,
        `alike` finds nothing."""
        self._pool = pool
        self._longest_expected = longest_expected
        self._clock = clock
        self._caches: OrderedDict[CacheKey, AgentBlocks] = OrderedDict()
        self._finds_alike = finds_alike
        self._beginnings = _Beginnings()
        self._tenants: dict[str, _Order] = {}
        self._tokens: Counter[str] = Counter()  # per tenant

    def get(self, key: CacheKey) -> AgentBlocks | None:
        """Return the agent's cache, or None. The call does not count as a use."""
        return self._caches.get(key)

    def put(self, key: CacheKey, blocks: AgentBlocks) -> None:
        """Make `blocks` the agent's cache, and free the agent's previous cache."""
        older = self.take(key)
        if older is not None and older is not blocks:
            self._drop(older)
        self._caches[key] = blocks
        self._tenants.setdefault(key.tenant, _Order()).add(key, self._clock())
        self._tokens[key.tenant] += blocks.total_tokens
        if self._finds_alike:
            self._beginnings.add(key, blocks.token_ids)
        self._pool.mark_evictable(blocks.all_blocks(), blocks.owner)

    def heed(self, key: CacheKey, hints: Hints) -> None:
        """Apply an agent's hints to the order of eviction."""
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
            self._beginnings.remove(key)
            self._uncount(key, blocks.total_tokens)
            self._pool.unmark_evictable(blocks.all_blocks(), blocks.owner)
        return blocks

    def alike(self, tenant: str, tokens: Sequence[int]) -> list[CacheKey]:
        """Return a few of the tenant's caches that share a long beginning with `tokens`."""
        return self._beginnings.find(tenant, tokens) if tenant in self._tenants else []

    def evict(self) -> bool:
        """Free a cache of the tenant with the most cached tokens. Returns False if no cache is
        left. Frees caches of finished agents first, and of expected agents last."""
        if not self._caches:
            return False
        largest = max(self._tokens, key=self._tokens.__getitem__)
        blocks = self.take(self._tenants[largest].first(self._clock()))
        if blocks is not None:
            self._drop(blocks)
        return True

    def evict_to(self, used_bytes: int) -> bool:
        """Evict until the pool uses at most `used_bytes`; return whether a cache was evicted."""
        evicted = False
        while self._pool.used_bytes > used_bytes and self.evict():
            evicted = True
        return evicted

    def __len__(self) -> int:
        return len(self._caches)

    def lru_order(self) -> tuple[CacheKey, ...]:
        """Return the keys of all caches, least recently used first."""
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
    # `at` is the time of last use. For an expected agent it is minus the time of return, so that
    # the latest return sorts first.

    rank: int
    at: float
    number: int
    key: CacheKey


class _Order:
    def __init__(self) -> None:
        self._order: list[_Place] = []
        self._places: dict[CacheKey, _Place] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._order)

    def add(self, key: CacheKey, now: float) -> None:
        self._added += 1
        self._insert(_Place(_IDLE, now, self._added, key))

    def move(self, key: CacheKey, rank: int, at: float) -> None:
        number = self._places[key].number
        self.remove(key)
        self._insert(_Place(rank, -at if rank == _EXPECTED else at, number, key))

    def remove(self, key: CacheKey) -> None:
        del self._order[bisect_left(self._order, self._places.pop(key))]

    def first(self, now: float) -> CacheKey:
        while (last := self._order[-1]).rank == _EXPECTED and -last.at <= now:
            self.move(last.key, _IDLE, -last.at)
        return self._order[0].key

    def _insert(self, place: _Place) -> None:
        insort(self._order, place)
        self._places[place.key] = place


_MOST_ALIKE = 8
"""The maximum number of caches with the same beginning to compare with a prompt."""
_Beginning = tuple[str, int, bytes]
"""A tenant, a number of tokens, and their digest."""


class _Beginnings:
    def __init__(self) -> None:
        self._keys: dict[_Beginning, dict[CacheKey, None]] = {}
        self._digests: dict[CacheKey, PromptDigests] = {}

    def add(self, key: CacheKey, tokens: Sequence[int]) -> None:
        self._digests[key] = digests = digests_of(tokens)
        for one in _beginnings(key.tenant, digests):
            self._keys.setdefault(one, {})[key] = None

    def remove(self, key: CacheKey) -> None:
        digests = self._digests.pop(key, None)
        for one in () if digests is None else _beginnings(key.tenant, digests):
            keys = self._keys[one]
            del keys[key]
            if not keys:
                del self._keys[one]

    def find(self, tenant: str, tokens: Sequence[int]) -> list[CacheKey]:
        digests = digests_of(tokens if self._digests else ())
        for one in reversed(list(_beginnings(tenant, digests))):
            if keys := self._keys.get(one):
                return list(islice(reversed(keys), _MOST_ALIKE))
        return []


def _beginnings(tenant: str, digests: PromptDigests) -> Iterator[_Beginning]:
    for length, digest in digests.items():
        if length >= BLOCK_TOKENS:
            yield tenant, length, digest
