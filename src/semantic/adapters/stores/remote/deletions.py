"""Deletions: what a process has forgotten of an object store is deleted from it on a thread.

Forgetting waits for nothing, so the thread that steps the engine may do it. Nothing is deleted
while it is written, and nothing is written again before it is deleted. Knows neither blocks nor
agents.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


class Deletions:
    """Deletions of one process that were begun and have not ended. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._lock = threading.Lock()  # of `_waiting`
        self._writes = threading.RLock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="remote")

    def begin(self, what: Hashable, delete: Callable[[], None]) -> None:
        """Call `delete`, which raises nothing, on the thread."""
        with self._lock:
            self._waiting.setdefault(what, delete)
        self._thread.submit(self._finish, what)

    def is_waiting(self, what: Hashable) -> bool:
        """Whether it was forgotten and may still be there."""
        with self._lock:
            return what in self._waiting

    @contextmanager
    def writing(self, what: Hashable) -> Iterator[None]:
        """Inside it is written: deleted before, if it was forgotten, and not meanwhile."""
        with self._writes:
            self._finish(what)
            yield

    def flush(self) -> None:
        """Return when all that was begun has ended."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """End what was begun, and the thread."""
        self._thread.shutdown()

    def _finish(self, what: Hashable) -> None:
        with self._writes:
            with self._lock:
                delete = self._waiting.get(what)
            if delete is None:
                return
            delete()
            with self._lock:
                del self._waiting[what]
