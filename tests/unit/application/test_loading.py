"""When the disk is skipped: only when it was measured to be slower than computing."""

from __future__ import annotations

from semantic.application.cache.loading import BreakEven


def test_without_measurements_the_disk_is_read() -> None:
    assert BreakEven(lambda: None).worth_reading(1 << 40, 1)
    assert BreakEven(lambda: 1e9).worth_reading(1 << 40, 1)
    unknown_rate = BreakEven(lambda: None)
    unknown_rate.observe(1, 1.0)
    assert unknown_rate.worth_reading(1 << 40, 1)


def test_the_faster_side_wins() -> None:
    rule = BreakEven(lambda: 100.0)
    rule.observe(1000, 1.0)
    assert rule.worth_reading(n_bytes=5000, n_tokens=500)
    assert not rule.worth_reading(n_bytes=5001, n_tokens=500)


def test_memory_costs_nothing() -> None:
    rule = BreakEven(lambda: 1e12)
    rule.observe(1, 1.0)
    assert rule.worth_reading(0, 1)


def test_a_slow_disk_is_tried_again_now_and_then() -> None:
    rule = BreakEven(lambda: 100.0)
    rule.observe(1, 1.0)
    tries = [rule.worth_reading(10**6, 1) for _ in range(24)]
    assert [i for i, tried in enumerate(tries) if tried] == [7, 15, 23]


def test_a_disk_that_became_faster_is_used_again() -> None:
    rule = BreakEven(lambda: 100.0)
    rule.observe(100, 1.0)
    assert not rule.worth_reading(1000, 500)
    for _ in range(20):
        rule.observe(10_000, 1.0)
    assert rule.worth_reading(1000, 500)


def test_nonsense_is_not_learned() -> None:
    rule = BreakEven(lambda: 1.0)
    rule.observe(0, 1.0)
    rule.observe(10, 0.0)
    assert rule.bytes_per_second is None
