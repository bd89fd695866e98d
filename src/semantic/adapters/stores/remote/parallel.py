"""Parallel: calls that wait for an object store, several at a time. Knows not what they ask."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

THREADS = 8
"""Calls at a time."""


class Parallel:
    """Threads of one kind of call: what waits for others of its own kind would wait for ever."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="remote")

    def each(self, action: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """What `action` returns for each, in order; of a single one on the calling thread."""
        if len(items) <= 1:
            return [action(item) for item in items]
        return list(self._pool.map(action, items))

    def ahead(self, action: Callable[[T], R], items: Iterable[T], n: int) -> Iterator[R]:
        """The same one by one, while the next `n` are on their way."""
        if n == 1:
            yield from map(action, items)
            return
        waiting: deque[Future[R]] = deque()
        for item in items:
            waiting.append(self._pool.submit(action, item))
            if len(waiting) == n:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def close(self) -> None:
        """Return when all calls have ended."""
        self._pool.shutdown()
