"""`semantic memory`: what a running server's process has and may have, and another limit for it.

Knows a terminal; not what a server gives up for its limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from semantic.cli.options import (
    DEFAULT_KEY_VARIABLE,
    DEFAULT_SERVER,
    AsJson,
    KeyVariable,
    ServerUrl,
    gib,
)
from semantic.cli.report import show_bytes, to_line
from semantic.domain.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """The server, and its limit from now on."""

    url: ServerUrl = DEFAULT_SERVER
    key_variable: KeyVariable = DEFAULT_KEY_VARIABLE
    limit: Annotated[
        float | None,
        typer.Option(help="GiB that the process may have from now on.", show_default=False),
    ] = None
    reset: Annotated[
        bool, typer.Option("--reset", help="Return to the limit of the server's start.")
    ] = False


def memory(options: MemoryOptions, as_json: AsJson = False) -> None:
    """Show what a running server's process has and may have; with --limit change that.

    What exceeds a lower limit is given up, in the order of `semantic serve --memory-gb`; running
    answers go on.
    """
    from semantic_server.clients.server_connection import limit_memory, read_memory

    if options.reset and options.limit is not None:
        raise InvalidRequestError("expected either --limit or --reset")
    gib("--limit", options.limit)
    if options.reset or options.limit is not None:
        found = limit_memory(options.url, options.key_variable, options.limit)
    else:
        found = read_memory(options.url, options.key_variable)
    typer.echo(to_line(dict(found)) if as_json else "\n".join(_lines(found)))


def _lines(found: Mapping[str, object]) -> list[str]:
    used, now, most = (
        show_bytes(int(str(found[name]))) for name in ("used_bytes", "limit_bytes", "max_bytes")
    )
    lines = [f"{used} of {most}"]
    lines += [f"{now} while the system is short of memory"] if now != most else []
    steps = found.get("steps")
    if isinstance(steps, list) and steps:
        lines.append(f"pressure: {', '.join(map(str, steps))}")
    return lines
