"""Caches are given up in order while too much memory is in use, and no more than needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from semantic.application.engine.memory_guard import Memory, MemoryGuard
from semantic.application.engine.step_loop import StepLoop

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
    now: float = 0.0
    lines: list[str] = field(default_factory=list)
    measured: int = 0
    asked: list[tuple[str, int]] = field(default_factory=list)

    def guard(self) -> MemoryGuard:
        memory = Memory(self.in_use, self.give_back)
        self.measured = -1  # made in the state that it has
        made = MemoryGuard(LIMIT, memory, clock=lambda: self.now, report=self.lines.append)
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
    process.now += 60
    guard.check()
    assert [line.partition("; ")[2] for line in process.lines] == [
        "given up: buffers, tier, idle; requests are refused",
        "no pressure",
    ]


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


@dataclass
class Busy:
    """A lane that has work, and one idle cache."""

    is_ready: bool = True
    n_requests: int | None = 1
    cached: int = 10

    def turn(self) -> bool:
        return True

    def evict_idle(self, n_bytes: int) -> bool:
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
