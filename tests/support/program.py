"""The commands of `semantic`, built once in a process: typer builds all of them at each call."""

from __future__ import annotations

import functools

from typer.core import TyperGroup
from typer.main import get_command

from semantic.cli.main import app


@functools.cache
def program() -> TyperGroup:
    """The program with all of its commands; a call leaves nothing in them."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return group
