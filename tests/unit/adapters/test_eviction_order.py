"""Who goes first when a quota is full, of entries that are numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.stores.eviction_order import EvictionOrder

TAGS = [b"public", b"a", b"b", b"c"]
MOST = 100


@dataclass(frozen=True)
class Entry:
    """One of a tenant: entries follow that of the same tenant whose number is half of theirs."""

    tenant: bytes
    number: int
    size: int


entries = st.builds(Entry, st.sampled_from(TAGS), st.integers(1, 8), st.integers(1, 12))


class Store:
    """Entries by tenant and number; used in the order in which they came."""

    def __init__(self, many: list[Entry], pinned: frozenset[int], *, chained: bool) -> None:
        self.chained = chained
        self.pinned = pinned
        self.entries: list[Entry] = []
        self.order = EvictionOrder[Entry](MOST, TAGS[0], lambda entry: entry.size, self.dependents)
        for one in many:
            known = {(each.tenant, each.number) for each in self.entries}
            fits = self.order.n_bytes + one.size <= MOST
            if fits and (one.tenant, one.number) not in known:
                self.entries.append(one)
                self.order.add(one.tenant, one, pinned=self.is_pinned(one))

    def is_pinned(self, entry: Entry) -> bool:
        return entry.number in self.pinned and not self.chained

    def dependents(self, entry: Entry) -> list[Entry]:
        after = [one for one in self.entries if one.number // 2 == entry.number]
        return [one for one in after if self.chained and one.tenant == entry.tenant]

    def held(self, tenant: bytes) -> int:
        return sum(one.size for one in self.entries if one.tenant == tenant)


stores = st.builds(
    Store,
    st.lists(entries, max_size=24),
    st.frozensets(st.integers(1, 8), max_size=4),
    chained=st.booleans(),
)


@given(stores, st.sampled_from(TAGS), st.integers(1, 60), st.integers(0, 8))
def test_what_goes_is_enough_and_nobody_loses_below_the_one_that_asks(
    store: Store, tenant: bytes, n_bytes: int, number: int
) -> None:
    spared = {one for one in store.entries if one.tenant == tenant and one.number == number}
    spared = set() if store.chained else spared
    found = store.order.victims(tenant, n_bytes, spared)
    if found is None:
        return
    victims = list(found)
    excess = store.order.n_bytes + n_bytes - MOST
    assert sum(one.size for one in victims) >= excess
    assert sum(one.size for one in victims[:-1]) < max(1, excess)
    assert not spared & set(victims)
    then = store.held(tenant) + n_bytes
    for tag in TAGS:
        gone = [one for one in victims if one.tenant == tag]
        if tag == tenant:
            assert not any(map(store.is_pinned, gone))
        elif gone:
            assert store.held(tag) - sum(one.size for one in gone[:-1]) > then


@given(stores, st.sampled_from(TAGS), st.integers(1, 60))
def test_before_an_entry_goes_what_follows_it(store: Store, tenant: bytes, n_bytes: int) -> None:
    gone: set[Entry] = set()
    for one in store.order.victims(tenant, n_bytes) or ():
        assert gone.issuperset(store.dependents(one))
        gone.add(one)


@given(stores, st.integers(1, 100))
def test_pins_stay_when_nobody_asks_and_of_each_tenant_the_oldest_goes_first(
    store: Store, n_bytes: int
) -> None:
    gone = list(store.order.oldest(n_bytes))
    assert not any(map(store.is_pinned, gone))
    for tag in () if store.chained else TAGS:
        own = [one for one in store.entries if one.tenant == tag and not store.is_pinned(one)]
        of_tag = [one for one in gone if one.tenant == tag]
        assert of_tag == own[: len(of_tag)]


@given(stores)
def test_sums_are_those_of_the_entries(store: Store) -> None:
    order = store.order
    for one in store.entries[::2]:
        order.use(one.tenant, one)
    for one in store.entries[1::2]:
        order.remove(one.tenant, one)
    left = store.entries[::2]
    assert order.n_bytes == sum(one.size for one in left)
    assert order.pinned_bytes == sum(one.size for one in left if store.is_pinned(one))
    assert order.tenants.keys() == {one.tenant for one in left}
