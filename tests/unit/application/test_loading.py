"""When a store is not read: only when that was measured to be slower than computing."""

from __future__ import annotations

import pytest

from semantic.application.cache.loading import BreakEven
from semantic.domain.stored import Tier

TIERS = list(Tier)


def test_without_measurements_a_store_is_read() -> None:
    assert BreakEven(lambda: None).worth_reading({Tier.DISK: 1 << 40}, 1)
    assert BreakEven(lambda: 1e9).worth_reading({Tier.DISK: 1 << 40}, 1)
    unknown_rate = BreakEven(lambda: None)
    unknown_rate.observe({Tier.DISK: 1}, 1.0)
    assert unknown_rate.worth_reading({Tier.DISK: 1 << 40}, 1)


@pytest.mark.parametrize("tier", TIERS)
def test_the_faster_side_wins(tier: Tier) -> None:
    rule = BreakEven(lambda: 100.0)
    rule.observe({tier: 1000}, 1.0)
    assert rule.worth_reading({tier: 5000}, n_tokens=500)
    assert not rule.worth_reading({tier: 5001}, n_tokens=500)


@pytest.mark.parametrize("tier", TIERS)
def test_each_tier_has_a_rate_of_its_own(tier: Tier) -> None:
    rule = BreakEven(lambda: 100.0)
    rule.observe({tier: 1}, 1.0)
    assert all(rule.worth_reading({other: 1 << 40}, 1) for other in TIERS if other is not tier)
    assert not rule.worth_reading(dict.fromkeys(TIERS, 10**6), 1)


def test_a_load_from_several_tiers_measures_the_slowest() -> None:
    rule = BreakEven(lambda: 100.0)
    rule.observe({Tier.MEMORY: 1000}, 1.0)
    rule.observe({Tier.DISK: 100}, 1.0)
    rule.observe({Tier.MEMORY: 1000, Tier.DISK: 100}, 3.0)
    assert rule.bytes_per_second(Tier.MEMORY) == 1000
    assert rule.bytes_per_second(Tier.DISK) == pytest.approx(170 / 2.7)


def test_a_large_load_counts_more_than_a_small_one() -> None:
    rule = BreakEven(lambda: 100.0)
    rule.observe({Tier.DISK: 10**9}, 1.0)
    rule.observe({Tier.DISK: 10**3}, 0.01)
    assert rule.bytes_per_second(Tier.DISK) == pytest.approx(0.7e9 / 0.71, rel=1e-3)


def test_nothing_to_read_costs_nothing() -> None:
    rule = BreakEven(lambda: 1e12)
    rule.observe({Tier.DISK: 1}, 1.0)
    assert rule.worth_reading({Tier.DISK: 0}, 1)


@pytest.mark.parametrize("tier", TIERS)
def test_a_slow_tier_is_tried_again_now_and_then(tier: Tier) -> None:
    rule = BreakEven(lambda: 100.0)
    rule.observe({tier: 1}, 1.0)
    tries = [rule.worth_reading({tier: 10**6}, 1) for _ in range(24)]
    assert [i for i, tried in enumerate(tries) if tried] == [7, 15, 23]


def test_a_disk_that_became_faster_is_used_again() -> None:
    rule = BreakEven(lambda: 100.0)
    rule.observe({Tier.DISK: 100}, 1.0)
    assert not rule.worth_reading({Tier.DISK: 1000}, 500)
    for _ in range(20):
        rule.observe({Tier.DISK: 10_000}, 1.0)
    assert rule.worth_reading({Tier.DISK: 1000}, 500)


def test_nonsense_is_not_learned() -> None:
    rule = BreakEven(lambda: 1.0)
    rule.observe({Tier.DISK: 0}, 1.0)
    rule.observe({Tier.DISK: 10}, 0.0)
    assert rule.bytes_per_second(Tier.DISK) is None
