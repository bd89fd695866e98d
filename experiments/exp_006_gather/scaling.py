"""Whether a time is proportional to a size: a linear fit, and how well it fits.

Knows nothing of what was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """y = intercept + slope * x, and the share of the variance of y that it explains."""

    slope: float
    intercept: float
    r_squared: float


def fit(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The least-squares line through the points."""
    slope, intercept = statistics.linear_regression(xs, ys)
    mean = statistics.fmean(ys)
    rest = sum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    all_of_it = sum((y - mean) ** 2 for y in ys)
    return Line(slope, intercept, 1.0 - rest / all_of_it if all_of_it else 1.0)
