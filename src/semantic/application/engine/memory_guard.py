"""MemoryGuard: keeps the process within its memory, by giving up caches in a fixed order.

Knows how much memory is in use and what can be given up; neither engines nor stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from semantic.ports.outbound import Clock

_INTERVAL = 0.25
"""Seconds between two measurements."""
_PARTS = 16
"""One part in so many is kept free, and one more whenever something is given up."""
_CALM = 60.0
"""Seconds without pressure after which it is over; for reports alone."""
_FORGET = 0.98
"""What is kept free for steps is as much as the largest rise between two measurements, which counts
so much less with each: some 9 seconds later by half."""

Free = Callable[[int], bool]
"""Gives up so many bytes, if it has them; False if it has nothing to give up."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the guard needs of the process. Both functions are for the framework's thread.

    `in_use` returns bytes as the system counts them. `give_back` returns to the system what was
    freed and is only kept to be used again.
    """

    in_use: Callable[[], int]
    give_back: Callable[[], None]


class MemoryGuard:
    """Gives up caches while more than most of `max_bytes` is in use; a running request keeps its
    own. For one thread, but `is_exceeded`."""

    def __init__(
        self, max_bytes: int, memory: Memory, *, clock: Clock, report: Callable[[str], None]
    ) -> None:
        """`report` gets a line when pressure begins, exceeds what can be given up, or ends."""
        self.max_bytes = max_bytes
        self._part = max_bytes // _PARTS
        self._rise = 0.0
        self._last = memory.in_use()
        self._memory = memory
        self._clock = clock
        self._report = report
        self._order: list[tuple[str, Free]] = []
        self._next = clock()
        self._calm_at: float | None = None  # while there is pressure: when it will be over
        self._told = False  # of too much in use, since the pressure began
        self.is_exceeded = False
        """Whether giving up everything was not enough: no more requests should begin."""

    def add(self, name: str, free: Free) -> None:
        """`name` is given up after all that were added before."""
        self._order.append((name, free))

    def lacks_room(self) -> int | None:
        """What is in use now, if that leaves no room; else None."""
        used = self._memory.in_use()
        return used if used > self.max_bytes - self._part else None

    def check(self) -> None:
        """Measure, if it is time, and give up as much as needed of each cache, in order."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _INTERVAL
        used = self._memory.in_use()
        high = self.max_bytes - self._reserve(used)
        target = high - self._part
        given_up: list[str] = []
        if used > high:
            used = self._give_up(target, given_up)
        self._last = used
        self.is_exceeded = used > self.max_bytes - self._part
        self._tell(now, used, given_up)

    def _reserve(self, used: int) -> int:
        """Bytes to keep free: a part, and what a step may take."""
        self._rise = max(used - self._last, self._rise * _FORGET)
        return self._part + min(int(self._rise), self.max_bytes // 2)

    def _give_up(self, target: int, names: list[str]) -> int:
        """Give up caches in order until no more than `target` is in use, and add their names;
        returns what is in use then."""
        names.append("buffers")
        used = self._after()
        for name, free in self._order:
            if used <= target:
                break
            if free(used - target):
                names.append(name)
                used = self._after()
        return used

    def _after(self) -> int:
        self._memory.give_back()
        return self._memory.in_use()

    def _tell(self, now: float, used: int, given_up: Sequence[str]) -> None:
        """Report when pressure, or having too much, begins, and when there was none for a while."""
        if given_up:
            begins, self._calm_at = self._calm_at is None, now + _CALM
            exceeds = self.is_exceeded and not self._told
            self._told |= exceeds
            if begins or exceeds:
                refused = "; requests are refused" if self.is_exceeded else ""
                self._say(used, f"given up: {', '.join(given_up)}{refused}")
        elif self._calm_at is not None and now >= self._calm_at:
            self._calm_at, self._told = None, False
            self._say(used, "no pressure")

    def _say(self, used: int, what: str) -> None:
        in_use = f"{used / (1 << 30):.2f} of {self.max_bytes / (1 << 30):.2f} GiB in use"
        self._report(f"memory: {in_use}; {what}")
