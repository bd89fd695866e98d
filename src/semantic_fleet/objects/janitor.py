"""Keeps a fleet's object store within a budget. Evicts the least recently used objects.

A pass lists the store twice: first to find old objects, then to delete them. Objects of deleted
tenants go first, then those of the largest tenants. Only the process with the lease deletes.
"""

from __future__ import annotations

import heapq
import json
import re
import threading
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import NamedTuple

from semantic.domain.fair_share import most_each
from semantic_fleet.objects.lease import PERIOD, RENEWALS, Lease, LostLeaseError
from semantic_fleet.objects.objects import PAGE, Listed, Objects, UnavailableError
from semantic_fleet.objects.sealing import TENANTS, live_folder
from semantic_fleet.objects.uses import EVICTED, LOGS, UseReader, announce, name_of, used_at

PASS_SECONDS = 60.0, 600.0
"""The minimum and the maximum of the seconds between two passes."""
TARGET = 19 / 20
"""The fraction of the budget that is in use after an eviction."""
RECORDS = 1 / 16
"""The fraction of the budget that turns and responses may always use."""
OBJECT_BYTES = 100
"""The maximum memory for an object in a pass, in bytes: 100 MB per million objects."""
_PAUSE = 0.2
"""Seconds between two pages of a listing in a running server."""
REPORT = "janitor/report"
_VICTIMS = 1 << 15
"""The number of paths to hold at a time. They take some 16 MiB."""
_CHUNK = 8192
"""The number of uses to sort at a time. Each sort stops the engine for a millisecond."""
_OURS = re.compile(
    r"(?P<kind>[0-9a-f]{64}|turns|responses)/(?P<folder>(?P<tenant>[0-9a-f]{32})-[0-9a-f]{16})/"
    r"(?P<inner>agents/|after/)?.+"
)
_OWN = re.compile(rf"({LOGS}|{EVICTED}|{TENANTS}|janitor)/.+")


class Group(NamedTuple):
    """Objects of one tenant and kind that share an order of eviction."""

    tenant: str
    is_record: bool


@dataclass(frozen=True, slots=True)
class Item:
    """An object that a pass may evict. Its id is the one in `uses`."""

    path: str
    n_bytes: int
    group: Group
    folder: str
    kind: str
    name: int
    used: int


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a pass. `n_bytes` of the budget of `max_bytes` remain in use."""

    n_objects: int
    n_bytes: int
    max_bytes: int
    freed_bytes: int = 0
    evicted: Mapping[str, int] = field(default_factory=dict)
    """The number of evicted blocks, manifests and records."""

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.evicted.items()) or "nothing"
        size = f"{_size(self.n_bytes)} of {_size(self.max_bytes)} in {self.n_objects} objects"
        return f"evicted {kinds}, {_size(self.freed_bytes)}; {size} remain"


def _size(n_bytes: int) -> str:
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if n_bytes >> shift:
            return f"{n_bytes >> shift} {unit}"
    return f"{n_bytes} bytes"


def read_report(objects: Objects) -> Report | None:
    """Return the report of the last pass, or None. Raises UnavailableError."""
    try:
        found = json.loads(bytes(objects.get(REPORT)))
        return Report(**found)
    except (FileNotFoundError, ValueError, TypeError):
        return None


class _Sizes:
    """Sizes of objects, sorted by their last uses. Takes 16 bytes per object."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._waiting: list[tuple[int, int]] = []
        self._sorted: list[tuple[array[int], array[int]]] = []

    def add(self, used: int, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        self._waiting.append((used, n_bytes))
        if len(self._waiting) == _CHUNK:
            self._sort()

    def oldest(self, n_bytes: int) -> int:
        """Return the last use up to which to evict objects. This frees `n_bytes`."""
        self._sort()
        last = 0
        for used, size in heapq.merge(*(zip(*one, strict=True) for one in self._sorted)):
            if n_bytes <= 0:
                break
            last, n_bytes = used, n_bytes - size
        return last

    def _sort(self) -> None:
        self._waiting.sort()
        uses = array("Q", (used for used, _ in self._waiting))
        self._sorted.append((uses, array("Q", (size for _, size in self._waiting))))
        self._waiting = []


class StoppedError(Exception):
    """The caller of `Janitor` stopped the pass."""


@dataclass(frozen=True, slots=True, repr=False)  # repr=False: it holds a secret
class Janitor:
    """Makes passes over one object store. Not thread-safe. `secret` is the fleet's secret of 32
    bytes. A pass raises StoppedError if it is stopped."""

    _objects: Objects
    _secret: bytes
    _lease: Lease
    _max_bytes: int
    _stopped: Callable[[], bool] = lambda: False

    def run(self) -> Report:
        """Make one pass. Raises UnavailableError, StoppedError, and LostLeaseError if another
        process took the lease."""
        self._lease.renew()
        reader = UseReader(self._objects, self._secret)
        table = reader.table(self._keep)
        groups: dict[Group, _Sizes] = defaultdict(_Sizes)
        folders: dict[str, set[str]] = defaultdict(set)
        n_objects = own_bytes = 0
        for one in self._listed():
            item = _item(one, table.mark)
            if item is not None:
                groups[item.group].add(item.used, item.n_bytes)
                folders[item.group.tenant].add(item.folder)
                n_objects += 1
            elif _OWN.fullmatch(one.path):
                own_bytes += one.n_bytes
        n_bytes = own_bytes + sum(one.n_bytes for one in groups.values())
        dead = self._dead(folders)
        last: Mapping[Group, int] = {}
        if n_bytes > self._max_bytes:
            last = _last_evicted(groups, int(self._max_bytes * TARGET) - own_bytes)
        done: Counter[str] = Counter()
        if dead or last:
            done = self._evict(table.get, dead, last, reader.since())
        reader.replace(self._lease.number, table.kept())
        freed = done.pop("bytes", 0)
        n_left = n_objects - sum(done.values())
        report = Report(n_left, n_bytes - freed, self._max_bytes, freed, dict(done))
        self._objects.replace(REPORT, json.dumps(asdict(report)).encode())
        return report

    def _listed(self) -> Iterator[Listed]:
        for page in self._objects.pages():
            self._keep()
            yield from page

    def _dead(self, folders: Mapping[str, set[str]]) -> frozenset[str]:
        pages = self._objects.pages(TENANTS)
        known = {one.path.rsplit("/", 1)[-1] for page in pages for one in page}
        doubtful = [one for one in folders if one not in known or len(folders[one]) > 1]
        return frozenset().union(
            *(folders[one] - {live_folder(self._objects, one)} for one in doubtful)
        )

    def _evict(
        self,
        use_of: Callable[[int], int],
        dead: frozenset[str],
        last: Mapping[Group, int],
        spared: frozenset[int],
    ) -> Counter[str]:
        """Delete objects that are unused since `last` of their group, and all objects in `dead`
        folders."""
        done: Counter[str] = Counter()
        victims: list[Item] = []
        for one in self._listed():
            item = _item(one, use_of)
            if item is None:
                continue
            is_old = item.used <= last.get(item.group, -1) and item.name not in spared
            if is_old or item.folder in dead:
                victims.append(item)
            if len(victims) == _VICTIMS:
                self._delete(victims, done)
                victims = []
        self._delete(victims, done)
        return done

    def _delete(self, victims: Sequence[Item], done: Counter[str]) -> None:
        """Delete objects, the least recently used first. A chain then keeps its beginning."""
        ordered = sorted(victims, key=lambda item: item.used)
        for start in range(0, len(ordered), PAGE):
            batch = ordered[start : start + PAGE]
            names = dict.fromkeys(item.name for item in batch)
            # Announce before deleting, because this process may end midway. Announce again after
            # deleting, because other processes may look in between.
            announce(self._objects, self._secret, f"{self._lease.number:020}-next", names)
            self._keep()
            self._lease.renew()
            self._objects.delete_all([item.path for item in batch])
            announce(self._objects, self._secret, f"{self._lease.number:020}-done", names)
            done.update(item.kind for item in batch)
            done["bytes"] += sum(item.n_bytes for item in batch)

    def _keep(self) -> None:
        if self._stopped():
            raise StoppedError
        self._lease.keep()


class BackgroundJanitor:
    """A thread that makes passes while this process holds the lease."""

    def __init__(
        self,
        objects: Objects,
        secret: bytes,
        max_bytes: int,
        notify: Callable[[str], None],
        *,
        lease_seconds: float = PERIOD,
        pass_seconds: tuple[float, float] = PASS_SECONDS,
    ) -> None:
        """`objects` needs its own connection, because a failed call of the janitor must not open
        the readers' circuit breaker. `notify` receives a line about each pass that evicts."""
        self._lease = Lease(objects, period=lease_seconds)
        self._stop = threading.Event()
        stopped = partial(self._stop.wait, _PAUSE)
        self._janitor = Janitor(objects, secret, self._lease, max_bytes, stopped)
        self._notify = notify
        self._pause = lease_seconds / RENEWALS
        self._pass_seconds = pass_seconds
        self._next = time.monotonic()
        self._last: tuple[float, Report] | None = None
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="janitor", daemon=True)
        self._thread.start()

    def counts(self) -> Mapping[str, int]:
        """Return the counts of passes, failed passes and evictions since the start."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """End the pass in progress and release the lease."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._attempt(self._turn)
            self._stop.wait(self._pause)
        self._attempt(self._lease.release)

    def _turn(self) -> None:
        if not self._lease.acquire() or time.monotonic() < self._next:
            return
        report, now = self._janitor.run(), time.monotonic()
        shortest, longest = self._pass_seconds
        filled = shortest if self._last is None else seconds_to_fill(*self._last, report, now)
        self._next, self._last = now + min(max(filled, shortest), longest), (now, report)
        blocks = report.evicted.get("blocks", 0)
        self._count("passes")
        self._count("evicted", blocks)
        self._count("evicted manifests", report.evicted.get("manifests", 0))
        self._count("evicted records", report.evicted.get("records", 0))
        self._count("evicted bytes", report.freed_bytes)
        if report.evicted:
            self._notify(f"object store: {report}")

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except StoppedError:
            return
        except (LostLeaseError, UnavailableError) as error:
            self._count("failed passes")
            if not self._has_failed:
                self._notify(f"object store: the janitor failed and will try again: {error}")
            self._has_failed = True
        else:
            self._has_failed = False

    def _count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n


def _last_evicted(groups: Mapping[Group, _Sizes], room: int) -> Mapping[Group, int]:
    """Return for each group the last use to evict. All groups then fit in `room` bytes."""
    room = max(0, room)
    sizes = {group: one.n_bytes for group, one in groups.items()}
    blocks = [n for group, n in sizes.items() if not group.is_record]
    records = [n for group, n in sizes.items() if group.is_record]
    most_records = most_each(records, max(int(room * RECORDS), room - sum(blocks)))
    most_blocks = most_each(blocks, room - sum(min(n, most_records) for n in records))
    return {
        group: groups[group].oldest(n - most)
        for group, n in sizes.items()
        if n > (most := most_records if group.is_record else most_blocks)
    }


def seconds_to_fill(before: float, last: Report, report: Report, now: float) -> float:
    """Return the seconds until the budget is full. Assumes the rate since the last pass."""
    grown = report.n_bytes + report.freed_bytes - last.n_bytes
    room = max(0, report.max_bytes - report.n_bytes)
    return room * (now - before) / grown if grown > 0 else float("inf")


def _item(listed: Listed, use_of: Callable[[int], int]) -> Item | None:
    match = _OURS.fullmatch(listed.path)
    if match is None:
        return None
    is_record = match["kind"] in ("turns", "responses")
    kind = "records" if is_record else "manifests" if match["inner"] == "agents/" else "blocks"
    name = name_of(listed.path)
    used = max(used_at(listed.written), use_of(name))
    group = Group(match["tenant"], is_record)
    return Item(listed.path, listed.n_bytes, group, match["folder"], kind, name, used)
