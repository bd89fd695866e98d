"""Times several functions in turns, so that fluctuations of the machine affect all alike.

Knows nothing of what they do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from experiments.harness.document import Json, Scalar
from experiments.harness.stats import summarise

Line: TypeAlias = dict[str, Scalar]
Lines: TypeAlias = dict[str, Line]


def in_turns(
    ways: Mapping[str, Callable[[], object]], samples: int, warmup: int
) -> dict[str, list[float]]:
    """Milliseconds of each way: its first call ever, then `samples` calls after the warm-up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(1 + warmup + samples):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.perf_counter()
            result = ways[name]()
            elapsed = time.perf_counter() - started
            del result  # its memory may be used again by the next way, as in a running engine
            if turn == 0 or turn > warmup:
                times[name].append(1000 * elapsed)
    return times


def compare(times: Mapping[str, list[float]], n_bytes: int, plain: Sequence[str]) -> Lines:
    """One line per way: of its times the first is the cold call, the rest are warm.

    `ratio` is the median of the ratios, turn by turn, to the fastest of the ways `plain`, which
    copy as many bytes: what slows the machine down for a while slows both.
    """
    found = {name: summarise(mine[1:]) for name, mine in times.items()}
    reference = times[min(plain, key=lambda name: found[name]["p50"])]
    lines: Lines = {}
    for name, mine in times.items():
        line: Line = {f"{key}_ms": found[name][key] for key in ("p50", "p95", "p99", "mean", "std")}
        line["first_ms"] = mine[0]
        line["mb"] = n_bytes / 1e6
        line["gb_per_s"] = n_bytes / found[name]["p50"] / 1e6
        line["ratio"] = statistics.median(
            own / copy for own, copy in zip(mine[1:], reference[1:], strict=True)
        )
        lines[name] = line
    return lines


def keyed(lines: Lines) -> dict[str, Json]:
    """The same, under keys that a report's region can name."""
    return {name.replace(",", "").replace(" ", "_"): {**line} for name, line in lines.items()}


def table(shapes: Mapping[str, Lines], names: Sequence[str] = ()) -> list[Json]:
    """Rows of all shapes and ways, or of the ways in `names`."""
    return [
        {"shape": shape, "way": name, **line}
        for shape, lines in shapes.items()
        for name, line in lines.items()
        if name in (names or lines)
    ]


def number(line: Line, key: str) -> float:
    """A field of a line that is a number."""
    value = line[key]
    if not isinstance(value, float):
        raise TypeError(f"{key}: expected a float, got {value!r}")
    return value
