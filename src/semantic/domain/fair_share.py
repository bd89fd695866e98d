"""Equal parts for tenants: FairShare and RoundRobin divide use over time, FairRoom and FairLru what
tenants hold; functions do so for stores. None knows a clock or a thread.

FairShare is start-time fair queueing (Goyal, Vin and Cheng, 1996) that learns costs afterwards.
FairRoom bounds what it cannot take back, by a threshold that moves with the free room (Choudhury
and Hahne, 1998). In a full FairLru the tenant that holds most loses what it used longest ago: one
alone may use all, and none loses anything while it holds less than an equal part.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FairShare:
    """The use of each tenant, in any unit; one that was away gets nothing for that time. Between
    two tenants that always want something, the use differs by at most the largest cost of each."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._away: set[str] = set()  # that want nothing, and have used more than others
        self._now = 0.0  # the use of the tenant served last

    def begin(self, tenant: str) -> None:
        """A tenant that wanted nothing wants something."""
        self._away.discard(tenant)
        self._used[tenant] = max(self._used.get(tenant, 0.0), self._now)

    def next(self, wanting: Iterable[str], owing: Mapping[str, float] | None = None) -> str:
        """Return the tenant of `wanting`, all begun, with least use, including what it is `owing`
        for running work; the first of equal ones."""
        more = owing or {}
        tenant = min(wanting, key=lambda one: self._used[one] + more.get(one, 0.0))
        self._now = max(self._now, self._used[tenant])
        return tenant

    def charge(self, tenant: str, cost: float) -> None:
        """A tenant has used `cost`, 0 or more."""
        self._used[tenant] += cost

    def end(self, tenant: str) -> None:
        """A tenant wants nothing more. It owes what it has used beyond the others until they have
        used as much, or no tenant wants anything."""
        self._away.add(tenant)
        if len(self._away) == len(self._used):
            self._now = max(self._used.values())
        for name in [name for name in self._away if self._used[name] <= self._now]:
            del self._used[name]
            self._away.discard(name)


class RoundRobin(Generic[V]):
    """Values that wait: tenants take turns, and those of a tenant come in their order."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[V]] = OrderedDict()  # the next tenant first
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def push(self, tenant: str, value: V) -> None:
        self._n += 1
        self._waiting.setdefault(tenant, deque()).append(value)

    def pop(self) -> V:
        """The value whose turn it is. Raises KeyError if none waits."""
        tenant, own = self._waiting.popitem(last=False)
        self._n -= 1
        if len(own) > 1:
            self._waiting[tenant] = own
        return own.popleft()


class FairRoom:
    """Room for `most`, in any unit. A tenant that has some gets more while it has at most `times`
    what stays free: with 1 one tenant gets half, each of two a third, and there is always room for
    another one."""

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
        """Return whether the tenant has nothing, or with `n` more at most what is free then."""
        own = self._tenants[tenant]
        return not own or own + n <= self._times * (self.most - self.used - n)

    def take(self, tenant: str, n: int) -> None:
        """The tenant has `n` more, whatever the limits are."""
        self.used += n
        self._tenants[tenant] += n

    def give(self, tenant: str, n: int) -> None:
        """The tenant has `n` less; it had as much."""
        self.used -= n
        self._tenants[tenant] -= n
        if not self._tenants[tenant]:
            del self._tenants[tenant]


class FairLru(Generic[K, V]):
    """Values by tenant and key, of at most `most` in weight altogether. Only a tenant's name finds
    its values. A call compares by the number of tenants."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tenants: dict[Hashable, OrderedDict[K, tuple[V, int]]] = {}
        self._weights: dict[Hashable, int] = {}
        self.weight = 0

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def get(self, tenant: Hashable, key: K) -> V | None:
        """The value, which counts as used now; None if there is none."""
        own = self._tenants.get(tenant)
        found = None if own is None else own.get(key)
        if own is None or found is None:
            return None
        own.move_to_end(key)
        return found[0]

    def peek(self, tenant: Hashable, key: K) -> V | None:
        """The value, which does not count as used; None if there is none."""
        found = self._tenants.get(tenant, OrderedDict()).get(key)
        return None if found is None else found[0]

    def put(self, tenant: Hashable, key: K, value: V, weight: int = 1) -> None:
        """Replace the value of `key`, and drop others; keeps none heavier than the limit."""
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
        """Drop a value; False if there is none."""
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
    """Return the sure part of a tenant among others; None without others: it may have all."""
    return most // (1 + n_others) if n_others else None


def pins_hold(n_others: int, *, is_public: bool) -> bool:
    """Return whether pins of others hold against a tenant: against the public one, which does not
    count as one, if there is one other."""
    return is_public and n_others == 1


def kept(held: int, pinned: int, then: int) -> int:
    """Return how much of its `held` bytes another tenant keeps from one that has `then` afterwards:
    as much as that, and at least its `pinned` ones, 0 if pins do not hold."""
    return max(min(held, then), pinned)


def most_each(sizes: Sequence[int], room: int) -> int:
    """The most of one tenant if all are to fit into `room`: of several none loses anything while it
    has less than an equal part."""
    left = len(sizes)
    for size in sorted(sizes):
        if size * left > room:
            return room // left
        room, left = room - size, left - 1
    return max(sizes, default=0)
