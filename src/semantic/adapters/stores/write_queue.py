"""WriteQueue: threads that do queued jobs in `WriteOrder`."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from semantic.adapters.stores.write_order import UploadPace, WriteOrder
from semantic.domain.errors import IntegrityError
from semantic.domain.stored import QUEUE_COUNTERS, StoredBlock

FAILURES = 3
"""The number of consecutive failed writes after which the queue backs off."""
FIRST_PAUSE = 1.0
"""Seconds of the first back-off."""
MAX_PAUSE = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    job: object
    write: Callable[[], None]
    ended: Callable[[], None]
    is_block: bool


class WriteQueue:
    """A queue of jobs. `changed` is the only lock; callers hold it unless a docstring says
    otherwise. `drain` and `close` raise IntegrityError if a bug has ended a thread."""

    def __init__(
        self,
        max_bytes: int,
        *,
        clock: Callable[[], float],
        pace: UploadPace | None,
        threads: int,
        close_seconds: float,
    ) -> None:
        """See `BackgroundStore`."""
        self.changed = threading.Condition()
        self.max_bytes = max_bytes
        self.n_bytes = 0
        """Bytes of waiting and running writes."""
        self.pace = pace
        self.order = WriteOrder(clock, defers=pace is not None)
        self.counts: Counter[str] = Counter(dict.fromkeys(QUEUE_COUNTERS, 0))
        self.backoff = Backoff(clock)
        self.is_flushing = 0  # number of calls waiting for queued jobs
        self._clock = clock
        self._queue: OrderedDict[int, _Entry] = OrderedDict()
        self._numbers = 0
        self._current: dict[int, _Entry] = {}  # by number, oldest first
        self._closing = False
        self._close_seconds = close_seconds
        self._ends = math.inf
        self.error: BaseException | None = None
        """The error that ended the threads."""
        self._threads = [
            threading.Thread(target=self._run, name="store writer", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def accepts(self) -> bool:
        return self.error is None and not self.backoff.is_on()

    @property
    def is_over_half(self) -> bool:
        """True if jobs take over half of `max_bytes`."""
        return 2 * self.n_bytes > self.max_bytes

    def add(
        self,
        job: object,
        write: Callable[[], None],
        ended: Callable[[], None],
        block: StoredBlock | None = None,
    ) -> int:
        """Queue a job; return its number. A thread calls `write`, and then `ended` under the
        lock."""
        self._numbers += 1
        self._queue[self._numbers] = _Entry(job, write, ended, block is not None)
        self.order.add(self._numbers, block)
        self.changed.notify_all()
        return self._numbers

    def take(self, number: int) -> object | None:
        """Remove a job from the queue and return it, or None."""
        self.order.discard(number)
        entry = self._queue.pop(number, None)
        return None if entry is None else entry.job

    def waiting(self) -> Sequence[tuple[int, object]]:
        """Return the queued jobs by number."""
        return [(number, entry.job) for number, entry in self._queue.items()]

    def current(self) -> Sequence[object]:
        return [entry.job for entry in self._current.values()]

    def attempt(self, write: Callable[[], bool], dropped: str) -> None:
        """Call `write` without the lock. During a back-off, only count the write as `dropped`."""
        with self.changed:
            if self.backoff.is_on() or self._clock() >= self._ends:
                self.counts[dropped] += 1
                return
        succeeded = write()
        with self.changed:
            self.backoff.record(succeeded=succeeded)

    def drain(self) -> None:
        """Wait until all jobs queued so far have finished. Callers must not hold the lock."""
        with self.changed:
            last = self._numbers
            self.is_flushing += 1
            self.changed.notify_all()
            try:
                self.changed.wait_for(lambda: self.error is not None or self._is_done(last))
            finally:
                self.is_flushing -= 1
            if self.error is not None:
                raise IntegrityError(
                    f"cannot write blocks: the writing thread died: {self.error!r}"
                ) from self.error

    def close(self) -> None:
        """Finish the jobs, then end the threads. Drops jobs that remain after `close_seconds`.
        Callers must not hold the lock."""
        with self.changed:
            self._ends = self._clock() + self._close_seconds
        try:
            self.drain()
        finally:
            with self.changed:
                self._closing = True
                self.changed.notify_all()
            for thread in self._threads:
                thread.join()

    # The threads

    def _is_done(self, number: int) -> bool:
        return all(one > number for one in self._current) and (
            next(iter(self._queue), number + 1) > number
        )

    def _run(self) -> None:
        with contextlib.ExitStack() as at_exit:
            at_exit.push(self._on_exit)
            while (found := self._next()) is not None:
                number, entry = found
                entry.write()
                with self.changed:
                    self._current.pop(number, None)
                    entry.ended()
                    self.changed.notify_all()

    def _on_exit(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        with self.changed:
            self.error = self.error or error
            self._current.clear()
            self.changed.notify_all()
        return True

    def _next(self) -> tuple[int, _Entry] | None:
        # None after the last job
        with self.changed:
            while self.error is None:
                hurries = self.is_flushing or self._closing or self.is_over_half
                number = self.order.next(lingers=not hurries)
                if number is None and self._closing and not self._queue:
                    return None
                wait = self.order.delay() if number is None else self._until_start(number)
                if number is not None and wait == 0:
                    self.order.discard(number)
                    entry = self._current[number] = self._queue.pop(number)
                    if self.pace is not None and entry.is_block:
                        self.pace.begin()
                    return number, entry
                self.changed.wait(wait)
        return None

    def _until_start(self, number: int) -> float | None:
        # None if the job has to wait for another one
        if not self._queue[number].is_block:
            return None if self._current else 0.0
        hurries = self.is_flushing or self._closing
        return 0.0 if self.pace is None or hurries else self.pace.delay()


class Backoff:
    """Pauses writes after `FAILURES` consecutive failures. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: float | None = None
        self._pause = FIRST_PAUSE
        self._failures = 0
        self.times = 0

    def is_on(self) -> bool:
        return self._until is not None and self._clock() < self._until

    @property
    def has_begun(self) -> bool:
        """True if writes have paused and none has succeeded since."""
        return self._until is not None

    def record(self, *, succeeded: bool) -> None:
        if succeeded:
            self._failures, self._until, self._pause = 0, None, FIRST_PAUSE
            return
        self._failures += 1
        if self._failures >= FAILURES:
            self._until = self._clock() + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)
            self.times += 1
