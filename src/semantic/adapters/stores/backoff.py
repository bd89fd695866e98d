"""When to leave a failing disk alone for a while, so that it is not hammered.

Knows failures and a clock; not what failed.
"""

from __future__ import annotations

from collections.abc import Callable

FAILURES = 3
"""Writes that fail one after the other before the store backs off."""
FIRST_PAUSE = 1.0
"""Seconds of the first back-off; each further failure doubles it."""
LONGEST_PAUSE = 30.0


class Backoff:
    """After several failures one after the other, no writes for a time that doubles to a limit.

    When the time is over, one write is tried: it ends the back-off, or begins a longer one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: float | None = None
        self._pause = FIRST_PAUSE
        self._failures = 0
        self.times = 0

    def is_on(self) -> bool:
        """Whether to write nothing now."""
        return self._until is not None and self._clock() < self._until

    def note(self, *, kept: bool) -> None:
        """A write was tried."""
        if kept:
            self._failures, self._until, self._pause = 0, None, FIRST_PAUSE
            return
        self._failures += 1
        if self._failures >= FAILURES:
            self._until = self._clock() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self.times += 1
