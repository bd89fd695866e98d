"""A cache of several tenants: one alone has all of it, of several each keeps its share."""

from __future__ import annotations

from semantic.domain.fair_share import FairLru


def filled(most: int, **sizes: int) -> FairLru[int, int]:
    """A cache into which each tenant has put so many values, one after the other."""
    cache: FairLru[int, int] = FairLru(most)
    for tenant, n in sizes.items():
        for i in range(n):
            cache.put(tenant, i, i)
    return cache


def held(cache: FairLru[int, int], tenant: str, n: int = 20) -> list[int]:
    return [i for i in range(n) if cache.get(tenant, i) is not None]


def test_a_tenant_alone_has_all_of_it_and_loses_what_it_used_longest_ago() -> None:
    cache = filled(4, a=4)
    cache.get("a", 0)
    cache.put("a", 9, 9)
    assert held(cache, "a") == [0, 2, 3, 9]


def test_a_tenant_does_not_find_what_another_has_put() -> None:
    cache = filled(4, a=2)
    assert held(cache, "b") == []
    cache.put("b", 0, 7)
    assert (cache.get("a", 0), cache.get("b", 0)) == (0, 7)


def test_a_tenant_that_holds_less_than_its_share_loses_nothing() -> None:
    cache = filled(8, a=3, b=100)
    assert held(cache, "a") == [0, 1, 2]
    assert len(held(cache, "b", 100)) == 5
    for i in range(100, 120):
        cache.put("a", i, i)
    assert (len(held(cache, "a", 120)), len(held(cache, "b", 100))) == (4, 4)


def test_what_was_just_put_stays_whatever_it_weighs() -> None:
    cache = filled(8, a=4, b=4)
    cache.put("c", 0, 0, weight=6)
    assert cache.get("c", 0) == 0
    assert len(cache) == 3
    cache.put("c", 1, 1, weight=9)
    assert (cache.get("c", 1), len(cache)) == (None, 3)


def test_a_value_is_replaced_with_its_weight() -> None:
    cache = filled(4, a=1)
    for weight in (4, 1):
        cache.put("a", 0, weight, weight)
    cache.put("b", 0, 0, weight=3)
    assert (cache.get("a", 0), cache.get("b", 0)) == (1, 0)
