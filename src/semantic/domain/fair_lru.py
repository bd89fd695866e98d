"""FairLru: a least-recently-used cache that tenants share, each up to its share.

When it is full, the tenant that holds most loses what it used longest ago: one alone may use all
of it, and of several none loses anything while it holds less than an equal part. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FairLru(Generic[K, V]):
    """Values by tenant and key, of at most `most` in weight altogether.

    A tenant's values are found with its name only. A call compares by the number of tenants.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tenants: dict[str, OrderedDict[K, tuple[V, int]]] = {}
        self._weights: dict[str, int] = {}
        self._weight = 0

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def get(self, tenant: str, key: K) -> V | None:
        """The value, which counts as used now; None if there is none."""
        own = self._tenants.get(tenant)
        found = None if own is None else own.get(key)
        if own is None or found is None:
            return None
        own.move_to_end(key)
        return found[0]

    def peek(self, tenant: str, key: K) -> V | None:
        """The value, which does not count as used; None if there is none."""
        found = self._tenants.get(tenant, OrderedDict()).get(key)
        return None if found is None else found[0]

    def put(self, tenant: str, key: K, value: V, weight: int = 1) -> None:
        """Replace the value of `key`, and drop others; one above the limit itself is not kept."""
        self.remove(tenant, key)
        if weight > self._most:
            return
        own = self._tenants.setdefault(tenant, OrderedDict())
        own[key] = value, weight
        self._count(tenant, weight)
        while self._weight > self._most:
            spared = tenant if len(own) == 1 else None
            heaviest = max(self._weights, key=lambda one: (one != spared, self._weights[one]))
            self.remove(heaviest, next(iter(self._tenants[heaviest])))

    def remove(self, tenant: str, key: K) -> bool:
        """Drop a value; False if there is none."""
        own = self._tenants.get(tenant, OrderedDict())
        dropped = own.pop(key, None)
        if dropped is None:
            return False
        self._count(tenant, -dropped[1])
        if not own:
            del self._tenants[tenant], self._weights[tenant]
        return True

    def _count(self, tenant: str, weight: int) -> None:
        self._weight += weight
        self._weights[tenant] = self._weights.get(tenant, 0) + weight
