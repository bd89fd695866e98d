"""Divides the engine's time and space equally among tenants.

FairShare is start-time fair queueing (Goyal, Vin and Cheng, 1996). FairRoom is a dynamic threshold
(Choudhury and Hahne, 1998).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FairShare:
    """Tracks how much each tenant has used, in any unit."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._away: set[str] = set()  # tenants that want nothing but have used more than others
        self._now = 0.0  # the highest use of a tenant when it was served

    def begin(self, tenant: str) -> None:
        """Record that a tenant now waits for service."""
        self._away.discard(tenant)
        self._used[tenant] = max(self._used.get(tenant, 0.0), self._now)

    def next(self, wanting: Iterable[str], owing: Mapping[str, float] | None = None) -> str:
        """Return the tenant in `wanting` with the least use. The cost of a tenant's running work,
        `owing`, counts as used."""
        more = owing or {}
        tenant = min(wanting, key=lambda one: self._used[one] + more.get(one, 0.0))
        self._now = max(self._now, self._used[tenant])
        return tenant

    def charge(self, tenant: str, cost: float) -> None:
        """Record that a tenant has used `cost`, 0 or more."""
        self._used[tenant] += cost

    def end(self, tenant: str) -> None:
        """Record that a tenant no longer waits for service."""
        self._away.add(tenant)
        if len(self._away) == len(self._used):
            self._now = max(self._used.values())
        for name in [name for name in self._away if self._used[name] <= self._now]:
            del self._used[name]
            self._away.discard(name)


class RoundRobin(Generic[V]):
    """A queue of values by tenant. Tenants alternate, and each tenant's values stay in order."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[V]] = OrderedDict()  # the next tenant first
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def push(self, tenant: str, value: V) -> None:
        self._n += 1
        self._waiting.setdefault(tenant, deque()).append(value)

    def pop(self) -> V:
        """Remove and return the next value. Raises KeyError if there is none."""
        tenant, own = self._waiting.popitem(last=False)
        self._n -= 1
        if len(own) > 1:
            self._waiting[tenant] = own
        return own.popleft()


class FairRoom:
    """Divides a space of size `most`, in any unit, among tenants.

    A tenant that holds nothing may take any amount. Another tenant may hold at most `times` the
    space that stays free. With `times` 1, two tenants get a third each.
    """

    def __init__(self, most: int, times: int = 1) -> None:
        self.most = most
        self.used = 0
        self._times = times
        self._tenants: Counter[str] = Counter()

    def of(self, tenant: str) -> int:
        return self._tenants[tenant]

    def fits(self, n: int) -> bool:
        return self.used + n <= self.most

    def leaves_room(self, tenant: str, n: int) -> bool:
        """Return whether the tenant may take `n` more units of the space."""
        own = self._tenants[tenant]
        return not own or own + n <= self._times * (self.most - self.used - n)

    def take(self, tenant: str, n: int) -> None:
        """Record that the tenant took `n` more units, without checking any limit."""
        self.used += n
        self._tenants[tenant] += n

    def give(self, tenant: str, n: int) -> None:
        """Record that the tenant returned `n` units."""
        self.used -= n
        self._tenants[tenant] -= n
        if not self._tenants[tenant]:
            del self._tenants[tenant]


class FairLru(Generic[K, V]):
    """Keeps values by tenant and key, with a total weight of at most `most`.

    When full, drops the least recently used value of the tenant that holds the largest weight.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tenants: dict[Hashable, OrderedDict[K, tuple[V, int]]] = {}
        self._weights: dict[Hashable, int] = {}
        self.weight = 0

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def get(self, tenant: Hashable, key: K) -> V | None:
        """Return the value and mark it as the last used; None if the key is unknown."""
        own = self._tenants.get(tenant)
        found = None if own is None else own.get(key)
        if own is None or found is None:
            return None
        own.move_to_end(key)
        return found[0]

    def peek(self, tenant: Hashable, key: K) -> V | None:
        """Return the value without marking it as used; None if the key is unknown."""
        found = self._tenants.get(tenant, OrderedDict()).get(key)
        return None if found is None else found[0]

    def latest(self, tenant: Hashable, most: int) -> list[tuple[K, V]]:
        """Return the tenant's `most` last used keys and values, last used first."""
        own = reversed(self._tenants.get(tenant, OrderedDict()).items())
        return [(key, value) for key, (value, _) in islice(own, most)]

    def put(self, tenant: Hashable, key: K, value: V, weight: int = 1) -> None:
        """Set a value, dropping other values if necessary. Drops a value that exceeds `most`."""
        self.remove(tenant, key)
        if weight > self._most:
            return
        own = self._tenants.setdefault(tenant, OrderedDict())
        own[key] = value, weight
        self._count(tenant, weight)
        while self.weight > self._most:
            spared = tenant if len(own) == 1 else None
            heaviest = max(self._weights, key=lambda one: (one != spared, self._weights[one]))
            self.remove(heaviest, next(iter(self._tenants[heaviest])))

    def remove(self, tenant: Hashable, key: K) -> bool:
        """Drop a value. Returns False if the key is unknown."""
        own = self._tenants.get(tenant, OrderedDict())
        dropped = own.pop(key, None)
        if dropped is None:
            return False
        self._count(tenant, -dropped[1])
        if not own:
            del self._tenants[tenant], self._weights[tenant]
        return True

    def _count(self, tenant: Hashable, weight: int) -> None:
        self.weight += weight
        self._weights[tenant] = self._weights.get(tenant, 0) + weight


def equal_part(most: int, n_others: int) -> int | None:
    """Return a tenant's equal part of `most`; None if there are no other tenants."""
    return most // (1 + n_others) if n_others else None


def pins_hold(n_others: int, *, is_public: bool) -> bool:
    """Return whether a tenant that needs space must not evict other tenants' pinned bytes."""
    return is_public and n_others == 1


def kept(held: int, pinned: int, then: int) -> int:
    """Return how many of its bytes a tenant keeps when another tenant grows to `then` bytes."""
    return max(min(held, then), pinned)


def most_each(sizes: Sequence[int], room: int) -> int:
    """Return the limit per tenant with which tenants of `sizes` fit into `room`."""
    left = len(sizes)
    for size in sorted(sizes):
        if size * left > room:
            return room // left
        room, left = room - size, left - 1
    return max(sizes, default=0)
