"""`semantic launch`: starts a coding agent with a running server, without changing files."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from semantic.cli.edge import print_notice
from semantic.cli.options import (
    DEFAULT_KEY_VARIABLE,
    DEFAULT_SERVER,
    AsJson,
    KeyVariable,
    ServerUrl,
)
from semantic.cli.report import Json, show_name, to_line
from semantic.domain.errors import InvalidRequestError, OperatorError

if TYPE_CHECKING:
    from semantic_server.clients.coding_agents import CodingAgent, RunningServer
    from semantic_server.clients.config_file import Change, Plan

Force = Annotated[
    bool, typer.Option("--force", help="Start the agent even if the context is too small for it.")
]


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    url: ServerUrl = DEFAULT_SERVER
    model: Annotated[
        str | None,
        typer.Option(help="A model name of the server. Default: its first.", show_default=False),
    ] = None
    key_variable: KeyVariable = DEFAULT_KEY_VARIABLE
    show: Annotated[
        bool, typer.Option("--show", help="Show what --write would change in the agent's settings.")
    ] = False
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Change the agent's settings, after a backup, and start nothing."
        ),
    ] = False
    force: Force = False

    def server(self) -> RunningServer:
        """Find the running server to use. Raises the same errors as `find_server`."""
        from semantic_server.clients.coding_agents import find_server

        return find_server(self.url, self.model, self.key_variable)


AgentArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ARGUMENTS]", help="Passed on to the agent.", show_default=False),
]


def claude(
    options: LaunchOptions, arguments: AgentArguments = None, as_json: AsJson = False
) -> None:
    """Start Claude Code with the server, through environment variables instead of a file.

    --show prints `export` lines for `eval "$(semantic launch claude --show)"`.
    """
    from semantic_server.clients.coding_agents import CLAUDE, claude_exports

    if _starts(options, arguments, as_json=as_json):
        _start(CLAUDE, options, arguments)
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
    # Comments for the shell that evaluates the lines above.
    outcome.print(prefix="# ")


def codex(
    options: LaunchOptions, arguments: AgentArguments = None, as_json: AsJson = False
) -> None:
    """Start Codex with the server as a provider; --write adds it to config.toml."""
    from semantic_server.clients.coding_agents import CODEX

    _launch(CODEX, options, arguments, as_json=as_json)


def opencode(
    options: LaunchOptions, arguments: AgentArguments = None, as_json: AsJson = False
) -> None:
    """Start opencode with the server as a provider; --write adds it to opencode.json."""
    from semantic_server.clients.coding_agents import OPENCODE

    _launch(OPENCODE, options, arguments, as_json=as_json)


LAUNCH_COMMANDS: dict[str, Callable[..., None]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
}


@dataclass(frozen=True, slots=True)
class _Outcome:
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
            yield "nothing written; --write backs up the file and writes the change"
        elif self.backup is None:
            yield "written; the file is new"
        else:
            yield f"written; backup of the previous file: {show_name(str(self.backup), whole=True)}"


def _starts(options: LaunchOptions, arguments: Sequence[str] | None, *, as_json: bool) -> bool:
    if not (options.write or options.show or as_json):
        return True
    if arguments:
        raise InvalidRequestError(
            "cannot pass arguments to the agent: --write, --show and --json do not start it"
        )
    return False


def _start(agent: CodingAgent, options: LaunchOptions, arguments: Sequence[str] | None) -> NoReturn:
    server = options.server()
    program = find_program(agent)
    require_context(agent, server, force=options.force)
    print_notice(
        f"starting {agent.name} with {show_name(server.model)} at {server.url}, "
        f"{server.context_tokens} tokens of context; its settings stay as they are"
    )
    start = agent.start(server, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(  # noqa: S606 - the user's own program, no shell
            program,
            [agent.name, *start.arguments, *(arguments or ())],
            {**os.environ, **start.variables},
        )
    except OSError as error:
        raise OperatorError(f"cannot start {program}: {error.strerror}") from None


def _launch(
    agent: CodingAgent, options: LaunchOptions, arguments: Sequence[str] | None, *, as_json: bool
) -> None:
    if _starts(options, arguments, as_json=as_json):
        _start(agent, options, arguments)
    outcome = _outcome(agent, options.server(), write=options.write)
    if as_json:
        typer.echo(to_line(outcome.document))
    else:
        outcome.print()


def _outcome(agent: CodingAgent, server: RunningServer, *, write: bool) -> _Outcome:
    from semantic_server.clients import config_file

    path = agent.settings_file(os.environ)
    plan = config_file.plan(path, agent.format, agent.settings(server))
    require_context(agent, server, force=True)
    backup = config_file.write(plan) if write else None
    return _Outcome(agent.name, server, plan, write and bool(plan.changes), backup)


def find_program(agent: CodingAgent) -> str:
    """Return the path of an agent's program. Raises OperatorError if it is not in PATH."""
    program = shutil.which(agent.name)
    if program is None:
        raise OperatorError(
            f"cannot find {agent.name}: expected a program of that name in PATH; "
            f"`npm install -g {agent.package}` installs it"
        )
    return program


def require_context(agent: CodingAgent, server: RunningServer, *, force: bool) -> None:
    """Raise InvalidRequestError if the agent needs more context than the server has. `force` turns
    the error into a notice."""
    if server.context_tokens >= agent.least_tokens:
        return
    message = (
        f"{show_name(server.model)} has {server.context_tokens} tokens of context; {agent.name} "
        f"needs {agent.least_tokens}, because its own prompt comes before the user's first word"
    )
    if not force:
        raise InvalidRequestError(
            f"{message}; `semantic models suggest` names models, --force starts it anyway"
        )
    print_notice(message)


def _diff(change: Change) -> Iterator[str]:
    name = _dotted(change.path)
    if change.was is not None:
        yield f"- {name} = {json.dumps(change.shown_was)}"
    if change.becomes is not None:
        yield f"+ {name} = {json.dumps(change.becomes)}"


def _dotted(path: Sequence[str]) -> str:
    plain = (part.replace("_", "").replace("-", "") for part in path)
    return ".".join(
        part if word.isascii() and word.isalnum() else json.dumps(part)
        for part, word in zip(path, plain, strict=True)
    )
