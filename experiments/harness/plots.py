"""Draws a result's raw samples as SVG. It reads result JSON and nothing else.

The same result gives the same bytes: no dates, and element ids salted with the result's id.
Dots are the samples, the line joins their medians, a dashed line marks the verdict's threshold.
Of very many samples only evenly spaced ranks are drawn, extremes included.
It needs matplotlib only to draw: a machine that measures may lack it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from experiments.harness.document import ResultError, Scalar
from experiments.harness.result import Result, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = dict[float, list[float]]

MOST_DOTS = 60
"""Dots drawn for one series at one x; more of them would only make the file larger."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture: fields of a sample on the axes, one line per value of `series`."""

    file: str
    title: str
    x: str
    y: str
    series: str | None = None
    x_label: str = ""
    y_label: str = ""
    x_scale: str = "linear"
    y_scale: str = "linear"
    show_threshold: bool = False


def draw(result_path: Path, plots: Sequence[Plot]) -> list[Path]:
    """Write each plot beside the result it shows; return the files."""
    result = read(result_path)
    return [_draw_one(result, plot, result_path.parent / plot.file) for plot in plots]


def _draw_one(result: Result, plot: Plot, path: Path) -> Path:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": result.id, "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        _fill(figure.add_subplot(), result, plot)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def _fill(axes: Axes, result: Result, plot: Plot) -> None:
    for name, points in _by_series(result.samples, plot).items():
        _line(axes, name, points)
    threshold = result.verdict.threshold
    if plot.show_threshold and _is_number(threshold):
        axes.axhline(float(threshold), color="0.4", linestyle="--", label="threshold")
    axes.set_title(plot.title)
    axes.set_xlabel(plot.x_label or plot.x)
    axes.set_ylabel(plot.y_label or plot.y)
    axes.set_xscale(plot.x_scale)
    axes.set_yscale(plot.y_scale)
    axes.grid(visible=True, color="0.9")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)


def _line(axes: Axes, name: str, points: Points) -> None:
    ordered = sorted(points)
    medians = [statistics.median(points[x]) for x in ordered]
    (line,) = axes.plot(ordered, medians, marker="o", markersize=4, label=name or None)
    dots = [(x, y) for x in ordered for y in spread(points[x])]
    every_x, every_y = zip(*dots, strict=True)
    axes.scatter(every_x, every_y, s=6, alpha=0.3, color=line.get_color())


def spread(values: Sequence[float], most: int = MOST_DOTS) -> list[float]:
    """At most `most` of the values, at evenly spaced ranks from the smallest to the largest."""
    ordered = sorted(values)
    if len(ordered) <= most:
        return ordered
    last = len(ordered) - 1
    return [ordered[round(i * last / (most - 1))] for i in range(most)]


def _by_series(samples: Sequence[Mapping[str, Scalar]], plot: Plot) -> dict[str, Points]:
    """Samples that have both fields, grouped; a sample of another kind may lack them."""
    series: dict[str, Points] = {}
    for sample in samples:
        if plot.x not in sample or plot.y not in sample:
            continue
        name = str(sample.get(plot.series, "")) if plot.series else ""
        points = series.setdefault(name, {})
        points.setdefault(_number(sample, plot.x), []).append(_number(sample, plot.y))
    if not series:
        raise ResultError(f"{plot.file}: no sample has both {plot.x!r} and {plot.y!r}")
    return series


def _number(sample: Mapping[str, Scalar], field: str) -> float:
    value = sample[field]
    if not _is_number(value):
        raise ResultError(f"samples.{field}: a plot needs numbers, got {value!r}")
    return float(value)


def _is_number(value: Scalar) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
