"""FairThreads: threads that tenants share fairly by used time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from semantic.domain.errors import BackendError
from semantic.domain.fair_share import FairShare
from semantic.ports.generation import Clock

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception, returned in place of a result."""

    error: Exception

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"

    def drop_frames(self) -> None:
        """Release the objects that the traceback's frames refer to."""
        error: BaseException | None = self.error
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__


def attempt(work: Callable[[], T]) -> T | Failure:
    """Return the result of `work`, or its failure. An error that is not an Exception becomes a
    BackendError."""
    try:
        return work()
    except BaseException as error:  # noqa: BLE001  returned as a value, never swallowed
        if isinstance(error, Exception):
            return Failure(error)
        failure = BackendError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        return Failure(failure)


def guarded(work: Callable[[], T]) -> T:
    """Return the result of `work`, or raise its error as `attempt` converts it."""
    outcome = attempt(work)
    if isinstance(outcome, Failure):
        raise outcome.error
    return outcome


def settle(future: Future[T], work: Callable[[], T]) -> None:
    """Set `future` to the result or failure of `work`. Skips a cancelled future."""
    if future.set_running_or_notify_cancel():
        outcome = attempt(work)
        if isinstance(outcome, Failure):
            future.set_exception(outcome.error)
        else:
            future.set_result(outcome)


@dataclass(slots=True, eq=False)
class _Task:
    tenant: str
    work: Callable[[], None]
    cancel: Callable[[], object]
    is_short: bool
    began: float = 0.0


class FairThreads:
    """Runs work on `n` threads. The tenant that has used the least time goes first. One thread runs
    only short work."""

    def __init__(
        self, n: int, name: str, clock: Clock = time.monotonic, *, rests: bool = False
    ) -> None:
        """The names of the `n` threads begin with `name`. If `rests`, a thread sleeps after long
        work for as long as the work took."""
        self._n = n
        self._rests = rests
        self._clock = clock
        self._pool = ThreadPoolExecutor(n, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[deque[_Task], deque[_Task]]] = {}  # short, and other
        self._running: list[_Task] = []
        self._share = FairShare()

    def submit(self, tenant: str, function: Callable[[], T], *, is_short: bool) -> Future[T]:
        """Call `function` on a thread; return the future of its result or error."""
        future: Future[T] = Future()
        task = _Task(tenant, partial(settle, future, function), future.cancel, is_short)
        with self._lock:
            if tenant not in self._waiting:
                self._waiting[tenant] = deque(), deque()
                self._share.begin(tenant)
            self._waiting[tenant][not is_short].append(task)
            self._start()
        return future

    async def run(self, tenant: str, function: Callable[[], T], *, is_short: bool) -> T:
        """Return the result of `function`, run on a thread."""
        return await asyncio.wrap_future(self.submit(tenant, function, is_short=is_short))

    def close(self) -> None:
        """Cancel waiting tasks, and wait for the running tasks."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for queues in waiting.values():
            for task in (*queues[0], *queues[1]):
                task.cancel()
        self._pool.shutdown()

    def _start(self) -> None:
        while len(self._running) < self._n and (task := self._next()) is not None:
            task.began = self._clock()
            self._running.append(task)
            self._pool.submit(self._run, task)

    def _next(self) -> _Task | None:
        has_room = sum(not one.is_short for one in self._running) < self._n - 1
        ready = [
            name for name, (short, other) in self._waiting.items() if short or (other and has_room)
        ]
        if not ready:
            return None
        now, owing = self._clock(), dict[str, float]()
        for one in self._running:
            owing[one.tenant] = owing.get(one.tenant, 0.0) + now - one.began
        short, other = self._waiting[self._share.next(ready, owing)]
        return (short or other).popleft()

    def _run(self, task: _Task) -> None:
        task.work()
        if self._rests and not task.is_short:
            time.sleep(self._clock() - task.began)
        with self._lock:
            self._running.remove(task)
            self._share.charge(task.tenant, self._clock() - task.began)
            self._end(task.tenant)
            self._start()

    def _end(self, tenant: str) -> None:
        queues = self._waiting.get(tenant, ((), ()))
        if not any(queues) and not any(one.tenant == tenant for one in self._running):
            self._waiting.pop(tenant, None)
            self._share.end(tenant)
