"""EvictionOrder: selects the entries of several tenants to evict when their quota is full."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Generic, TypeVar

from semantic.domain.fair_share import equal_part, kept, pins_hold
from semantic.domain.stored import Pinned, left_at

E = TypeVar("E", bound=Hashable)


@dataclass(slots=True)
class _Tenant(Generic[E]):
    # `left` has unpinned entries that their agents no longer need. Queues map entries to last uses,
    # oldest first.

    lru: OrderedDict[E, int] = field(default_factory=OrderedDict)
    left: OrderedDict[E, int] = field(default_factory=OrderedDict)
    pinned: OrderedDict[E, int] = field(default_factory=OrderedDict)
    n_bytes: int = 0
    pinned_bytes: int = 0
    uses: int = 0

    def add(self, entry: E, size: int, *, pinned: bool) -> None:
        self._insert(self.pinned if pinned else self.lru, entry)
        self.n_bytes += size
        self.pinned_bytes += size if pinned else 0

    def remove(self, entry: E, size: int) -> None:
        self.n_bytes -= size
        if self._take(entry) is self.pinned:
            self.pinned_bytes -= size

    def is_evictable(self, entry: E) -> bool:
        return entry in self.lru or entry in self.left

    def entries(self, *, pinned: bool) -> Iterator[E]:
        # Pinned entries come after all others.
        used = heapq.merge(self.left.items(), self.lru.items(), key=itemgetter(1))
        return itertools.chain(map(itemgetter(0), used), self.pinned if pinned else ())

    def abandon(self, entries: Iterable[E]) -> None:
        firsts = (next(iter(one.values()), self.uses) for one in (self.lru, self.left))
        at = left_at(min(firsts), self.uses)
        for entry in entries:
            if self.lru.get(entry, at) > at:
                del self.lru[entry]
                self.left[entry] = at

    def use(self, entry: E) -> None:
        taken = self._take(entry)
        self._insert(self.pinned if taken is self.pinned else self.lru, entry)

    def _insert(self, order: OrderedDict[E, int], entry: E) -> None:
        self.uses += 1
        order[entry] = self.uses

    def _take(self, entry: E) -> OrderedDict[E, int]:
        """Remove the entry; return its former queue."""
        orders = (self.lru, self.left, self.pinned)
        order = next(one for one in orders if entry in one)
        del order[entry]
        return order


class EvictionOrder(Generic[E]):
    """Selects entries to evict so that the other entries fit in `max_bytes`. Not thread-safe.

    Takes the least recently used entry of the largest tenant first, and pinned entries last.
    """

    def __init__(
        self,
        max_bytes: int,
        public: bytes,
        size: Callable[[E], int],
        dependents: Callable[[E], Iterable[E]],
    ) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self.tenants: dict[bytes, _Tenant[E]] = {}  # tenants with entries
        self._public = public
        self._size = size
        self._dependents = dependents

    @property
    def pinned_bytes(self) -> int:
        return sum(one.pinned_bytes for one in self.tenants.values())

    def pinned_of(self, tenant: bytes) -> Pinned:
        """See `AgentIndexPort.pinned`."""
        n_others = len(self.tenants.keys() - {self._public, tenant})
        return Pinned(self._of(tenant).pinned_bytes, equal_part(self.max_bytes, n_others))

    def add(self, tenant: bytes, entry: E, *, pinned: bool) -> None:
        """Add an entry as the most recently used."""
        size = self._size(entry)
        self.n_bytes += size
        self.tenants.setdefault(tenant, _Tenant()).add(entry, size, pinned=pinned)

    def remove(self, tenant: bytes, entry: E) -> None:
        """Remove an entry."""
        size = self._size(entry)
        self.n_bytes -= size
        self.tenants[tenant].remove(entry, size)
        if not self.tenants[tenant].n_bytes:
            del self.tenants[tenant]

    def use(self, tenant: bytes, entry: E) -> None:
        self.tenants[tenant].use(entry)

    def abandon(self, tenant: bytes, entries: Iterable[E]) -> None:
        """Mark `entries` for earlier eviction, since their agents no longer need them."""
        self.tenants[tenant].abandon(entries)

    def clear(self) -> None:
        self.tenants.clear()
        self.n_bytes = 0

    def victims(
        self, tenant: bytes, n_bytes: int, spared: Collection[E] = ()
    ) -> Collection[E] | None:
        """Return the entries to evict so that `n_bytes` more of `tenant` fit, or None if they
        cannot fit."""
        excess = self.n_bytes + n_bytes - self.max_bytes
        if excess <= 0:
            return ()
        own = self._of(tenant)
        then = own.n_bytes + n_bytes
        others = [one for tag, one in self.tenants.items() if tag != tenant]
        hold = pins_hold(len(others), is_public=tenant == self._public)
        least = own.pinned_bytes + sum(self._size(one) for one in spared if own.is_evictable(one))
        least += sum(kept(one.n_bytes, one.pinned_bytes if hold else 0, then) for one in others)
        if least + n_bytes > self.max_bytes:
            return None
        found, total = self._first(self._order(tenant, then, spared, pins_stay=hold), excess)
        return found if total >= excess else None

    def oldest(self, n_bytes: int) -> Collection[E]:
        """Return the least recently used unpinned entries that together have `n_bytes`, or all."""
        return self._first(self._order(b"", 0, (), pins_stay=True), n_bytes)[0]

    def _of(self, tenant: bytes) -> _Tenant[E]:
        return self.tenants.get(tenant, _Tenant())

    def _first(self, order: Iterable[E], n_bytes: int) -> tuple[Collection[E], int]:
        """Return the first entries with at least `n_bytes` in total, and their bytes."""
        found: dict[E, None] = {}
        total = 0
        for entry in order:
            if entry not in found:
                found[entry] = None
                total += self._size(entry)
            if total >= n_bytes:
                break
        return found, total

    def _order(
        self, tenant: bytes, then: int, spared: Collection[E], *, pins_stay: bool
    ) -> Iterator[E]:
        # Other tenants lose only bytes above `then`, the bytes that `tenant` will have. Entries may
        # repeat.
        larger = [
            (-one.n_bytes, tag)
            for tag, one in self.tenants.items()
            if tag != tenant and one.n_bytes > then
        ]
        heapq.heapify(larger)
        queues = {
            tag: self._expanded(self.tenants[tag].entries(pinned=not pins_stay), spared)
            for _, tag in larger
        }
        seen: set[E] = set()
        while larger:
            n_bytes, tag = heapq.heappop(larger)
            entry = next(queues[tag], None)
            if entry is None:
                continue
            yield entry
            n_bytes += 0 if entry in seen else self._size(entry)
            seen.add(entry)
            if -n_bytes > then:
                heapq.heappush(larger, (n_bytes, tag))
        yield from self._expanded(self._of(tenant).entries(pinned=False), spared)

    def _expanded(self, entries: Iterable[E], spared: Collection[E]) -> Iterator[E]:
        for entry in entries:
            if entry not in spared:
                yield from self._dependents_first(entry)

    def _dependents_first(self, entry: E) -> Sequence[E]:
        # No dependent is skipped: an entry is pinned or spared as soon as a dependent is.
        found = {entry: None}
        waiting = [entry]
        while waiting:
            after = [one for one in self._dependents(waiting.pop()) if one not in found]
            found.update(dict.fromkeys(after))
            waiting += after
        return list(reversed(found))
