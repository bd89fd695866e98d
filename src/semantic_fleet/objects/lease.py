"""Gives one process at a time an exclusive right to an object store, despite wrong clocks.

    janitor/lease/NUMBER   one renewal by the holder; an empty object is a free lease

The highest number counts. The store creates each number only once, so only one process can take
over. A lease is dead when its number has not changed for `PERIOD` on the observer's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from semantic_fleet.objects.objects import PAGE, Listed, Objects

FOLDER = "janitor/lease"
PERIOD = 120.0
"""Seconds without a renewal after which other processes take the lease. Longer than any call to the
object store."""
RENEWALS = 4
"""The number of renewals per period."""


class LostLeaseError(Exception):
    """Another process may have the lease."""


def clock() -> float:
    """Return a time in seconds. It advances even while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Lease:
    """The lease as one process sees it. Not thread-safe. Methods may raise UnavailableError."""

    def __init__(
        self, objects: Objects, *, period: float = PERIOD, clock: Callable[[], float] = clock
    ) -> None:
        self._objects = objects
        self._period = period
        self._clock = clock
        self._own: int | None = None
        self._seen: int | None = None
        self._since = 0.0
        self._renewed = 0.0
        self.is_renewed = False
        """True if another process renewed the lease since this process first looked."""

    @property
    def number(self) -> int:
        """The last renewal's number. Raises LostLeaseError if another process has the lease."""
        if self._own is None:
            raise LostLeaseError("another process has the lease")
        return self._own

    def acquire(self) -> bool:
        """Renew the lease, or take it if it is free or dead. Returns True if this process has the
        lease."""
        if self._own is not None:
            return self._follow(self._own)
        newest = max(self._listed(), key=_number, default=None)
        if newest is None:
            return self._follow(0)
        number, now = _number(newest), self._clock()
        if newest.n_bytes and number != self._seen:
            self.is_renewed = self._seen is not None
            self._seen, self._since = number, now
        is_dead = now - self._since >= self._period
        return self._follow(number) if is_dead or not newest.n_bytes else False

    def renew(self) -> None:
        """Renew the lease. Raises LostLeaseError if another process has the lease, or if the call
        took more than half the period."""
        if not self._follow(self.number):
            raise LostLeaseError("another process took the lease over")
        if self._clock() - self._renewed >= self._period / 2:
            raise LostLeaseError("renewing the lease took too long")

    def keep(self) -> None:
        """Renew the lease if a renewal is due."""
        if self._clock() - self._renewed >= self._period / RENEWALS:
            self.renew()

    def release(self) -> None:
        """Free the lease, so that another process can take it."""
        if self._own is not None:
            self._follow(self._own, b"")
            self._own = None

    def _follow(self, number: int, contents: bytes = b"held") -> bool:
        """Create the next number of the lease. Returns False if another process was faster."""
        begun, own = self._clock(), number + 1
        self._own = None
        if not self._objects.create(_path(own), contents):
            return False
        found = self._listed()
        if max(map(_number, found), default=own) > own:
            self._objects.delete(_path(own))
            return False
        for older in found:
            if _number(older) < own:
                self._objects.delete(older.path)
        self._own, self._renewed = own, begun
        return True

    def _listed(self) -> list[Listed]:
        return [one for one in self._objects.listed(FOLDER, PAGE) if _number(one)]


def _path(number: int) -> str:
    return f"{FOLDER}/{number:020}"


def _number(listed: Listed) -> int:
    name = listed.path.rsplit("/", 1)[-1]
    return int(name) if name.isascii() and name.isdecimal() else 0
