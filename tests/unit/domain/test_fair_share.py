"""Equal parts of what is used, whatever the costs, and no credit for time away."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.domain.fair_share import (
    FairRoom,
    FairShare,
    RoundRobin,
    equal_part,
    kept,
    most_each,
    pins_hold,
)

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


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 300))
def test_shares_are_equal_and_use_the_room(sizes: list[int], room: int) -> None:
    most = most_each(sizes, room)
    left = sum(min(size, most) for size in sizes)
    assert left <= room
    if sum(sizes) > room:
        assert left > room - len(sizes)
        assert all(min(size, most) == size for size in sizes if size <= room // len(sizes))
    else:
        assert left == sum(sizes)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 50))
def test_another_keeps_what_it_pinned_and_as_much_as_the_one_that_asks(
    held: int, pinned: int, then: int
) -> None:
    left = kept(held, min(held, pinned), then)
    assert left <= held
    assert left >= min(held, pinned)
    assert left == held or left >= then
    assert kept(held, 0, then) == min(held, then)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 100))
def test_of_several_each_keeps_an_equal_part_against_the_largest_claim(
    others: list[int], most: int
) -> None:
    part = equal_part(most, len(others))
    assert part is not None
    assert part * (1 + len(others)) <= most < (part + 1) * (1 + len(others))
    for held in others:
        assert kept(held, 0, part) >= min(held, part)


def test_a_tenant_without_others_has_no_part() -> None:
    assert equal_part(100, 0) is None


def test_pins_are_kept_only_from_what_is_public_and_only_those_of_one() -> None:
    assert pins_hold(1, is_public=True)
    assert not pins_hold(2, is_public=True)
    assert not pins_hold(0, is_public=True)
    assert not pins_hold(1, is_public=False)
