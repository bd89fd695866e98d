"""Tally: what happened at one tier, counted by name. Knows no name but those that it counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from semantic.adapters.stores.remote.objects import UnavailableError
from semantic.domain.stored import COUNTERS


class Tally:
    """Counts of events, `COUNTERS` and others. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._lock = threading.Lock()

    def count(self, *names: str) -> None:
        """Count one event of each name."""
        with self._lock:
            self._counts.update(names)

    def counts(self) -> Mapping[str, int]:
        """All that was counted."""
        with self._lock:
            return dict(self._counts)

    @contextmanager
    def misses(self, name: str = "unavailable") -> Iterator[None]:
        """Ends what is inside when the object store fails, which is counted as `name`."""
        try:
            yield
        except (UnavailableError, FileNotFoundError):
            self.count(name)
