"""When a store is not read: on simulated tiers, in virtual time, against one who knows them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest

from semantic.application.cache.loading import (
    NEVER_GIVEN_UP,
    BreakEven,
    Terms,
    TierCost,
    group_ends,
)
from semantic.domain.stored import Tier
from semantic.domain.value_objects import BLOCK_TOKENS

pytestmark = pytest.mark.measured_reads

LOCAL = [tier for tier in Tier if tier is not Tier.REMOTE]
MOST_BYTES = 256 << 20
"""Of a group of bodies, as in the loader."""
REQUESTS = 300


def per_token(rate: float) -> Callable[[int], float]:
    return lambda n_tokens: n_tokens / rate


def known(tier: Tier, n_bytes: int, seconds: float, rate: float = 100.0) -> BreakEven:
    """A rule that has seen such a load three times."""
    rule = BreakEven(per_token(rate))
    for _ in range(3):
        rule.observe({tier: n_bytes}, seconds)
    return rule


# What a load costs


def cost_of(*loads: tuple[float, float]) -> TierCost:
    cost = TierCost(1)
    for n_bytes, seconds in loads:
        cost.observe(n_bytes, seconds)
    return cost


def test_small_and_large_loads_tell_the_fixed_part_from_the_rate() -> None:
    cost = cost_of((10, 0.11), (1000, 1.1), (100, 0.2))
    assert cost.seconds(500) == pytest.approx(0.6)
    assert cost.seconds(10_000) == pytest.approx(10.1)


@pytest.mark.parametrize("at", range(5))
def test_one_load_that_something_else_slows_down_changes_nothing(at: int) -> None:
    loads = [(n, 0.1 + n / 1000) for n in (10, 1000, 100, 400, 700)]
    loads[at] = (loads[at][0], 50.0)
    assert cost_of(*loads).seconds(500) == pytest.approx(0.6, rel=0.1)


def test_loads_of_one_size_do_not_exclude_that_others_are_cheap() -> None:
    cost = cost_of(*[(100, 1.0)] * 5)
    assert cost.seconds(100) == pytest.approx(1.0)
    assert cost.seconds(10_000) == pytest.approx(1.0)
    assert cost.seconds(10) == pytest.approx(0.1)


def test_a_tier_is_slow_after_three_slow_loads_and_fast_after_one() -> None:
    cost = cost_of(*[(100, 1.0)] * 8)
    expected = []
    for seconds in (10.0, 10.0, 10.0, 1.0):
        cost.observe(100, seconds)
        expected.append(cost.seconds(100))
    assert expected == pytest.approx([1.0, 1.0, 10.0, 1.0])


# Decisions


def test_without_measurements_a_store_is_read() -> None:
    assert BreakEven(lambda _: None).terms({Tier.DISK: 1 << 40}, 1) is NEVER_GIVEN_UP
    assert BreakEven(per_token(1e9)).terms({Tier.DISK: 1 << 40}, 1) == Terms(1e-9)
    assert BreakEven(per_token(1e9)).terms({}, 1) is not None


def test_a_network_that_was_never_measured_is_begun_with_one_body() -> None:
    rule = BreakEven(per_token(100.0))
    assert rule.terms({Tier.DISK: 1, Tier.REMOTE: 1}, 5000) == Terms(50.0, 1)


@pytest.mark.parametrize("tier", Tier)
def test_the_faster_side_wins(tier: Tier) -> None:
    assert known(tier, 5000, 5.0).terms({tier: 5000}, 500) is not None
    assert known(tier, 5000, 5.1).terms({tier: 5000}, 500) is None


@pytest.mark.parametrize("tier", LOCAL)
def test_two_slow_loads_do_not_yet_say_that_a_local_tier_is_slow(tier: Tier) -> None:
    rule = BreakEven(per_token(100.0))
    for _ in range(3):
        assert rule.terms({tier: 1000}, 500) is not None
        rule.observe({tier: 1000}, 60.0)
    assert rule.terms({tier: 1000}, 500) is None


def test_each_tier_has_a_cost_of_its_own() -> None:
    rule = known(Tier.DISK, 10**6, 1e6)
    assert all(rule.terms({tier: 10**6}, 1) for tier in Tier if tier is not Tier.DISK)
    assert rule.terms(dict.fromkeys(Tier, 10**6), 1) is None


def test_a_load_from_several_tiers_measures_the_slowest() -> None:
    rule = BreakEven(per_token(1.0))
    for _ in range(3):
        rule.observe({Tier.MEMORY: 1000}, 1.0)
    for _ in range(4):
        rule.observe({Tier.MEMORY: 1000, Tier.DISK: 100}, 3.0)
    assert rule.terms({Tier.MEMORY: 1000}, 1) is not None
    assert rule.terms({Tier.DISK: 100}, 2) is not None
    assert rule.terms({Tier.DISK: 100}, 1) is None


def test_many_small_reads_of_a_load_are_no_sign_of_a_slow_tier() -> None:
    rule = BreakEven(per_token(100.0))
    rule.observe({Tier.REMOTE: 100}, 1.0, n_reads=10)
    assert rule.terms({Tier.REMOTE: 100}, 100) is not None


def test_what_is_slower_is_measured_again_at_a_small_part_of_what_computing_took() -> None:
    rule = known(Tier.DISK, 1000, 100.0)
    tried = [i for i in range(2000) if rule.terms({Tier.DISK: 1000}, 5 * BLOCK_TOKENS)]
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert gaps == sorted(gaps)
    assert 1 / 70 < (2.5 * 12.8 + 20) / 4 / (gaps[-1] * 12.8) * 2 < 1 / 30  # half, and a block


def test_nonsense_is_not_learned() -> None:
    rule = BreakEven(per_token(1e9))
    for _ in range(3):
        rule.observe({Tier.DISK: 0}, 1.0)
        rule.observe({Tier.DISK: 10}, 0.0)
    assert rule.terms({Tier.DISK: 1 << 40}, 1) is not None


# Given up while it is read


def test_reading_is_given_up_when_much_time_is_lost_and_computing_is_faster() -> None:
    terms = Terms(8.0)
    assert not terms.overtaken(2.9, 1 / 8, divisible=True)  # 1 second of it was saved
    assert terms.overtaken(3.1, 1 / 8, divisible=True)
    assert not terms.overtaken(6.0, 1.0, divisible=False)  # all is there
    assert not terms.overtaken(4.0, 1 / 2, divisible=False)
    assert terms.overtaken(4.0, 1 / 4, divisible=False)
    assert not NEVER_GIVEN_UP.overtaken(1e9, 1 / 8, divisible=True)


# Simulated tiers


@dataclass(frozen=True)
class Place:
    """A tier: seconds of a read whatever its size, and bytes per second."""

    tier: Tier
    fixed: float
    rate: float


@dataclass(frozen=True)
class Model:
    """Prompt tokens per second, and bytes of a block."""

    rate: float
    block: int


LARGE, ON_CPU, TINY = Model(5000, 33 << 20), Model(170, 12 << 20), Model(25_000, 1 << 19)
DRIVE = Place(Tier.DISK, 0.001, 2e9)
WORN_DRIVE = Place(Tier.DISK, 0.01, 60e6)
TEN_GBE = Place(Tier.REMOTE, 0.005, 1.17e9)
CROWDED = Place(Tier.REMOTE, 0.05, 50e6)
ONE_GBE = Place(Tier.REMOTE, 0.001, 117e6)
TEN_MBIT = Place(Tier.REMOTE, 0.08, 1.25e6)
FAR = Place(Tier.REMOTE, 0.08, 117e6)


@dataclass
class Outcome:
    """Seconds of all requests: as decided, if each had been computed, and as one had decided who
    knew what reading would take. `n_read` were read."""

    taken: float = 0.0
    computed: float = 0.0
    best: float = 0.0
    n_read: int = 0

    @property
    def regret(self) -> float:
        """What the decisions cost, as a part of computing all."""
        return (self.taken - self.best) / self.computed


def requests(
    model: Model,
    place: Callable[[int], Place],
    *,
    first: float = 0.0,
    noise: Callable[[random.Random], float] = lambda _: 1.0,
    seed: int = 0,
) -> Outcome:
    """Requests with stored prefixes of 1 to 128 blocks, 10 in the median.

    The first load takes `first` seconds longer; each takes `noise` times as long.
    """
    draw, rule, outcome = random.Random(seed), BreakEven(per_token(model.rate)), Outcome()
    for number in range(REQUESTS):
        n_blocks = max(1, min(128, round(draw.lognormvariate(2.3, 1.0))))
        here, slower, late = place(number), noise(draw), 0.0 if number else first
        n_bytes, n_tokens = n_blocks * model.block, n_blocks * BLOCK_TOKENS
        most = max(8, MOST_BYTES // model.block)

        def reads(first: int) -> Iterator[tuple[int, float]]:
            start, seconds = 0, late  # noqa: B023
            for stop in group_ends(first, most, n_blocks):  # noqa: B023
                size = (stop - start) * model.block
                seconds += (here.fixed + size / here.rate) * slower  # noqa: B023
                yield stop, seconds
                start = stop

        computing = n_tokens / model.rate
        reading = list(reads(most))[-1][1]
        outcome.best += min(computing, reading)
        outcome.computed += computing
        terms = rule.terms({here.tier: n_bytes}, n_tokens)
        if terms is None:
            outcome.taken += computing
            continue
        outcome.n_read += 1
        n_reads = 0
        for n_read, seconds in reads(terms.first):
            n_reads += 1
            if terms.overtaken(seconds, n_read / n_blocks, divisible=True):
                break
        rule.observe({here.tier: n_read * model.block}, seconds, n_reads)
        outcome.taken += seconds + (1 - n_read / n_blocks) * computing
    return outcome


def busy(draw: random.Random) -> float:
    """A tenth of the loads take 2 to 10 times as long, the others a third more or less."""
    factor = draw.lognormvariate(0, 0.3)
    return factor * draw.uniform(2, 10) if draw.random() < 0.1 else factor


@pytest.mark.parametrize(
    ("model", "place"), [(LARGE, DRIVE), (LARGE, TEN_GBE), (ON_CPU, ONE_GBE), (TINY, DRIVE)]
)
@pytest.mark.parametrize("first", [0.0, 1.0])
def test_what_is_faster_is_read_also_after_a_bad_first_load(
    model: Model, place: Place, first: float
) -> None:
    outcome = requests(model, lambda _: place, first=first)
    assert outcome.regret < 0.05
    assert outcome.n_read >= 0.95 * REQUESTS


@pytest.mark.parametrize(
    ("model", "place", "most"), [(LARGE, ONE_GBE, 0.06), (ON_CPU, TEN_MBIT, 0.08)]
)
def test_what_is_slower_costs_a_small_part_of_computing(
    model: Model, place: Place, most: float
) -> None:
    outcome = requests(model, lambda _: place)
    assert outcome.regret < most
    assert 2 <= outcome.n_read < 0.1 * REQUESTS


def test_a_hopeless_line_is_measured_once_and_again_after_much_computing() -> None:
    """A body takes half a minute there, the compute of all requests together four."""
    assert requests(LARGE, lambda _: TEN_MBIT).n_read <= 2


def test_where_only_large_prefixes_are_worth_a_round_trip_those_are_read() -> None:
    outcome = requests(TINY, lambda _: FAR)
    assert outcome.regret < 0.1
    assert outcome.taken < 0.9 * outcome.computed


@pytest.mark.parametrize(("usual", "slow"), [(DRIVE, WORN_DRIVE), (TEN_GBE, CROWDED)])
def test_a_tier_that_becomes_slow_and_recovers_is_followed(usual: Place, slow: Place) -> None:
    outcome = requests(LARGE, lambda number: slow if 100 <= number < 200 else usual)
    assert outcome.regret < 0.15
    assert outcome.n_read > 0.55 * REQUESTS


@pytest.mark.parametrize(
    ("model", "place", "most"),
    [(LARGE, DRIVE, 0.1), (LARGE, TEN_GBE, 0.2), (LARGE, ONE_GBE, 0.15), (ON_CPU, TEN_MBIT, 0.2)],
)
def test_a_noisy_machine_changes_little(model: Model, place: Place, most: float) -> None:
    assert requests(model, lambda _: place, noise=busy).regret < most
