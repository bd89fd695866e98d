"""Executors without threads, so that no test depends on how soon one runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

from semantic.domain.errors import BackendError

P = ParamSpec("P")
T = TypeVar("T")


class LateReads(Executor):
    """Queues submitted reads until `arrive` runs them on the calling thread."""

    def __init__(self) -> None:
        self._reads: deque[Callable[[], None]] = deque()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def read() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BackendError as error:
                future.set_exception(error)

        self._reads.append(read)
        return future

    def arrive(self, most: int | None = None) -> None:
        """Run the oldest queued reads, `most` at most."""
        for _ in range(len(self._reads) if most is None else min(most, len(self._reads))):
            self._reads.popleft()()


class ImmediateReads(LateReads):
    """Runs each read as it is submitted: a load is done by the next step, on any machine."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = super().submit(fn, *args, **kwargs)
        self.arrive()
        return future
