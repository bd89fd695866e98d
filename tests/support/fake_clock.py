"""Fake of the `Clock` port: advances only by `advance`."""

from __future__ import annotations


class FakeClock:
    """Seconds since its construction."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Add `seconds`; raises ValueError if negative."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back {-seconds} seconds")
        self.now += seconds
