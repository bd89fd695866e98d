"""Formats output as text and as JSON."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest

import typer

from semantic.cli.driving import Timing
from semantic.domain.match import MatchReport
from semantic.domain.stored import StoreStats, Wear
from semantic.domain.value_objects import CompletedGeneration, PoolView

Json = dict[str, object]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_SPANS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
_NAME_ENDS = 30
_SHORTEST = 18
"""The number of characters that a table leaves of its names before it drops a column."""
_GAP = 2
_DAYS_SHOWN = 6
"""The number of days in a list of written bytes."""


def show_bytes(n_bytes: float) -> str:
    """Return a size as text, such as 12.5 MiB."""
    for unit in _UNITS[:-1]:
        if n_bytes < _STEP:
            return f"{n_bytes:.0f} {unit}" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
        n_bytes /= _STEP
    return f"{n_bytes:.1f} {_UNITS[-1]}"


def show_seconds(seconds: float | None) -> str:
    """Return a duration as text, such as 12 ms or 1.23 s. Returns a dash for None."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def show_age(since: float) -> str:
    """Return the time since a Unix time as text, such as 3 hours ago."""
    seconds = time.time() - since
    for unit, span in _SPANS:
        if seconds >= 2 * span:
            return f"{seconds // span:.0f} {unit} ago"
    return "now"


def show_name(name: str, *, whole: bool = False) -> str:
    """Return a name with control characters escaped. Its middle is missing above 60 characters
    unless `whole` is set."""
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
    if whole or len(plain) <= 2 * _NAME_ENDS:
        return plain
    return f"{plain[:_NAME_ENDS]}…{plain[-_NAME_ENDS:]}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines with aligned columns."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) + _GAP for column in zip_longest(*rows, fillvalue="")]
    return [
        "".join(
            cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=False)
        ).rstrip()
        for row in rows
    ]


def terminal_width() -> int | None:
    """Return the width of the terminal in cells. Returns None if stdout is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def fitted(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return rows of cells as lines of at most `width` cells, if it is not None. Drops columns from
    the right, and shortens the first in the middle."""
    if width is None:
        return columns(rows)
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) + _GAP for column in zip(*rows, strict=True)]
    kept = len(widths)
    while kept > 1 and min(widths[0], _SHORTEST + _GAP) + sum(widths[1:kept]) > width + _GAP:
        kept -= 1
    room = width - sum(widths[1:kept])
    return columns([(_shortened(row[0], room), *row[1:kept]) for row in rows])


def _shortened(name: str, width: int) -> str:
    from rich.cells import cell_len

    kept, short = len(name), name
    while kept and cell_len(short) > width:
        kept -= 1
        short = f"{name[: kept - kept // 2]}…{name[len(name) - kept // 2 :]}"
    return short


def answer_json(model: str, done: CompletedGeneration, timing: Timing, view: PoolView) -> Json:
    return {
        "agent": done.agent_id,
        "model": model,
        "text": done.text,
        "tokens": list(done.tokens),
        "finish_reason": done.finish_reason,
        "error": done.error,
        "usage": {
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
            "generated_tokens": done.generated_tokens,
            "blocks": view.n_blocks,
            "bytes": view.n_bytes,
        },
        "timings": {
            "ttft_seconds": timing.ttft,
            "total_seconds": timing.total,
            "decode_tokens_per_second": timing.decode_rate,
        },
        "match": match_json(done.match),
    }


def match_json(match: MatchReport | None) -> Json | None:
    if match is None:
        return None
    return {**asdict(match), "end": match.end.value, "computed_tokens": match.computed_tokens}


def store_json(tiers: Sequence[StoreStats]) -> list[Json]:
    return [
        {
            "tier": stats.tier.value,
            "agents": stats.n_agents,
            "blocks": stats.n_blocks,
            "bytes": stats.n_bytes,
            "max_bytes": stats.max_bytes,
            "pinned_bytes": stats.pinned_bytes,
            "counts": dict(stats.counts),
            "written": None if stats.wear is None else _wear_json(stats.wear),
        }
        for stats in tiers
    ]


def _wear_json(wear: Wear) -> Json:
    return {**asdict(wear), "today": wear.today, "share": wear.share, "held_back": wear.holds_back}


def store_lines(tiers: Sequence[StoreStats]) -> Iterator[str]:
    """Yield the contents of `store_json` as lines. Omits counts that are 0."""
    for stats in tiers:
        size = f"{show_bytes(stats.n_bytes)} of {show_bytes(stats.max_bytes)}"
        yield (
            f"store, {stats.tier}: agents {stats.n_agents}, blocks {stats.n_blocks}, {size}, "
            f"pinned {show_bytes(stats.pinned_bytes)}"
        )
        counts = [f"{name} {count}" for name, count in stats.counts.items() if count]
        if counts:
            yield f"  since it opened: {', '.join(counts)}"
        if stats.wear is not None:
            yield from _wear_lines(stats.wear)


def _wear_lines(wear: Wear) -> Iterator[str]:
    share = "unknown" if wear.share is None else f"{wear.share:.2%}"
    yield (
        f"  written: {show_bytes(wear.today)} today, {show_bytes(wear.total)} since {wear.since}; "
        f"share of the drive's rated life: {share}"
    )
    earlier = [one for one in wear.days if one != wear.day][-_DAYS_SHOWN:]
    if earlier:
        days = ", ".join(f"{show_bytes(wear.days[one])} on {one}" for one in earlier)
        yield f"  before: {days}"
    if wear.holds_back:
        yield f"  the daily limit of {show_bytes(wear.max_a_day or 0)} holds writes back"


def to_line(document: Json) -> str:
    return json.dumps(document, ensure_ascii=False)


def print_result(as_json: bool, text: str, document: Json) -> None:
    typer.echo(to_line(document) if as_json else text)
