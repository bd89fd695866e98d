"""ToolTimes: how long an agent is usually away after a call of a tool.

Knows names of tools, agents and a clock; neither requests nor caches.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Collection

from semantic.domain.fair_share import FairLru
from semantic.ports.generation import Clock

_LATEST = 32
"""Absences after each tool that the median is taken of."""
_FEWEST = 3
"""Absences before which nothing is expected: one of them may be any pause."""
_MOST_TOOLS = 1000
_MOST_AWAY = 10_000
_LONGEST_NAME = 128
"""Characters. Tools with longer names are not remembered."""


class ToolTimes:
    """The median of the latest absences after each tool of a tenant, which no outlier moves far.

    What is remembered is bounded, and tenants share the bound. Not thread-safe.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._seconds: FairLru[str, deque[float]] = FairLru(_MOST_TOOLS)
        self._away: FairLru[str, tuple[str, float]] = FairLru(_MOST_AWAY)

    def called(self, agent: str, tenant: str, tools: Collection[str]) -> float | None:
        """The agent has got calls of `tools`; in how many seconds it is usually back.

        That is when the slowest known one has ended; None if none is known. Only calls of one tool
        are learned from: of several it is not known which took how long.
        """
        names = {name for name in tools if len(name) <= _LONGEST_NAME}
        self._away.remove(tenant, agent)
        if len(names) == len(set(tools)) == 1:
            self._away.put(tenant, agent, (next(iter(names)), self._clock()))
        usual = [self._usual(tenant, name) for name in names]
        return max((seconds for seconds in usual if seconds is not None), default=None)

    def returned(self, agent: str, tenant: str) -> None:
        """The agent has sent its next request."""
        away = self._away.peek(tenant, agent)
        if away is None:
            return
        self._away.remove(tenant, agent)
        name, since = away
        seconds = self._seconds.get(tenant, name)
        if seconds is None:
            seconds = deque(maxlen=_LATEST)
            self._seconds.put(tenant, name, seconds)
        seconds.append(self._clock() - since)

    def _usual(self, tenant: str, name: str) -> float | None:
        seconds = self._seconds.get(tenant, name)
        return statistics.median(seconds) if seconds and len(seconds) >= _FEWEST else None
