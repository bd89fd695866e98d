"""The command group. Each command lives in a file of its own.

Importing it loads no framework: commands import what they need when they run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from semantic import __version__
from semantic.cli.chat import chat
from semantic.cli.demo import demo
from semantic.cli.doctor import doctor
from semantic.cli.options import EngineOptions, command
from semantic.cli.run import run
from semantic.cli.terminal import print_any_character

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "run": run,
    "chat": chat,
    "doctor": doctor,
}

app = typer.Typer(
    name="semantic",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
    """--version: the program's name and version, and out."""
    if wanted:
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

    --model and the --pool options may stand before or after the command.
    """
    del version
    given = {name: value for name, value in asdict(engine).items() if value is not None}
    ctx.default_map = dict.fromkeys(COMMANDS, given)


app.callback()(group)
for name, function in COMMANDS.items():
    app.command(name)(command(function))


def main() -> None:
    """The `semantic` program."""
    print_any_character()
    if not sys.stderr.isatty():
        # A download shows its bars to a person only.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    app(prog_name="semantic")
