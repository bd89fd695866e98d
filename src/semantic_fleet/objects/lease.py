"""Lease: lets one process at a time do something to an object store, with clocks that may be wrong.

    janitor/lease/NUMBER   the lease as its holder has renewed it; one of no bytes is free

The highest number counts, and a number is created only once: so of two that renew or take over
only one succeeds. A lease is dead when its number has not changed for a whole `PERIOD` by the
*observer's* clock: no time of one machine is compared with that of another. The holder renews right
before whatever it may do alone; its own clock can only stop it, when it slept meanwhile. Knows no
object but its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from semantic_fleet.objects.objects import PAGE, Listed, Objects

FOLDER = "janitor/lease"
PERIOD = 120.0
"""Seconds without a renewal after which others take a lease over. Longer than any one call to the
object store that its holder makes, so that a call has ended before others act."""
RENEWALS = 4
"""How often it is renewed in that time, if its holder does nothing that needs it."""


class LostLeaseError(Exception):
    """Another process has the lease now, or may have."""


def clock() -> float:
    """Seconds that go on while the machine is asleep, as `time.monotonic` does not."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Lease:
    """One process's view of the lease. Not thread-safe. Every call raises UnavailableError."""

    def __init__(
        self,
        objects: Objects,
        *,
        period: float = PERIOD,
        clock: Callable[[], float] = clock,
    ) -> None:
        self._objects = objects
        self._period = period
        self._clock = clock
        self._own: int | None = None
        self._seen: int | None = None
        self._since = 0.0
        self._renewed = 0.0
        self.is_renewed = False
        """Whether another process was seen to renew it."""

    @property
    def number(self) -> int:
        """The number of the last renewal. Raises LostLeaseError while it is another's."""
        if self._own is None:
            raise LostLeaseError("the lease is another's")
        return self._own

    def acquire(self) -> bool:
        """Renew the lease, or take it if it is free or dead; whether it is this process's now.

        Of another's lease what was seen is remembered: call again until it is dead.
        """
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
        """Call right before what only the holder may do. Raises LostLeaseError.

        Also when it took so long that it might end behind the period in which others wait: half of
        that is left for one call to the object store.
        """
        if not self._follow(self.number):
            raise LostLeaseError("another process took the lease over")
        if self._clock() - self._renewed >= self._period / 2:
            raise LostLeaseError("renewing the lease took too long")

    def keep(self) -> None:
        """`renew` if that is due: call from time to time during long work."""
        if self._clock() - self._renewed >= self._period / RENEWALS:
            self.renew()

    def release(self) -> None:
        """Let another process have it at once."""
        if self._own is not None:
            self._follow(self._own, b"")
            self._own = None

    def _follow(self, number: int, contents: bytes = b"held") -> bool:
        """Create the lease that comes after `number`; False if another process was first.

        One that has slept may create a number that others had and deleted: then there is a higher
        one.
        """
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
