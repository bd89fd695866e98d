"""`semantic models ps`, `load` and `unload`: the models of a running server.

Knows a terminal; not which models a server unloads by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from semantic.cli.options import (
    DEFAULT_KEY_VARIABLE,
    DEFAULT_SERVER,
    AsJson,
    KeyVariable,
    ServerUrl,
)
from semantic.cli.report import columns, show_bytes, show_name, show_seconds, to_line

_HEADINGS = ("model", "state", "memory", "running", "waiting", "unloaded")
_Served = Annotated[
    str, typer.Argument(metavar="MODEL", help="A name that the server has.", show_default=False)
]


def ps(
    url: ServerUrl = DEFAULT_SERVER,
    key_variable: KeyVariable = DEFAULT_KEY_VARIABLE,
    as_json: AsJson = False,
) -> None:
    """List the models of a running server: which are loaded, what they take and do."""
    from semantic_server.clients.server_connection import list_models

    rows = list_models(url, key_variable)
    if as_json:
        typer.echo(to_line({"models": [dict(row) for row in rows]}))
        return
    typer.echo("\n".join(columns([_HEADINGS, *map(_row, rows)])))


def load(
    model: _Served,
    url: ServerUrl = DEFAULT_SERVER,
    key_variable: KeyVariable = DEFAULT_KEY_VARIABLE,
    as_json: AsJson = False,
) -> None:
    """Load one of the models of a running server, and wait for it."""
    from semantic_server.clients.server_connection import change_model

    _print(change_model(url, key_variable, model, "load"), as_json=as_json)


def unload(
    model: _Served,
    url: ServerUrl = DEFAULT_SERVER,
    key_variable: KeyVariable = DEFAULT_KEY_VARIABLE,
    as_json: AsJson = False,
) -> None:
    """Unload one of the models of a running server when its requests have ended."""
    from semantic_server.clients.server_connection import change_model

    _print(change_model(url, key_variable, model, "unload"), as_json=as_json)


RUNNING_MODEL_COMMANDS: dict[str, Callable[..., None]] = {
    "ps": ps,
    "load": load,
    "unload": unload,
}


def unloaded_when(pinned: bool, expires_in: float | None) -> str:
    """When a model is unloaded, if no request comes."""
    if expires_in is not None:
        return f"in {show_seconds(expires_in)}"
    return "never" if pinned else "when needed"


def _print(found: Mapping[str, object], *, as_json: bool) -> None:
    name, state = str(found["id"]), str(found["state"])
    typer.echo(to_line(dict(found)) if as_json else f"{show_name(name)} is {state}")


def _row(row: Mapping[str, object]) -> tuple[str, ...]:
    memory, expires = row.get("memory_bytes"), row.get("expires_in")
    return (
        show_name(str(row["id"])),
        str(row.get("state", "loaded")),
        show_bytes(memory) if isinstance(memory, int) else "",
        str(row.get("running", "")),
        str(row.get("waiting", "")),
        unloaded_when(
            row.get("pinned") is not False, expires if isinstance(expires, int | float) else None
        ),
    )
