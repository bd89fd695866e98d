"""Summaries of a list of numbers, with the standard library alone.

Percentiles interpolate linearly between the two nearest ranks, so p50 is the usual median.
Units are the caller's: what goes in as milliseconds comes out as milliseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie."""
    if not values:
        raise ValueError("percentile of no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be between 0 and 100, got {percent}")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def summarise(values: Sequence[float], prefix: str = "") -> dict[str, float]:
    """Count, extremes, mean, sample deviation and p50/p95/p99, each key behind `prefix`."""
    summary = {
        "n": len(values),
        "min": min(values),
        "max": max(values),
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        "p50": percentile(values, 50),
        "p95": percentile(values, 95),
        "p99": percentile(values, 99),
    }
    return {prefix + name: value for name, value in summary.items()}
