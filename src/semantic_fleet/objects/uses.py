"""Logs of used objects for the janitor, and its announcements of deletions.

    uses/PROCESS-NUMBER     objects that one process used, in the order to evict them
    janitor/uses/NUMBER     the janitor's merged table: objects and when each was used
    evicted/NUMBER          objects that the janitor deleted

The time of a use is when the object store wrote the log. An object's number is 64 bits of a hash of
its name.
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
"""Seconds between two logs of a process."""
_MOST_USES = 1 << 16
"""The maximum number of uses in one log."""
_MOST_LOGS = 500
"""The maximum number of logs of one process to keep."""
MOST_EVICTED = 500
"""The maximum number of announcements to keep."""
_PLACE_BITS = 16
_MILLISECONDS = 1000


def name_of(path: str) -> int:
    """Return an object's id of 64 bits, a hash of the last part of `path`."""
    return xxhash.xxh3_64_intdigest(path.rsplit("/", 1)[-1].encode())


def used_at(written: datetime, place: int = 0) -> int:
    """Return a sortable number: the time of a use's log, followed by the place in the log."""
    return int(written.timestamp() * _MILLISECONDS) << _PLACE_BITS | min(place, _MOST_USES - 1)


class Numbers:
    """Reads and writes arrays of 64-bit numbers as sealed objects."""

    def __init__(self, objects: Objects, secret: bytes) -> None:
        self._objects = objects
        self._key = derived(secret, b"", b"semantic-numbers-v2")

    def create(self, path: str, numbers: array[int]) -> bool:
        """Create an object with numbers. Returns False if it exists. Raises UnavailableError."""
        return self._objects.create(path, self._sealed(path, numbers))

    def replace(self, path: str, numbers: array[int]) -> None:
        """Write an object with numbers, or replace it. Raises UnavailableError."""
        self._objects.replace(path, self._sealed(path, numbers))

    def read(self, listed: Listed) -> array[int]:
        """Return the numbers in one object; empty if unreadable. Raises UnavailableError."""
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
    """Objects that this process used since it wrote its last log. Thread-safe."""

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
        """Return True if the next log will contain the object `name`."""
        with self._lock:
            return name in self._depths

    def add(self, name: int, depth: int) -> None:
        """Record a use of `name`. The janitor evicts objects with a greater `depth` first."""
        with self._lock:
            if len(self._depths) < _MOST_USES:
                self._depths[name] = max(depth, self._depths.get(name, 0))

    @property
    def seconds_left(self) -> float | None:
        """Seconds until `write` is due, or None if there are no uses to write."""
        with self._lock:
            if not self._depths:
                return None
            full = len(self._depths) >= _MOST_USES
            return 0.0 if full or self._due is None else max(0.0, self._due - self._clock())

    def write(self) -> None:
        """Write the log. If this raises UnavailableError, the uses stay for the next call."""
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
    """The janitor's deletions since this process started. Not thread-safe."""

    def __init__(self, objects: Objects, secret: bytes) -> None:
        self._objects = objects
        self._numbers = Numbers(objects, secret)
        self._heard: frozenset[Listed] | None = None

    def new(self) -> frozenset[int] | None:
        """Return the names of objects deleted since the last call. Returns None if some names may
        be missing. Raises UnavailableError."""
        listed, heard = frozenset(self._objects.listed(EVICTED, PAGE)), self._heard
        new = frozenset[Listed]() if heard is None else listed - heard
        is_known = len(new) < MOST_EVICTED and (not heard or not heard.isdisjoint(listed))
        names = [name for one in new for name in self._numbers.read(one)] if is_known else []
        self._heard = listed  # only after reading all of them
        return frozenset(names) if is_known else None


class UseTable:
    """The last use of each object. Takes 16 bytes per object."""

    def __init__(self, names: array[int] | None = None, used: array[int] | None = None) -> None:
        self.names = array("Q") if names is None else names
        self.used = array("Q") if used is None else used
        self._is_there = bytearray(len(self.names))

    def __len__(self) -> int:
        return len(self.names)

    def mark(self, name: int) -> int:
        """Return the last use of `name`, or 0. Marks the name for `kept`."""
        at = self._place(name)
        if at is None:
            return 0
        self._is_there[at] = 1
        return self.used[at]

    def get(self, name: int) -> int:
        """Return the last use of `name`, or 0."""
        at = self._place(name)
        return 0 if at is None else self.used[at]

    def merged(self, newer: Mapping[int, int]) -> UseTable:
        """Return this table with the uses in `newer`. For each object, the later use counts."""
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
        """Return all marked names, followed by their last uses."""
        both = array("Q", compress(self.names, self._is_there))
        both.extend(compress(self.used, self._is_there))
        return both

    @classmethod
    def of(cls, numbers: array[int]) -> UseTable:
        """Return the table in `numbers`, which `kept` returned."""
        half = len(numbers) // 2
        return cls(numbers[:half], numbers[half : 2 * half])

    def _place(self, name: int) -> int | None:
        at = bisect_left(self.names, name)
        return at if at < len(self.names) and self.names[at] == name else None


class UseReader:
    """Reads all logs of uses, and replaces the logs by one table."""

    def __init__(self, objects: Objects, secret: bytes) -> None:
        self._objects = objects
        self._numbers = Numbers(objects, secret)
        self._read: list[str] = []

    def table(self, keep: Callable[[], None]) -> UseTable:
        """Return the table of all uses. Calls `keep` after each read. Raises UnavailableError."""
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
        """Return the names of objects used since the call of `table`. Raises UnavailableError."""
        known = frozenset(self._read)
        new = (log for log in self._logs() if log.path not in known)
        return frozenset(name for log in new for name in self._numbers.read(log))

    def replace(self, number: int, numbers: array[int]) -> None:
        """Write a pass's table, and delete the logs in it. Raises UnavailableError."""
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
    """Tell every process the names of deleted objects. An announcement replaces one with the same
    number. Raises UnavailableError."""
    Numbers(objects, secret).replace(f"{EVICTED}/{number}", array("Q", names))
    outdated = sorted(objects.listed(EVICTED, PAGE), key=_age)[:-MOST_EVICTED]
    if outdated:
        objects.delete_all([one.path for one in outdated])


def _identity(path: str) -> bytes:
    return digest("remote-numbers-v1", path.encode())


def _age(listed: Listed) -> tuple[datetime, str]:
    return listed.written, listed.path


def _little_endian(numbers: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return numbers
    swapped = array("Q", numbers)
    swapped.byteswap()
    return swapped
