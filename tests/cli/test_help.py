"""Everything that can be typed explains itself, and asking for help loads no framework."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.core import TyperGroup

from semantic import __version__
from semantic.cli.main import TABLE
from tests.cli.support import environment, imported, process, semantic
from tests.support.program import program


def parameters() -> list[tuple[str, str, str]]:
    """(command, parameter, help) of every option and argument."""
    group = program()
    commands = {"semantic": group, **{name: group.commands[name] for name in TABLE.commands}}
    for word, (_, below) in TABLE.groups.items():
        part = group.commands[word]
        assert isinstance(part, TyperGroup)
        commands |= {f"{word} {name}": part.commands[name] for name in below}
    return [
        (name, parameter.name or "", getattr(parameter, "help", "") or "")
        for name, command in commands.items()
        for parameter in command.params
    ]


@pytest.mark.parametrize("command", list(TABLE.commands))
def test_every_command_explains_itself(command: str) -> None:
    ran = semantic(command, "--help")
    assert ran.code == 0
    words = " ".join((TABLE.commands[command].__doc__ or "").split("\n")[0].split())
    assert words.split(".")[0].split(";")[0] in " ".join(ran.out.split())


def test_the_group_lists_every_command() -> None:
    listed = semantic("--help").out
    assert [
        name for name in (*TABLE.commands, *TABLE.groups, *TABLE.apart) if name not in listed
    ] == []
    for word, (words, below) in TABLE.groups.items():
        assert words in listed
        assert [name for name in below if name not in semantic(word, "--help").out] == []


def test_every_option_has_a_help_text() -> None:
    found = parameters()
    assert [(command, name) for command, name, text in found if not text] == []
    assert {"model", "pool_gb", "pool_blocks"} <= {name for _, name, _ in found}


@pytest.mark.parametrize("command", list(TABLE.commands))
def test_the_model_and_the_budget_can_be_given_to_every_command(command: str) -> None:
    names = {name for owner, name, _ in parameters() if owner == command}
    assert {"model", "pool_gb", "pool_blocks"} <= names


@pytest.mark.process
def test_the_version_is_printed() -> None:
    ran = process("--version")
    assert (ran.code, ran.out) == (0, f"semantic {__version__}\n")


def test_no_arguments_print_the_help() -> None:
    assert "Usage" in semantic().out + semantic().err


MOST_MODULES_FOR_HELP = 260
"""Python's own and typer's included: the time of `--help` is the time of their imports."""
NOT_FOR_HELP = (
    "asyncio", "email", "fastapi", "mlx", "mlx_lm", "numpy", "platformdirs", "pydantic", "pygments",
    "rich", "semantic.adapters", "semantic.application.engine", "sqlite3", "transformers",
)  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_imports_little(arguments: list[str]) -> None:
    modules, _ = imported(*arguments)
    assert "semantic.cli.main" in modules
    assert [name for name in NOT_FOR_HELP if name in modules] == []
    assert len(modules) <= MOST_MODULES_FOR_HELP


def test_the_help_has_the_options_below_their_headings() -> None:
    shown = semantic("serve", "--help").out
    headings = [line for line in shown.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings[:2] == ["Address and access:", "Model and memory:"]
    assert headings[-1] == "Options:"
    assert "Arguments:" in semantic("agents", "fork", "--help").out


@pytest.mark.process
def test_a_public_name_is_imported_when_it_is_asked_for() -> None:
    code = (
        "import sys, semantic\n"
        "assert 'semantic.bootstrap' not in sys.modules\n"
        "assert [name for name in semantic.__all__ if name not in dir(semantic)] == []\n"
        "from semantic import *\n"
        "assert [name for name in semantic.__all__ if name not in globals()] == []\n"
        "assert len(ModelCacheSpec.readers) == 1\n"
        "assert semantic.load is semantic.bootstrap.load\n"
        "try: semantic.no_such_name\n"
        "except AttributeError as error: print(error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    assert ran.stdout == "module 'semantic' has no attribute 'no_such_name'\n"
