"""Uses: what every process tells the janitor, and what the janitor tells them. Numbers, sealed.

    uses/PROCESS-NUMBER     objects that one process used, those to be evicted first before others
    janitor/uses/NUMBER     what the janitor has made of all those: objects, and when each was used
    evicted/NUMBER          objects that it has deleted

Times are those at which the object store wrote a log, so that no other clock counts. An object is
named by 64 bits of a hash of its name, so that a body and the header it is found by are one. What
cannot be read is ignored: the order of eviction is then worse. Knows no block and no budget.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from itertools import compress, starmap

import xxhash

from semantic.adapters.stores.disk.entries import UnreadableError
from semantic.domain.identity import digest
from semantic_fleet.objects.objects import PAGE, Listed, Objects, UnavailableError
from semantic_fleet.objects.sealing import chunks, contents_bytes, derived, seal

LOGS = "uses"
EVICTED = "evicted"
TABLES = "janitor/uses"
LOG_SECONDS = 60.0
"""A process writes a log at its first use, and then after so many seconds in which there were
more."""
_MOST_USES = 1 << 16
"""Uses of one log: as many as there are places in `used_at`."""
_MOST_LOGS = 500
"""Logs of one process that wait for a janitor; there may be none."""
MOST_EVICTED = 500
"""Announcements that are kept. A process that has missed more forgets all that it knows."""
_PLACE_BITS = 16
_MILLISECONDS = 1000


def name_of(path: str) -> int:
    """The 64 bits that stand for the object with this path, or this name: of its name alone, which
    is a digest of what it is of."""
    return xxhash.xxh3_64_intdigest(path.rsplit("/", 1)[-1].encode())


def used_at(written: datetime, place: int = 0) -> int:
    """When something was used, as a number: at the time at which the object store has written an
    object, and in the order of the places in that."""
    return int(written.timestamp() * _MILLISECONDS) << _PLACE_BITS | min(place, _MOST_USES - 1)


class Numbers:
    """Arrays of 64-bit numbers as sealed objects of a fleet."""

    def __init__(self, objects: Objects, secret: bytes) -> None:
        self._objects = objects
        self._key = derived(secret, b"", b"semantic-numbers-v2")

    def create(self, path: str, numbers: array[int]) -> bool:
        """Whether there was no such object. Raises UnavailableError."""
        return self._objects.create(path, self._sealed(path, numbers))

    def replace(self, path: str, numbers: array[int]) -> None:
        """Write them in the place of any other. Raises UnavailableError."""
        self._objects.replace(path, self._sealed(path, numbers))

    def read(self, listed: Listed) -> array[int]:
        """The numbers; none if the object is gone or damaged. Raises UnavailableError."""
        path, n_bytes, numbers = listed.path, contents_bytes(listed.n_bytes), array("Q")
        if not n_bytes:
            return numbers
        read = partial(starmap, partial(self._objects.read, path))
        try:
            for piece in chunks(self._key, _identity(path), n_bytes, read):
                numbers.frombytes(piece)
        except (FileNotFoundError, UnreadableError, ValueError):
            return array("Q")
        return _little_endian(numbers)

    def _sealed(self, path: str, numbers: array[int]) -> memoryview:
        return seal(self._key, _identity(path), _little_endian(numbers).tobytes())


class UseLog:
    """What this process has used since its last log. Thread-safe."""

    def __init__(
        self,
        objects: Objects,
        secret: bytes,
        *,
        seconds: float = LOG_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects = objects
        self._numbers = Numbers(objects, secret)
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._depths: dict[int, int] = {}
        self._process = os.urandom(8).hex()
        self._n_logs = 0
        self._due: float | None = None

    def __contains__(self, name: int) -> bool:
        """Whether an object is in the log that is to be written."""
        with self._lock:
            return name in self._depths

    def add(self, name: int, depth: int) -> None:
        """Record a use. Of what is used at one time the deepest is evicted first."""
        with self._lock:
            if len(self._depths) < _MOST_USES:
                self._depths[name] = max(depth, self._depths.get(name, 0))

    @property
    def seconds_left(self) -> float | None:
        """Until the log is to be written; None if there is nothing in it."""
        with self._lock:
            if not self._depths:
                return None
            full = len(self._depths) >= _MOST_USES
            return 0.0 if full or self._due is None else max(0.0, self._due - self._clock())

    def write(self) -> None:
        """Write the log now, if there is anything in it. Raises UnavailableError: what is in it is
        for the next one."""
        with self._lock:
            depths, self._depths = self._depths, {}
            self._due = self._clock() + self._seconds
            number = self._n_logs = self._n_logs + bool(depths)
        if not depths:
            return
        names = sorted(depths, key=depths.__getitem__, reverse=True)
        try:
            self._numbers.create(self._path(number), array("Q", names))
        except UnavailableError:
            with self._lock:
                self._depths = {**depths, **self._depths}
            raise
        if number > _MOST_LOGS:
            self._objects.delete(self._path(number - _MOST_LOGS))

    def _path(self, number: int) -> str:
        return f"{LOGS}/{self._process}-{number:012}"


class Evictions:
    """What the janitor has deleted since this process began. Not thread-safe."""

    def __init__(self, objects: Objects, secret: bytes) -> None:
        self._objects = objects
        self._numbers = Numbers(objects, secret)
        self._heard: frozenset[Listed] | None = None

    def new(self) -> frozenset[int] | None:
        """The names of what was deleted since the last call; None if that is not known any more,
        as in a bucket that was emptied: the numbers of its lease begin anew.

        Raises UnavailableError.
        """
        listed, heard = frozenset(self._objects.listed(EVICTED, PAGE)), self._heard
        new = frozenset[Listed]() if heard is None else listed - heard
        is_known = len(new) < MOST_EVICTED and (not heard or not heard.isdisjoint(listed))
        names = [name for one in new for name in self._numbers.read(one)] if is_known else []
        self._heard = listed  # now that all has been read
        return frozenset(names) if is_known else None


class UseTable:
    """When objects were used: 16 bytes for each, sorted by name."""

    def __init__(self, names: array[int] | None = None, used: array[int] | None = None) -> None:
        self.names = array("Q") if names is None else names
        self.used = array("Q") if used is None else used
        self._is_there = bytearray(len(self.names))

    def __len__(self) -> int:
        return len(self.names)

    def mark(self, name: int) -> int:
        """When `name` was used, 0 if that is not known; it is kept by `kept`."""
        at = self._place(name)
        if at is None:
            return 0
        self._is_there[at] = 1
        return self.used[at]

    def get(self, name: int) -> int:
        """When `name` was used, 0 if that is not known."""
        at = self._place(name)
        return 0 if at is None else self.used[at]

    def merged(self, newer: Mapping[int, int]) -> UseTable:
        """With the uses in `newer`: of two of one object the later one."""
        names, used = array("Q"), array("Q")
        at = 0
        for name in sorted(newer):
            until = bisect_left(self.names, name, at)
            names += self.names[at:until]
            used += self.used[at:until]
            names.append(name)
            used.append(max(newer[name], self.get(name)))
            at = until + (until < len(self.names) and self.names[until] == name)
        return UseTable(names + self.names[at:], used + self.used[at:])

    def kept(self) -> array[int]:
        """What was marked, as numbers: names, then times."""
        both = array("Q", compress(self.names, self._is_there))
        both.extend(compress(self.used, self._is_there))
        return both

    @classmethod
    def of(cls, numbers: array[int]) -> UseTable:
        """The inverse of `kept`."""
        half = len(numbers) // 2
        return cls(numbers[:half], numbers[half : 2 * half])

    def _place(self, name: int) -> int | None:
        at = bisect_left(self.names, name)
        return at if at < len(self.names) and self.names[at] == name else None


class UseReader:
    """The janitor's side: reads all logs, and replaces them by one table."""

    def __init__(self, objects: Objects, secret: bytes) -> None:
        self._objects = objects
        self._numbers = Numbers(objects, secret)
        self._read: list[str] = []

    def table(self, keep: Callable[[], None]) -> UseTable:
        """What is known of uses; `keep` is called after each object. Raises UnavailableError."""
        tables = sorted(self._objects.listed(TABLES, PAGE), key=_age)
        logs = sorted(self._logs(), key=_age)
        self._read = [one.path for one in (*tables, *logs)]
        table = UseTable.of(self._numbers.read(tables[-1])) if tables else UseTable()
        recent: dict[int, int] = {}
        for log in logs:
            for name, used in self._uses(log):
                recent[name] = max(used, recent.get(name, 0))
            if len(recent) > _MOST_USES:
                table, recent = table.merged(recent), {}
            keep()
        return table.merged(recent)

    def since(self) -> frozenset[int]:
        """The names of what was used since `table` was read. Raises UnavailableError."""
        known = frozenset(self._read)
        new = (log for log in self._logs() if log.path not in known)
        return frozenset(name for log in new for name in self._numbers.read(log))

    def replace(self, number: int, numbers: array[int]) -> None:
        """Write the table of a pass, and delete what it is made of. Raises UnavailableError."""
        if not self._numbers.create(f"{TABLES}/{number:020}", numbers):
            return
        for at in range(0, len(self._read), PAGE):
            self._objects.delete_all(self._read[at : at + PAGE])

    def _logs(self) -> list[Listed]:
        return [log for page in self._objects.pages(LOGS) for log in page]

    def _uses(self, log: Listed) -> Iterator[tuple[int, int]]:
        first = used_at(log.written)
        return ((name, first | place) for place, name in enumerate(self._numbers.read(log)))


def announce(objects: Objects, secret: bytes, number: str, names: Iterable[int]) -> None:
    """Let every process know what is deleted. An announcement of the same number is one from
    before the lease was lost. Raises UnavailableError."""
    Numbers(objects, secret).replace(f"{EVICTED}/{number}", array("Q", names))
    outdated = sorted(objects.listed(EVICTED, PAGE), key=_age)[:-MOST_EVICTED]
    if outdated:
        objects.delete_all([one.path for one in outdated])


def _identity(path: str) -> bytes:
    return digest("remote-numbers-v1", path.encode())


def _age(listed: Listed) -> tuple[datetime, str]:
    """By what objects are sorted, the oldest first; those of one moment by their numbers."""
    return listed.written, listed.path


def _little_endian(numbers: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return numbers
    swapped = array("Q", numbers)
    swapped.byteswap()
    return swapped
