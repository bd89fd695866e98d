"""A clock that moves only when told. A fake of the `Clock` port."""

from __future__ import annotations


class FakeClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass; a clock never goes back."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back {-seconds} seconds")
        self.now += seconds
