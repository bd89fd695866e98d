"""How often what happened since the store was opened. Any thread may count."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Mapping

_ALWAYS = ("hits", "misses", "written", "dropped", "evicted", "damaged", "write_errors")


class Counts:
    """Named counters; a kind is counted beside its total, as "damaged: body checksum"."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(_ALWAYS, 0))

    def add(self, name: str, kind: str = "", n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n
            if kind:
                self._counts[f"{name}: {kind}"] += n

    def add_error(self, name: str, error: OSError) -> None:
        """Count `error` by the name of its number, as "write_errors: ENOSPC"."""
        self.add(name, errno.errorcode.get(error.errno or 0, "unknown"))

    def snapshot(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)
