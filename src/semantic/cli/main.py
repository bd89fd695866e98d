"""The `semantic` program: its commands and their groups, and its help as plain text.

Importing it loads no framework: commands import what they need when they run. typer's own help,
drawn with rich, imports rich's markdown, syntax and traceback modules: longer than all of this
program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from semantic import __version__
from semantic.cli.agents import AGENT_COMMANDS
from semantic.cli.cache import CACHE_COMMANDS
from semantic.cli.chat import chat
from semantic.cli.demo import demo
from semantic.cli.doctor import doctor
from semantic.cli.fleet.fleet_commands import REPLICA_COMMANDS
from semantic.cli.launch import LAUNCH_COMMANDS
from semantic.cli.models.commands import MODEL_COMMANDS
from semantic.cli.options import EngineOptions, ServeOptions, command
from semantic.cli.remote.fleet_cache import FLEET_COMMANDS
from semantic.cli.remote.memory_limit import MEMORY_COMMANDS
from semantic.cli.remote.top import TOP_COMMANDS
from semantic.cli.run import run
from semantic.cli.serve import CONFIG_COMMANDS, serve
from semantic.cli.service import SERVICE_COMMANDS
from semantic.cli.terminal import escape_unencodable
from semantic.composition.framework import be_program

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter, Parameter

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of every command's context."""

_ARGUMENTS = "Arguments"
_OPTIONS = "Options"


class PlainCommand(TyperCommand):
    """A command."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        _write_options(self.get_params(ctx), ctx, formatter)


class PlainGroup(TyperGroup):
    """A group of commands."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        _write_options(self.get_params(ctx), ctx, formatter)


def _write_options(params: Sequence[Parameter], ctx: Context, formatter: HelpFormatter) -> None:
    """Arguments first, then each heading where its first option is."""
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


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "run": run,
    "chat": chat,
    "serve": serve,
    "doctor": doctor,
}
GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "agents": ("The agents in the store: list, show, fork, pin, move.", AGENT_COMMANDS),
    "cache": (
        "The stores: their size, their integrity, freeing space.",
        {**CACHE_COMMANDS, **FLEET_COMMANDS},
    ),
    "config": ("The settings of a server: every value, and its source.", CONFIG_COMMANDS),
    "models": ("Models by name: list, show, download, delete, aliases.", MODEL_COMMANDS),
    "fleet": ("Several servers that share agents, on Ray.", REPLICA_COMMANDS),
    "service": ("A server that starts with your login (systemd, launchd).", SERVICE_COMMANDS),
    "launch": ("Start a coding agent with a running server.", LAUNCH_COMMANDS),
}
"""Groups of commands: help text and commands by name."""

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


@command
def group(
    ctx: typer.Context,
    engine: EngineOptions,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=print_version),
    ] = False,
) -> None:
    """Many LLM agents share one local model, and no token is computed twice.

    The options below may be given before or after the command.
    """
    del version
    given = {name: value for name, value in asdict(engine).items() if _is_given(ctx, name)}
    below = {name: _defaults(commands, given) for name, (_, commands) in GROUPS.items()}
    ctx.default_map = {**_defaults(COMMANDS, given), **below}


def _defaults(
    commands: Mapping[str, Callable[..., None]], given: Mapping[str, object]
) -> dict[str, object]:
    """The options `given` before a command, for each; a server's may name several models."""
    if "model" not in given:
        return dict.fromkeys(commands, given)
    of_server = {**given, "model": [given["model"]]}
    return {
        name: of_server if ServeOptions in get_type_hints(function).values() else given
        for name, function in commands.items()
    }


def _is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option is on the command line: a default must not hide other sources."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


app.callback()(group)
for name, function in COMMANDS.items():
    app.command(name, cls=PlainCommand)(command(function))
for name, function in {
    **TOP_COMMANDS,
    **MEMORY_COMMANDS,
}.items():  # they have no engine, and no options of one
    app.command(name, cls=PlainCommand)(command(function))
for word, (words, commands) in GROUPS.items():
    part = typer.Typer(no_args_is_help=True, cls=PlainGroup, rich_markup_mode=None)
    for name, function in commands.items():
        part.command(name, cls=PlainCommand)(command(function))
    app.add_typer(part, name=word, help=words)


def main() -> None:
    """The `semantic` program."""
    escape_unencodable()
    if not sys.stderr.isatty():
        # Download bars are for a terminal only.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    be_program()
    app(prog_name="semantic")
