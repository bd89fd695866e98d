"""Whether requests meet: while they do, and for a while after, somebody may come at any moment.

Knows counts and times; no requests, no clock.
"""

from __future__ import annotations

_LASTS = 30.0
"""Seconds. Agents that work at the same time ask again within this, as a rule."""


class RecentConcurrency:
    """Remembers when requests were last about together."""

    def __init__(self) -> None:
        self._until = float("-inf")

    def observe(self, n_requests: int, now: float) -> bool:
        """Whether there is company at `now`, in seconds, when `n_requests` are about."""
        if n_requests > 1:
            self._until = now + _LASTS
        return now < self._until
