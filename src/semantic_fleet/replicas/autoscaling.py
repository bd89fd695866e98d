"""Computes the number of replicas from their running and waiting requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Protocol

_FULL: Final = 0.75
"""The fraction of the rows of all batches that requests should fill at most."""
RUNNING: Final = "running"
WAITING: Final = "waiting"
ROWS: Final = "rows"


class ScalingContext(Protocol):
    """The part of Ray Serve's policy context that `by_queue` reads."""

    @property
    def current_num_replicas(self) -> int: ...
    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[object, float]] | None: ...
    @property
    def total_queued_requests(self) -> float | None: ...


def wanted_replicas(current: int, running: float, waiting: float, rows: float) -> int:
    """Return the wanted number of replicas. Each replica decodes `rows` requests at once. Removes
    one replica at a time, and only while no request waits."""
    fitting = max(1, math.ceil((running + waiting) / (_FULL * rows)))
    if waiting >= 1:
        return max(fitting, current + 1)
    return max(fitting, current - 1)


def by_queue(context: ScalingContext) -> tuple[int, dict[str, object]]:
    """Return the number of replicas and an empty state, as Ray Serve expects."""
    metrics = context.aggregated_metrics or {}

    def total(name: str) -> float:
        return sum(metrics.get(name, {}).values())

    current = context.current_num_replicas
    if not metrics.get(ROWS) or not current:
        return max(1, current), {}
    rows = max(metrics[ROWS].values())
    waiting = total(WAITING) + (context.total_queued_requests or 0.0)
    return wanted_replicas(current, total(RUNNING), waiting, rows), {}
