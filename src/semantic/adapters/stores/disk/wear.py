"""How many bytes a store has written, by day: one small file in its folder, and the day's limit.

Counts block files, manifests and its own small files, of all processes; SQLite's are not seen. The
file is written now and then only, so `kill -9` loses the last minutes of the count. A day is what
the clock says: one that jumps counts for another day and loses nothing of the total.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date

from semantic.adapters.stores.disk.entries import MAX_NUMBER
from semantic.adapters.stores.disk.folder import Folder, read_small
from semantic.domain.errors import StoreError
from semantic.domain.stored import Wear

logger = logging.getLogger("semantic.store")

NAME = "written.json"
MOST_DAYS = 31
"""Days in the file: the latest, and today whatever the clock says."""
SETTLE_BYTES = 64 << 20
SETTLE_SECONDS = 600.0
"""So much is counted, or so long, before it is written: once in that time, one page."""
_MOST_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """Bytes that may be written a day, and bytes that the drive is rated for; None if unknown."""

    max_a_day: int | None = None
    rated: int | None = None


@dataclass(frozen=True, slots=True)
class _Written:
    """The contents of the file."""

    since: str
    total: int = 0
    days: Mapping[str, int] = field(default_factory=dict)

    def plus(self, more: Mapping[str, int], day: str) -> _Written:
        days = Counter(self.days)
        days.update(more)
        kept = {*sorted(days)[-MOST_DAYS:], day} & days.keys()
        total = min(self.total + sum(more.values()), MAX_NUMBER)
        return _Written(self.since, total, {one: days[one] for one in sorted(kept)})


class WriteLedger:
    """What a store has written, as `Wear`. Thread-safe; raises nothing."""

    def __init__(
        self,
        folder: Folder,
        limits: WriteLimits,
        *,
        durable: bool = True,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` is Unix time in seconds, `clock` any that never jumps."""
        self._folder = folder
        self._limits = limits
        self._durable = durable
        self._now = now
        self._clock = clock
        self._mutex = threading.Lock()
        self._known = self._read(_Written(self._day()))
        self._pending: Counter[str] = Counter()
        self._settled = clock()
        self._reported = ""
        folder.on_written = self.add

    def add(self, n_bytes: int) -> None:
        """Count bytes that were written just now."""
        with self._mutex:
            self._pending[self._day()] += n_bytes

    def wear(self) -> Wear:
        """All that is known."""
        with self._mutex:
            pending, known = Counter(self._pending), self._known
        day, limits = self._day(), self._limits
        found = known.plus(pending, day)
        return Wear(day, found.since, found.total, found.days, limits.max_a_day, limits.rated)

    @property
    def holds_back(self) -> bool:
        """See `CacheStorePort.holds_back`. Cheap."""
        most, day = self._limits.max_a_day, self._day()
        if most is None:
            return False
        with self._mutex:
            is_reached = self._known.days.get(day, 0) + self._pending[day] >= most
        if is_reached and self._reported != day:
            self._reported = day
            logger.warning(
                "the store has written %.3g GiB today, its limit of a day: until midnight only "
                "ends of turns are written",
                most / (1 << 30),
            )
        return is_reached

    def settle_if_due(self) -> None:
        """`settle` when much or long ago was counted since the last time."""
        with self._mutex:
            is_due = (
                self._pending.total() >= SETTLE_BYTES
                or self._clock() - self._settled >= SETTLE_SECONDS
            )
        if is_due:
            self.settle()

    def settle(self) -> None:
        """Add what was counted to the file. What fails is tried again the next time."""
        with self._mutex:
            self._settled = self._clock()
            counted = Counter(self._pending)
        if not counted.total():
            return
        with suppress(OSError), self._folder.locked():
            written = self._read(self._known).plus(counted, self._day())
            self._folder.replace(NAME, _encoded(written), sync=self._durable)
            with self._mutex:
                self._known = written
                self._pending -= counted

    def _day(self) -> str:
        return date.fromtimestamp(self._now()).isoformat()  # noqa: DTZ012 - the operator's own day

    def _read(self, otherwise: _Written) -> _Written:
        """The file; `otherwise` if there is none, or it cannot be understood."""
        try:
            data = read_small(self._folder.root / NAME, self._folder.files, _MOST_FILE_BYTES)
            return _decoded(data)
        except (OSError, StoreError, ValueError, RecursionError):
            return otherwise


def _encoded(written: _Written) -> bytes:
    fields = {"since": written.since, "total": written.total, "days": dict(written.days)}
    return json.dumps(fields).encode() + b"\n"


def _decoded(data: bytes) -> _Written:
    """Raises ValueError for anything that `_encoded` does not make."""
    match json.loads(data):
        case {"since": str(since), "total": int(total), "days": dict(days)}:
            found = _Written(_date(since), _count(total))
            return replace(found, days={_date(day): _count(n) for day, n in days.items()})
        case _:
            raise ValueError("expected since, total and days")


def _date(text: str) -> str:
    return date.fromisoformat(text).isoformat()


def _count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"expected a number of bytes, got {value!r:.40}")
    return value
