"""Help as plain text, its options below their headings.

typer's own, drawn with rich, imports rich's markdown, syntax and traceback modules: longer than all
of this program. Knows typer's commands; none of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup

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
