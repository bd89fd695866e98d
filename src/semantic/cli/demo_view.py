"""Shows the agents of the demonstration while they answer.

On a terminal a table that changes in place, else a line when an agent's state changes. Knows
what is shown, not where it comes from.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self

import typer

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

State = Literal[
    "not here yet",
    "waiting",
    "prefill",
    "decode",
    "idle in the pool",
    "resumed",
    "cold run",
    "done",
]

_TAIL = 240
"""Characters of an answer that a table shows: its end is where something happens."""


@dataclass(slots=True)
class Row:
    """What is known of one agent now."""

    agent: str
    state: State = "not here yet"
    prompt_tokens: int = 0
    blocks: int = 0
    tokens: int = 0
    text: str = ""


class View(Protocol):
    """Shows rows, as a context in which they change."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def update(self, rows: Sequence[Row]) -> None:
        """The rows have changed."""
        ...


def choose_view(*, quiet: bool) -> View:
    """The view for this stdout."""
    if quiet:
        return NoView()
    return TableView() if sys.stdout.isatty() else LineView()


class NoView:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def update(self, rows: Sequence[Row]) -> None:
        """See `View.update`."""


class LineView(NoView):
    """A line whenever an agent's state changes, and what it answered at the end of an answer."""

    def __init__(self) -> None:
        self._shown: dict[str, State] = {}

    def update(self, rows: Sequence[Row]) -> None:
        """See `View.update`."""
        for row in rows:
            if row.state != self._shown.get(row.agent, "not here yet"):
                self._shown[row.agent] = row.state
                typer.echo(f"{row.agent}: {_line(row)}")


def _line(row: Row) -> str:
    match row.state:
        case "idle in the pool":
            return f"idle, {row.blocks} blocks stay in the pool; answered: {row.text}"
        case "done":
            return f"answered: {row.text}"
        case _:
            return f"{row.state}, {row.prompt_tokens} prompt tokens"


class TableView:
    """A table that is drawn again as it changes."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live: Live = Live(refresh_per_second=12)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def update(self, rows: Sequence[Row]) -> None:
        """See `View.update`."""
        self._live.update(_table(rows))


def _table(rows: Sequence[Row]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True)
    for header, justify in (("agent", "left"), ("state", "left"), ("prompt", "right")):
        table.add_column(header, justify="right" if justify == "right" else "left", no_wrap=True)
    table.add_column("blocks", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("answer", ratio=1)
    for row in rows:
        cells = (row.agent, row.state, row.prompt_tokens, row.blocks, row.tokens)
        tail = row.text if len(row.text) <= _TAIL else f"…{row.text[-_TAIL:]}"
        table.add_row(*(str(cell) for cell in cells), Text(tail))
    return table
