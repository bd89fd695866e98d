"""When blocks may be uploaded, on a virtual clock on which uploads lengthen decode steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from semantic.adapters.stores.write_order import (
    ASSUMED_COST,
    FEWEST_STEPS,
    IDLE,
    LEAST_REST,
    MOST_BUSY,
    MOST_COST,
    MOST_COST_OF_PREFILL,
    MOST_REST,
    DecodeSteps,
    UploadPace,
)
from tests.support.fake_clock import FakeClock


@dataclass
class Device:
    """An engine that decodes without end beside uploads of `upload` seconds each; in a second of
    them decoding loses `cost`."""

    cost: float
    step: float = 0.02
    noise: float = 0.0
    upload: float = 0.05
    clock: FakeClock = field(default_factory=FakeClock)
    random: random.Random = field(default_factory=lambda: random.Random(0))
    uploads: int = 0
    left: float = 0.0

    def __post_init__(self) -> None:
        self.pace = UploadPace(self.clock)
        self.observer: DecodeSteps = self.pace.new_observer()

    def run(self, seconds: float, n_decoding: int = 1) -> float:
        """Decode for so long, or prefill if nothing does; the part by which steps were longer than
        without uploads."""
        begun, worked = self.clock(), 0.0
        while self.clock() < begun + seconds:
            started = self.clock()
            work = self.step * max(1, n_decoding) * (1 + self.noise * self.random.gauss(0, 1))
            worked += work
            while work > 1e-9:
                work -= self._go_on(work)
            self.observer.stepped(self.clock() - started, n_decoding, prefilled=not n_decoding)
        return (self.clock() - begun) / worked - 1

    def _go_on(self, work: float) -> float:
        """Decode until an upload begins or ends, or that is asked again; the work that is done."""
        if not self.left:
            delay = self.pace.delay()
            if delay:
                self.clock.advance(min(work, delay))
                return min(work, delay)
            self.pace.begin()
            self.left = self.upload
        seconds = min(work / (1 - self.cost), self.left)
        self.clock.advance(seconds)
        self.left -= seconds
        if not self.left:
            self.pace.end()
            self.uploads += 1
        return seconds * (1 - self.cost)


@pytest.mark.parametrize("cost", [0.1, 0.3, 0.8])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_uploads_take_the_part_that_they_may(cost: float, noise: float) -> None:
    device = Device(cost, noise=noise)
    device.run(60)
    uploads = device.uploads
    longer = device.run(60)
    assert device.pace.cost == pytest.approx(cost, rel=0.3)
    assert 0.5 * MOST_COST < longer < 2 * MOST_COST
    assert (device.uploads - uploads) * device.upload * cost == pytest.approx(60 * longer, rel=0.3)


def test_uploads_that_cost_nothing_rest_only_to_be_compared() -> None:
    device = Device(0.0, step=0.007, noise=0.03)
    device.run(30)
    uploads = device.uploads
    device.run(30)
    share = (device.uploads - uploads) * device.upload / 30
    assert share > 0.8 / (1 + LEAST_REST)


@pytest.mark.parametrize("cost", [0.1, 0.8])
def test_steps_that_only_prefill_may_become_longer_by_more(cost: float) -> None:
    device = Device(cost)
    device.run(60)
    decoding, prefilling = list[float](), list[float]()
    for _ in range(60):
        prefilling.append(device.run(2, n_decoding=0))
        decoding.append(device.run(2))
    assert 0.5 * MOST_COST_OF_PREFILL < sum(prefilling) / 60 < 1.5 * MOST_COST_OF_PREFILL
    assert sum(decoding) / 60 < 2 * MOST_COST


def test_a_cost_that_changes_is_followed() -> None:
    device = Device(0.02)
    device.run(30)
    device.cost = 0.5
    device.run(60)
    assert device.run(60) < 2 * MOST_COST


def test_what_uploads_cost_is_assumed_at_first() -> None:
    pace = Device(0.0).pace
    assert pace.cost == ASSUMED_COST
    for _ in range(FEWEST_STEPS):
        pace.compared(0.01, 0.1)
    assert pace.cost == pytest.approx(0.1)
    for _ in range(FEWEST_STEPS):
        pace.compared(-0.1, 0.1)
    assert pace.cost == 0.0


def test_a_number_of_requests_is_compared_with_the_same_number() -> None:
    device = Device(0.2)
    for _ in range(60):
        device.run(1, n_decoding=1)
        device.run(1, n_decoding=3)
    assert device.pace.cost == pytest.approx(0.2, rel=0.3)


def test_steps_with_prompts_are_not_compared() -> None:
    device = Device(0.2)
    device.run(10)
    before = device.pace.cost
    for _ in range(100):
        device.pace.begin()
        device.clock.advance(0.5)
        device.pace.end()
        device.observer.stepped(0.5, 1, prefilled=True)
    assert device.pace.cost == before


def test_nothing_holds_uploads_up_while_no_engine_steps() -> None:
    device = Device(0.9)
    device.run(5)
    device.pace.begin()
    device.clock.advance(IDLE / 2)
    device.pace.end()
    assert device.pace.delay() > 0
    device.clock.advance(IDLE)
    assert device.pace.delay() == 0


def test_uploads_never_cease() -> None:
    """A rest after a minute of uploading would be of hours."""
    device = Device(0.9)
    device.run(10)
    device.pace.begin()
    device.clock.advance(60)
    device.pace.end()
    before = device.uploads
    device.run(MOST_REST + 1)
    assert device.uploads > before


def test_uploads_join_others_for_a_while_and_rest_after_the_last() -> None:
    clock = FakeClock()
    pace = UploadPace(clock)
    steps = pace.new_observer()
    steps.stepped(0.01, 1, prefilled=False)
    pace.begin()
    assert pace.delay() == 0
    pace.begin()
    clock.advance(MOST_BUSY)
    steps.stepped(0.01, 1, prefilled=False)
    assert pace.delay() > 0
    pace.end()
    assert pace.delay() > 0
    pace.end()
    assert pace.delay() > 0
    assert pace.stepped(2 * MOST_BUSY) == pytest.approx(MOST_BUSY)
