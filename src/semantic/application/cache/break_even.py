"""Whether reading from disk is worth it: both rates are measured while running.

Knows bytes, tokens and seconds; neither disks nor models.
"""

from __future__ import annotations

from collections.abc import Callable

_NEW_WEIGHT = 0.3
"""Weight of the newest measurement of the disk."""
_TRY_AGAIN_AFTER = 8
"""A disk that was too slow is tried again after it was passed over this many times."""


class BreakEven:
    """Compares the seconds of a read with those of computing the same tokens."""

    def __init__(self, prefill_rate: Callable[[], float | None]) -> None:
        """`prefill_rate` gives the measured prompt tokens per second, or None before any."""
        self._prefill_rate = prefill_rate
        self._bytes_per_second: float | None = None
        self._passed_over = 0

    @property
    def bytes_per_second(self) -> float | None:
        """The measured rate of reading, None before the first."""
        return self._bytes_per_second

    def worth_reading(self, n_bytes: int, n_tokens: int) -> bool:
        """Whether reading `n_bytes` is expected to be faster than computing `n_tokens`."""
        rate = self._prefill_rate()
        if not n_bytes or rate is None or self._bytes_per_second is None:
            return True
        if n_bytes / self._bytes_per_second <= n_tokens / rate:
            self._passed_over = 0
            return True
        self._passed_over += 1
        if self._passed_over < _TRY_AGAIN_AFTER:
            return False
        self._passed_over = 0
        return True

    def observe(self, n_bytes: int, seconds: float) -> None:
        """Learn from a read of `n_bytes` that took `seconds`."""
        if not n_bytes or seconds <= 0:
            return
        measured = n_bytes / seconds
        old = self._bytes_per_second
        self._bytes_per_second = (
            measured if old is None else (1 - _NEW_WEIGHT) * old + _NEW_WEIGHT * measured
        )
