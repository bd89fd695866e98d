"""The `semantic` program: its commands, and its help as plain text. Commands import their
dependencies when they run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from semantic import __version__
from semantic.cli.agents import AGENT_COMMANDS
from semantic.cli.cache import CACHE_COMMANDS
from semantic.cli.chat import chat
from semantic.cli.demo import demo
from semantic.cli.doctor import doctor
from semantic.cli.edge import process_edge
from semantic.cli.models.commands import MODEL_COMMANDS
from semantic.cli.options import Command, CommandTable, EngineOptions, command
from semantic.cli.run import run
from semantic.cli.terminal import escape_unencodable
from semantic.composition.framework import be_program
from semantic.composition.plugins import tables
from semantic.domain.errors import OperatorError

if TYPE_CHECKING:
    from typer._click import Command as ClickCommand
    from typer._click import Context, HelpFormatter, Parameter

T = TypeVar("T")

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

_ARGUMENTS = "Arguments"
_OPTIONS = "Options"
_DISTRIBUTION = "semantic-engine"


class PlainCommand(TyperCommand):
    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        _write_options(self.get_params(ctx), ctx, formatter)


class PlainGroup(TyperGroup):
    def resolve_command(
        self, ctx: Context, args: list[str]
    ) -> tuple[str | None, ClickCommand | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except typer.TyperException as error:
            if not error.message.endswith("?"):  # "Did you mean 'serve'?" says enough
                known = ", ".join(self.list_commands(ctx))
                error.message = f"{error.message.rstrip('.')}; expected one of {known}"
            raise

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        _write_options(self.get_params(ctx), ctx, formatter)


def _write_options(params: Sequence[Parameter], ctx: Context, formatter: HelpFormatter) -> None:
    headings: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: []}
    for param in params:
        record = param.get_help_record(ctx)
        if record is not None:
            own = _ARGUMENTS if param.param_type_name == "argument" else _OPTIONS
            heading = getattr(param, "rich_help_panel", None) or own
            headings.setdefault(heading, []).append(record)
    for heading, records in headings.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)


_ENGINE = CommandTable(
    commands={"demo": demo, "run": run, "chat": chat, "doctor": doctor},
    apart={},
    groups={
        "agents": ("The agents in the store: list, show, fork, pin, move.", AGENT_COMMANDS),
        "cache": ("The stores: their size, their integrity, freeing space.", CACHE_COMMANDS),
        "models": ("Models by name: list, show, download, delete, aliases.", MODEL_COMMANDS),
    },
)
_ORDER = (
    *("demo", "run", "chat", "code", "serve", "doctor", "bench", "top", "memory", "mcp"),
    *("agents", "cache", "config", "models", "fleet", "service", "launch"),
)
"""The order of commands in the help."""


def _joined(tables: Sequence[CommandTable]) -> CommandTable:
    groups: dict[str, tuple[str, dict[str, Command]]] = {}
    for name, (words, below) in (one for table in tables for one in table.groups.items()):
        known, commands = groups.get(name, (words, {}))
        groups[name] = (known, {**commands, **below})
    commands = {name: one for table in tables for name, one in table.commands.items()}
    apart = {name: one for table in tables for name, one in table.apart.items()}
    return CommandTable(_in_order(commands), _in_order(apart), _in_order(groups))


def _in_order(table: Mapping[str, T]) -> dict[str, T]:
    places = {name: place for place, name in enumerate(_ORDER)}
    return dict(sorted(table.items(), key=lambda one: places.get(one[0], len(_ORDER))))


TABLE = _joined([_ENGINE, *(one for one in tables() if isinstance(one, CommandTable))])

app = typer.Typer(
    name="semantic",
    no_args_is_help=True,
    cls=PlainGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)


def print_version(requested: bool) -> None:
    """--version: print the program's name and version, and exit."""
    if requested:
        typer.echo(f"semantic {__version__}")
        raise typer.Exit


@process_edge()
def print_newest(requested: bool) -> None:
    """--check-updates: print the newest version beside this one, and exit."""
    if requested:
        typer.echo(f"semantic {__version__}; the newest is {newest_version()}")
        raise typer.Exit


def newest_version() -> str:
    """Return the newest version in pip's index, or in uv's in an environment without pip. Raises
    OperatorError without an answer."""
    import subprocess
    from importlib.util import find_spec

    asked = [sys.executable, "-P", "-m", "pip", "index", "versions", _DISTRIBUTION]
    if find_spec("pip") is None:
        asked = ["uv", "pip", "compile", "--no-deps", "--no-header", "-p", sys.executable, "-"]
    try:
        ran = subprocess.run(  # noqa: S603  no shell, and no text of a request
            asked, input=_DISTRIBUTION, capture_output=True, encoding="utf-8", check=True
        )
        return ran.stdout.partition(_DISTRIBUTION)[2].split()[0].strip("=()")
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        said = str(getattr(error, "stderr", None) or error).rpartition("ERROR: ")[2]
        reason = f"cannot find the newest version: {said}; configure the index of pip or uv"
        raise OperatorError(reason) from error


@command
def group(
    ctx: typer.Context,
    engine: EngineOptions,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=print_version),
    ] = False,
    updates: Annotated[
        bool,
        typer.Option(
            "--check-updates", help="Ask pip or uv for a newer one.", callback=print_newest
        ),
    ] = False,
) -> None:
    """Many LLM agents share one local model, and no token is computed twice.

    The options below may come before or after the command.
    """
    del version, updates
    given = {name: value for name, value in asdict(engine).items() if _is_given(ctx, name)}
    below = {name: _defaults(commands, given) for name, (_, commands) in TABLE.groups.items()}
    ctx.default_map = {**_defaults({**TABLE.commands, **TABLE.apart}, given), **below}


def _defaults(
    commands: Mapping[str, Callable[..., None]], given: Mapping[str, object]
) -> dict[str, object]:
    if "model" not in given:
        return dict.fromkeys(commands, given)
    several = {**given, "model": [given["model"]]}
    return {
        name: several if _takes_several(function) else given for name, function in commands.items()
    }


def _takes_several(function: Command) -> bool:
    hints = get_type_hints(function).values()
    options = [one for hint in hints if is_dataclass(hint) for one in fields(hint)]
    return any(one.name == "model" and "list[" in str(one.type) for one in options)


def _is_given(ctx: typer.Context, name: str) -> bool:
    """Return whether the command line itself sets the option `name`."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


app.callback()(group)
for name, function in {**TABLE.commands, **TABLE.apart}.items():
    app.command(name, cls=PlainCommand)(command(function))
for word, (words, commands) in TABLE.groups.items():
    part = typer.Typer(no_args_is_help=True, cls=PlainGroup, rich_markup_mode=None)
    for name, function in commands.items():
        part.command(name, cls=PlainCommand)(command(function))
    app.add_typer(part, name=word, help=words)


def main() -> None:
    escape_unencodable()
    if not sys.stderr.isatty():
        # Download bars are only for a terminal.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    be_program()
    app(prog_name="semantic")
