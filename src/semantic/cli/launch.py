"""`semantic launch`: a coding agent's settings for a running server.

Prints the changes, and writes them only with --write. Starts neither a server nor an agent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semantic.cli.edge import print_notice
from semantic.cli.options import AsJson
from semantic.cli.report import Json, show_name, to_line

if TYPE_CHECKING:
    from semantic.adapters.clients.coding_agents import CodingAgent
    from semantic.adapters.clients.config_file import Plan
    from semantic.adapters.clients.file_format import Change
    from semantic.adapters.clients.running_server import RunningServer

_ENOUGH_CONTEXT = 32_768
"""Tokens. In a smaller context an agent's own prompt and tools leave little for the work."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The server, and whether to write."""

    url: Annotated[
        str,
        typer.Option(help="The server's address; `semantic serve` prints it when it is ready."),
    ] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None,
        typer.Option(help="One of the server's names; else its first.", show_default=False),
    ] = None
    key_variable: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The environment variable with the API key, if the server requires one. The key "
            "itself is never written or printed.",
        ),
    ] = "SEMANTIC_API_KEY"
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Change the file, after a backup. Without it nothing changes."
        ),
    ] = False

    def server(self) -> RunningServer:
        """The server of these options. Raises as `find_server`."""
        from semantic.adapters.clients.running_server import find_server

        return find_server(self.url, self.model, self.key_variable)


def claude(options: LaunchOptions, as_json: AsJson = False) -> None:
    """Set up Claude Code: variables for a shell, or its settings.json.

    Without --write prints `export` lines for `eval "$(semantic launch claude)"`.
    """
    from semantic.adapters.clients.coding_agents import CLAUDE, claude_exports

    server = options.server()
    exports = claude_exports(server)
    outcome = _outcome(CLAUDE, server, write=options.write)
    if as_json:
        typer.echo(to_line({**outcome.document, "exports": exports}))
        return
    if options.write:
        outcome.print()
        return
    typer.echo("\n".join(f"export {name}={word}" for name, word in exports.items()))
    # Comments to the shell that evaluates the lines above.
    outcome.print(prefix="# ")


def codex(options: LaunchOptions, as_json: AsJson = False) -> None:
    """Set up Codex: a provider and the model in its config.toml."""
    from semantic.adapters.clients.coding_agents import CODEX

    _set_up(CODEX, options, as_json=as_json)


def opencode(options: LaunchOptions, as_json: AsJson = False) -> None:
    """Set up opencode: a provider and the model in its opencode.json."""
    from semantic.adapters.clients.coding_agents import OPENCODE

    _set_up(OPENCODE, options, as_json=as_json)


LAUNCH_COMMANDS: dict[str, Callable[..., None]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
}


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A plan, and whether it was carried out."""

    client: str
    server: RunningServer
    plan: Plan
    written: bool
    backup: Path | None

    @property
    def document(self) -> Json:
        return {
            "client": self.client,
            "url": self.server.url,
            "model": self.server.model,
            "context_tokens": self.server.context_tokens,
            "file": str(self.plan.path),
            "changes": [
                {"setting": list(one.path), "was": one.shown_was, "becomes": one.becomes}
                for one in self.plan.changes
            ],
            "written": self.written,
            "backup": None if self.backup is None else str(self.backup),
        }

    def print(self, prefix: str = "") -> None:
        typer.echo("\n".join(prefix + line for line in self._lines()))

    def _lines(self) -> Iterator[str]:
        file = show_name(str(self.plan.path), whole=True)
        if not self.plan.changes:
            yield f"{file} has all of this already"
            return
        yield f"{file}:"
        for change in self.plan.changes:
            yield from _diff(change)
        if not self.written:
            yield "nothing was written; --write does it, after a backup of the file"
        elif self.backup is None:
            yield "written; the file is new"
        else:
            yield f"written; as it was: {show_name(str(self.backup), whole=True)}"


def _set_up(agent: CodingAgent, options: LaunchOptions, *, as_json: bool) -> None:
    outcome = _outcome(agent, options.server(), write=options.write)
    if as_json:
        typer.echo(to_line(outcome.document))
    else:
        outcome.print()


def _outcome(agent: CodingAgent, server: RunningServer, *, write: bool) -> _Outcome:
    from semantic.adapters.clients import config_file

    path = agent.settings_file(os.environ)
    plan = config_file.plan(path, agent.format, agent.settings(server))
    if server.context_tokens < _ENOUGH_CONTEXT:
        print_notice(
            f"{show_name(server.model)} has {server.context_tokens} tokens of context: agents "
            "send 10 to 30 thousand before the first word"
        )
    backup = config_file.write(plan) if write else None
    return _Outcome(agent.name, server, plan, write and bool(plan.changes), backup)


def _diff(change: Change) -> Iterator[str]:
    name = _dotted(change.path)
    if change.was is not None:
        yield f"- {name} = {json.dumps(change.shown_was)}"
    if change.becomes is not None:
        yield f"+ {name} = {json.dumps(change.becomes)}"


def _dotted(path: Sequence[str]) -> str:
    """A path as TOML writes it: a part that is not a bare key is quoted."""
    plain = (part.replace("_", "").replace("-", "") for part in path)
    return ".".join(
        part if word.isascii() and word.isalnum() else json.dumps(part)
        for part, word in zip(path, plain, strict=True)
    )
