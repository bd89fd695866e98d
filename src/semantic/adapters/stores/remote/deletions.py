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
        self._busy: set[Hashable] = set()  # what is written or deleted now
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="remote")

    def begin(self, what: Hashable, delete: Callable[[], None]) -> None:
        """Call `delete`, which raises nothing, on the thread."""
        with self._changed:
            self._waiting.setdefault(what, delete)
        self._thread.submit(self._finish, what)

    def is_waiting(self, what: Hashable) -> bool:
        """Whether it was forgotten and may still be there."""
        with self._changed:
            return what in self._waiting

    @contextmanager
    def writing(self, what: Hashable) -> Iterator[None]:
        """Inside it is written: deleted before, if it was forgotten, and not meanwhile."""
        with self._alone_with(what):
            self._delete(what)
            yield

    def flush(self) -> None:
        """Return when all that was begun has ended."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """End what was begun, and the thread."""
        self._thread.shutdown()

    def _finish(self, what: Hashable) -> None:
        with self._alone_with(what):
            self._delete(what)

    def _delete(self, what: Hashable) -> None:
        with self._changed:
            delete = self._waiting.get(what)
        if delete is not None:
            delete()
            with self._changed:
                del self._waiting[what]

    @contextmanager
    def _alone_with(self, what: Hashable) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: what not in self._busy)
            self._busy.add(what)
        try:
            yield
        finally:
            with self._changed:
                self._busy.remove(what)
                self._changed.notify_all()
