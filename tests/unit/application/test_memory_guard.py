"""Caches are given up in order while too much memory is in use, and no more than needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from semantic.application.engine.memory_guard import Memory, MemoryGuard
from semantic.application.engine.step_loop import StepLoop
from semantic.domain.errors import InvalidRequestError

LIMIT = 1600
HIGH, TARGET = 1500, 1400
"""While no step takes more than that leaves."""


@dataclass
class Process:
    """Memory with two caches, buffers, and what running requests have."""

    running: int = 0
    buffers: int = 0
    tier: int = 0
    idle: int = 0
    spare: int | None = None
    now: float = 0.0
    lines: list[str] = field(default_factory=list)
    measured: int = 0
    asked: list[tuple[str, int]] = field(default_factory=list)

    def guard(self, kept: Callable[[], int] = lambda: 0) -> MemoryGuard:
        memory = Memory(self.in_use, self.give_back, lambda: self.spare, kept)
        self.measured = -1  # made in the state that it has
        made = MemoryGuard(
            LIMIT, memory, clock=lambda: self.now, report=self.lines.append, most=2 * LIMIT
        )
        made.add("tier", self.free_tier)
        made.add("idle", self.free_idle)
        return made

    def in_use(self) -> int:
        self.measured += 1
        return self.running + self.buffers + self.tier + self.idle

    def give_back(self) -> None:
        self.buffers = 0

    def free_tier(self, n_bytes: int) -> bool:
        self.asked.append(("tier", n_bytes))
        freed = min(n_bytes, self.tier)
        self.tier -= freed
        self.buffers += freed  # freed, and not returned yet
        return bool(freed)

    def free_idle(self, n_bytes: int) -> bool:
        self.asked.append(("idle", n_bytes))
        freed = min(n_bytes, self.idle)
        self.idle -= freed
        self.buffers += freed
        return bool(freed)


def test_nothing_is_given_up_up_to_the_mark() -> None:
    process = Process(running=500, tier=500, idle=HIGH - 1000)
    process.guard().check()
    assert (process.tier, process.idle, process.asked) == (500, HIGH - 1000, [])
    assert not process.lines


def test_buffers_go_before_any_cache() -> None:
    process = Process(running=500, buffers=300, tier=400, idle=400)
    process.guard().check()
    assert (process.buffers, process.tier, process.idle) == (0, 400, 400)
    assert not process.asked


def test_buffers_that_the_framework_keeps_cost_no_cache() -> None:
    process = Process(running=740, idle=700)
    guard = process.guard(kept=lambda: process.buffers)
    process.buffers = 400
    process.now += 1
    guard.check()
    assert TARGET < process.in_use() < HIGH
    assert (process.buffers, process.idle, process.asked) == (0, 700, [])


def test_the_tier_goes_before_idle_caches_and_only_as_much_as_needed() -> None:
    process = Process(running=700, tier=500, idle=400)
    process.guard().check()
    assert process.asked == [("tier", 1600 - TARGET)]
    assert (process.tier, process.idle) == (300, 400)
    process = Process(running=1000, tier=100, idle=600)
    process.guard().check()
    assert process.asked == [("tier", 300), ("idle", 200)]
    assert (process.tier, process.idle) == (0, 400)


def test_what_running_requests_have_is_left_and_exceeds_the_limit_until_they_end() -> None:
    process = Process(running=1550, tier=100, idle=100)
    guard = process.guard()
    guard.check()
    assert (process.running, process.tier, process.idle) == (1550, 0, 0)
    assert guard.is_exceeded
    assert guard.lacks_room() == 1550
    process.running = 1000
    guard.check()
    assert guard.is_exceeded, "it is not measured so soon again"
    process.now += 1
    guard.check()
    assert not guard.is_exceeded
    for _ in range(80):
        process.now += 1
        guard.check()
    assert [line.partition("; ")[2] for line in process.lines] == [
        "given up: tier, idle; smaller: chunks, batch; requests are refused",
        "no pressure",
    ]
    assert guard.figures.steps == ()
    assert guard.figures.counts == {"tier": 1, "idle": 1, "chunks": 1, "batch": 1, "requests": 1}


def test_what_a_step_takes_and_frees_again_is_kept_free_after_the_first() -> None:
    process = Process(running=900)
    guard = process.guard()
    most = 0
    for _ in range(100):
        process.now += 1
        process.buffers += 300  # of a step
        process.idle += 100
        most = max(most, process.in_use())
        guard.check()
    assert 1300 < most <= LIMIT


def test_it_measures_four_times_a_second_and_reports_changes_alone() -> None:
    process = Process(running=800, tier=800)
    guard = process.guard()
    for _ in range(1000):
        process.now += 1 / 100
        process.tier = 800
        guard.check()
    assert 38 <= process.measured / 3 <= 41  # at first, after the buffers and after the tier
    assert len(process.lines) == 1


def checked(process: Process, guard: MemoryGuard, seconds: float = 1.0) -> None:
    process.now += seconds
    guard.check()


def test_chunks_are_halved_before_the_batch_and_both_before_a_request_is_refused() -> None:
    process = Process(running=1000)
    guard = process.guard()
    checked(process, guard)
    process.running = 1450  # the rise alone asks for more than that leaves
    seen = []
    for _ in range(14):
        checked(process, guard, 0.25)
        process.running += 1
        seen.append((guard.chunks.times, guard.batch.times))
        assert not guard.is_exceeded
    expected = [(n, 0) for n in range(1, 8)] + [(7, n) for n in range(1, 6)]
    assert seen[:12] == expected
    assert (guard.chunks.of(2048), guard.batch.of(32), guard.batch.of(8)) == (16, 1, 1)
    assert list(guard.figures.steps) == ["chunks halved 7 times", "batch halved 5 times"]
    process.running = 1550
    checked(process, guard)
    assert guard.is_exceeded
    assert guard.figures.steps[-2:] == ("batch halved 5 times", "requests wait")
    process.running = 1000
    checked(process, guard)
    assert guard.figures.steps[-1] == "batch halved 5 times"


def test_what_was_narrowed_is_widened_again_in_the_opposite_order_and_slowly() -> None:
    process = Process(running=1550)
    guard = process.guard()
    checked(process, guard)
    assert (guard.chunks.times, guard.batch.times) == (7, 5)
    process.running = 500
    seen = []
    for _ in range(30):
        checked(process, guard)
        seen.append((guard.chunks.times, guard.batch.times))
    steps = list(dict.fromkeys(seen))
    assert steps == [(7, n) for n in range(5, 0, -1)] + [(n, 0) for n in range(7, -1, -1)]
    assert not guard.is_exceeded


def test_a_load_that_comes_back_whenever_it_may_narrows_less_and_less_often() -> None:
    process = Process(running=500)
    guard = process.guard()
    narrowed: list[float] = []
    for _ in range(4 * 1200):  # twenty minutes
        before = guard.batch.times
        process.running = 300 * (6 - guard.batch.times)  # of which five fit
        checked(process, guard, 0.25)
        if guard.batch.times > before:
            narrowed.append(process.now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(narrowed)]
    assert len(narrowed) < 40
    assert min(gaps[-3:]) >= 60, "it swings as fast as at first"


def test_the_systems_own_shortage_is_a_lower_limit_in_the_same_order() -> None:
    process = Process(running=500, tier=200, idle=200, spare=5000)
    guard = process.guard()
    checked(process, guard)
    assert process.asked == []
    process.spare = 0  # another program took it
    checked(process, guard)
    assert [name for name, _ in process.asked] == ["tier"]
    assert guard.figures.limit_bytes == 900
    checked(process, guard)
    assert (process.tier, process.idle, process.running) == (0, 0, 500)
    assert not guard.is_exceeded
    checked(process, guard)
    assert guard.is_exceeded
    process.spare = 5000
    checked(process, guard)
    assert not guard.is_exceeded
    assert guard.figures.limit_bytes == LIMIT


def test_a_limit_that_is_lowered_while_it_works_is_kept_at_once_and_can_be_raised_again() -> None:
    process = Process(running=400, tier=300, idle=700)
    guard = process.guard()
    process.tier = process.idle = 0
    assert guard.lacks_room() is None
    process.tier, process.idle = 300, 700
    checked(process, guard)
    assert process.asked == []
    limits: list[int] = []
    guard.on_limit = limits.append
    guard.limit(1000)
    assert limits == [1000]
    guard.check()
    assert (process.tier, process.running) == (0, 400)
    assert process.in_use() <= 1000 - 2 * (1000 // 16)
    guard.limit(None)
    assert guard.max_bytes == LIMIT
    for wrong, expected in ((400, "must be at least"), (2 * LIMIT + 1, "must be at most")):
        with pytest.raises(InvalidRequestError, match=expected):
            guard.limit(wrong)
    assert guard.max_bytes == LIMIT


@dataclass(eq=False)
class Busy:
    """A lane that has work, and one idle cache."""

    is_ready: bool = True
    n_requests: int | None = 1
    cached: int = 10

    def turn(self) -> bool:
        return True

    def evict_idle(self, n_bytes: int, room: int) -> bool:
        assert room > 0
        evicted, self.cached = bool(self.cached), max(0, self.cached - n_bytes)
        return evicted


def test_requests_wait_only_while_others_run_that_free_memory_when_they_end() -> None:
    process = Process(running=1600)
    loop = StepLoop(guard=process.guard())
    assert loop.guard is not None
    loop.guard.check()
    lane = Busy()
    loop._lanes.append(lane)
    assert loop.is_out_of_memory
    lane.is_ready = False
    assert not loop.is_out_of_memory, "no turn would ever measure again"


def test_idle_caches_are_those_of_all_lanes() -> None:
    loop = StepLoop()
    first, second = Busy(cached=0), Busy()
    loop._lanes += [first, second]
    assert loop.evict_idle(4)
    assert second.cached == 6
    assert loop.evict_idle(9)
    assert not loop.evict_idle(1)


def test_a_model_that_a_lane_loads_costs_no_caches_beyond_its_own_memory() -> None:
    process = Process(running=100, idle=600)
    guard = process.guard()

    class Building(Busy):
        def turn(self) -> bool:
            process.running += 200
            return True

    loop = StepLoop(guard=guard)
    loop._lanes.append(Building(n_requests=None))
    for _ in range(4):
        process.now += 1
        loop._turn()
    process.now += 1
    guard.check()
    assert (process.running, process.idle, process.asked) == (900, 600, [])
    process.running += 100
    process.now += 1
    guard.check()
    assert process.asked == [("tier", 300), ("idle", 300)], "a step may take as much again"
