"""Equal parts of what is used, whatever the costs, and no credit for time away."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.domain.fair_share import FairRoom, FairShare, RoundRobin

COSTS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5)


@given(st.lists(COSTS, min_size=2, max_size=5), st.integers(20, 200))
def test_tenants_that_always_want_something_use_the_same(
    costs: list[list[float]], rounds: int
) -> None:
    share, used = FairShare(), defaultdict[str, float](float)
    names = [f"t{i}" for i in range(len(costs))]
    for name in names:
        share.begin(name)
    for i in range(rounds):
        name = share.next(names)
        cost = costs[names.index(name)][i % len(costs[names.index(name)])]
        share.charge(name, cost)
        used[name] += cost
    largest = max(max(one) for one in costs)
    assert max(used[name] for name in names) - min(used[name] for name in names) <= 2 * largest


@given(st.integers(1, 50), st.floats(0.1, 100.0))
def test_who_was_away_gets_nothing_for_that_time(rounds: int, cost: float) -> None:
    share = FairShare()
    for name in ("busy", "other"):
        share.begin(name)
    for _ in range(rounds):
        share.charge(share.next(["busy", "other"]), cost)
    share.begin("new")
    served = Counter[str]()
    for _ in range(30):
        name = share.next(["busy", "other", "new"])
        share.charge(name, cost)
        served[name] += 1
    assert max(served.values()) - min(served.values()) <= 2


def test_a_tenant_cannot_leave_to_forget_what_it_used() -> None:
    share = FairShare()
    share.begin("a")
    share.begin("b")
    assert share.next(["a", "b"]) == "a"
    share.charge("a", 100.0)
    share.end("a")
    share.begin("a")
    for _ in range(9):
        assert share.next(["a", "b"]) == "b"
        share.charge("b", 10.0)
    share.charge("b", 11.0)
    assert share.next(["a", "b"]) == "a"


def test_who_was_alone_owes_nothing_to_those_who_come_later() -> None:
    share = FairShare()
    share.begin("a")
    share.next(["a"])
    share.charge("a", 1000.0)
    share.end("a")
    for name in ("a", "b"):
        share.begin(name)
    served = Counter[str]()
    for _ in range(10):
        name = share.next(["a", "b"])
        share.charge(name, 1.0)
        served[name] += 1
    assert served == {"a": 5, "b": 5}


def test_what_runs_counts_and_nobody_is_kept_for_ever() -> None:
    share = FairShare()
    for name in ("a", "b"):
        share.begin(name)
    assert share.next(["a", "b"], {"a": 5.0}) == "b"
    share.charge("b", 1.0)
    for name in ("a", "b"):
        share.end(name)
    for number in range(100):
        name = f"n{number}"
        share.begin(name)
        share.next([name])
        share.charge(name, 1.0)
        share.end(name)
    share.begin("last")
    share.next(["last"])
    assert len(share._used) == 1


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30), st.booleans())))
def test_no_tenant_takes_the_room_of_the_others(steps: list[tuple[str, int, bool]]) -> None:
    room, held = FairRoom(100), defaultdict[str, list[int]](list)
    for tenant, n, gives in steps:
        if gives and held[tenant]:
            room.give(tenant, held[tenant].pop())
        elif room.fits(n) and room.leaves_room(tenant, n):
            room.take(tenant, n)
            held[tenant].append(n)
            # It has one thing, or what is free is as much as it has.
            assert len(held[tenant]) == 1 or sum(held[tenant]) <= 100 - room.used
        assert {name: room.of(name) for name in "abcd"} == {n: sum(held[n]) for n in "abcd"}
        assert room.used == sum(map(sum, held.values())) <= 100


@given(st.lists(st.sampled_from("abc")))
def test_tenants_take_turns_and_each_keeps_its_order(asked: list[str]) -> None:
    line = RoundRobin[tuple[str, int]]()
    for number, tenant in enumerate(asked):
        line.push(tenant, (tenant, number))
    left, served = Counter(asked), list[tuple[str, int]]()
    while line:
        waiting = {tenant for tenant in left if left[tenant]}
        turn = [line.pop() for _ in waiting]
        assert {tenant for tenant, _ in turn} == waiting
        left.subtract(tenant for tenant, _ in turn)
        served += turn
    assert sorted(served, key=lambda one: one[0]) == sorted((who, n) for n, who in enumerate(asked))
    with pytest.raises(KeyError):
        line.pop()


@pytest.mark.parametrize(("most", "alone"), [(1, 1), (2, 1), (8, 7), (32, 28)])
def test_a_tenant_alone_takes_seven_eighths_of_a_batch(most: int, alone: int) -> None:
    room = FairRoom(most, times=7)
    while room.fits(1) and room.leaves_room("a", 1):
        room.take("a", 1)
    assert room.of("a") == alone
    assert room.leaves_room("b", 1)


def test_one_tenant_gets_half_and_of_two_each_a_third() -> None:
    def filled(*tenants: str) -> list[int]:
        room, n = FairRoom(60), 0
        while n < 60:
            for tenant in tenants:
                if room.fits(1) and room.leaves_room(tenant, 1):
                    room.take(tenant, 1)
            n += 1
        return [room.of(tenant) for tenant in tenants]

    assert filled("a") == [30]
    assert filled("a", "b") == [20, 20]
    assert filled("a", "b", "c") == [15, 15, 15]
