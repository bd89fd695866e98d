"""Numbers as a user reads them, and answers as JSON. Knows no terminal and no engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from semantic.cli.driving import Timing
from semantic.domain.match import MatchReport
from semantic.domain.stored import StoreStats
from semantic.domain.value_objects import CompletedGeneration, PoolView

Json = dict[str, object]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_SPANS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
_NAME_CHARACTERS = 60
_UNLIMITED = 1 << 20
"""Columns of a terminal; more than any table has."""


def show_bytes(n_bytes: float) -> str:
    """12.5 MiB."""
    for unit in _UNITS[:-1]:
        if n_bytes < _STEP:
            return f"{n_bytes:.0f} {unit}" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
        n_bytes /= _STEP
    return f"{n_bytes:.1f} {_UNITS[-1]}"


def show_seconds(seconds: float | None) -> str:
    """12 ms or 1.23 s; a dash for what did not happen."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def show_age(since: float) -> str:
    """3 hours ago, of a moment in seconds since 1970; a clock that was set back is no error."""
    seconds = time.time() - since
    for unit, span in _SPANS:
        if seconds >= 2 * span:
            return f"{seconds // span:.0f} {unit} ago"
    return "now"


def show_name(name: str, *, whole: bool = False) -> str:
    """A name that somebody gave: no control characters reach the terminal, and it ends somewhere.

    It ends after 60 characters unless `whole`.
    """
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
    return plain if whole or len(plain) <= _NAME_CHARACTERS else f"{plain[:_NAME_CHARACTERS]}…"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines of aligned columns, as wide as they need: nothing is wrapped or cut."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(cell, no_wrap=True) for cell in row))
    console = Console(width=_UNLIMITED, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().split("\n")[:-1]]


def answer_json(model: str, done: CompletedGeneration, timing: Timing, view: PoolView) -> Json:
    """Everything about one answer."""
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
    """How much of a prompt was reused; None when nobody looked."""
    if match is None:
        return None
    return {**asdict(match), "end": match.end.value, "computed_tokens": match.computed_tokens}


def store_json(tiers: Sequence[StoreStats]) -> list[Json]:
    """What each tier of a store has, and how often what happened."""
    return [
        {
            "tier": stats.tier.value,
            "agents": stats.n_agents,
            "blocks": stats.n_blocks,
            "bytes": stats.n_bytes,
            "max_bytes": stats.max_bytes,
            "pinned_bytes": stats.pinned_bytes,
            "counts": dict(stats.counts),
        }
        for stats in tiers
    ]


def store_lines(tiers: Sequence[StoreStats]) -> Iterator[str]:
    """The same for people: what never happened is left out."""
    for stats in tiers:
        room = f"{show_bytes(stats.n_bytes)} of {show_bytes(stats.max_bytes)}"
        yield (
            f"store, {stats.tier}: agents {stats.n_agents}, blocks {stats.n_blocks}, {room}, "
            f"pinned {show_bytes(stats.pinned_bytes)}"
        )
        happened = [f"{name} {count}" for name, count in stats.counts.items() if count]
        if happened:
            yield f"  since it was opened: {', '.join(happened)}"


def to_line(document: Json) -> str:
    """One JSON document on one line."""
    return json.dumps(document, ensure_ascii=False)
