"""Progress bars on stderr, if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Self

from semantic.bootstrap import App, build_engine
from semantic.cli.edge import print_notice
from semantic.composition.engine_settings import Settings
from semantic.domain.errors import StoreError
from semantic.domain.stored import OnProgress
from semantic.domain.value_objects import PrefillEvent, TokenEvent
from semantic.ports.generation import EngineEvent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID

_WIDE, _NARROW = 100, 50
"""Widths of a terminal. From the first on, bars are complete. Below the second, they omit rates."""
_BAR, _SHORT_BAR = 40, 12
_NAME_CHARACTERS = 40
"""The maximum number of characters of an agent's name before its bar."""


class ProgressBar:
    """The progress bar of a command. Hidden unless stderr is a terminal."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._done: dict[str, int] = {}
        self._total: dict[str, int] = {}
        self._generated = 0

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._progress = _new_progress(_token_speed)
            self._progress.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.hide()

    def load(self, settings: Settings) -> App:
        """Build an engine while a bar shows the progress. If the disk tier fails, print a notice
        and continue without the tier."""
        self.show(f"loading {settings.label}")
        app = build_engine(settings, print_store_unavailable)
        self.show("ready")
        return app

    def show(self, words: str) -> None:
        """Show `words` for work whose size is unknown."""
        self._show(_plain(words), 0, None)

    def expect(self, uid: str, prompt_tokens: int) -> None:
        """Add a request's prompt tokens to the total. Prefill omits the last token."""
        self._total[uid] = prompt_tokens - 1

    def update(self, event: EngineEvent) -> None:
        """Advance the bar for an event of the engine."""
        if self._progress is None:
            return
        if isinstance(event, PrefillEvent):
            self.prefill(event.uid, event.done, event.total)
        elif isinstance(event, TokenEvent):
            self._generated += 1
            self._show_prefill()

    def prefill(self, uid: str, done: int, total: int) -> None:
        """Show that prefill has computed `done` of `total` tokens."""
        self._done[uid], self._total[uid] = done, total
        self._show_prefill()

    def _show_prefill(self) -> None:
        words = f"prefill, {self._generated} tokens generated"
        self._show(words, sum(self._done.values()), sum(self._total.values()))

    def advance(self, words: str, done: int, total: int) -> None:
        """Show that `done` of `total` units of work are finished."""
        self._show(_plain(words), done, total)

    def hide_from_stdout(self) -> None:
        """Remove the bar before answers appear on its terminal."""
        if sys.stdout.isatty():
            self.hide()

    def hide(self) -> None:
        """Remove the bar for good."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show(self, words: str, done: int, total: int | None) -> None:
        if self._progress is None:
            return
        if self._task is None:
            self._task = self._progress.add_task(words, total=total)
        self._progress.update(self._task, description=words, completed=done, total=total)


class ServerProgress:
    """Shows a bar for each prompt in prefill."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._agents: dict[str, str] = {}
        self._bars: dict[str, TaskID] = {}

    def accepted(self, uid: str, agent: str, prompt_tokens: int) -> None:
        del prompt_tokens
        self._agents[uid] = agent

    def prefilled(self, uid: str, done: int, total: int) -> None:
        if uid not in self._bars:
            if not self._bars:
                self._progress.start()
            name = self._agents.get(uid, "")
            # The bar begins after cached tokens, because they have no speed.
            words = f"prefill {_plain(name[:_NAME_CHARACTERS])}"
            self._bars[uid] = self._progress.add_task(words, total=total, completed=done)
        self._progress.update(self._bars[uid], completed=done, total=total)

    def first_token(self, uid: str) -> None:
        self._remove(uid)

    def finished(self, uid: str | None, record: object) -> None:
        del record
        self._agents.pop(uid or "", None)
        self._remove(uid or "")

    def _remove(self, uid: str) -> None:
        if uid in self._bars:
            self._progress.remove_task(self._bars.pop(uid))
            if not self._bars:
                self._progress.stop()


def server_progress() -> ServerProgress | None:
    """Return a server's progress bars, or None if stderr is not a terminal."""
    return ServerProgress(_new_progress(_token_speed)) if sys.stderr.isatty() else None


@contextmanager
def work_bar(words: str) -> Iterator[OnProgress]:
    """Show a bar with `words`, and yield the function that advances it."""
    with ProgressBar() as progress:
        progress.show(words)
        yield partial(progress.advance, words)


@contextmanager
def download_bar(name: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar for `n_bytes` with speed and remaining time. Yields a function that advances the
    bar. Any thread may call the function."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    progress = _new_progress(lambda: DownloadColumn(binary_units=True), TransferSpeedColumn)
    task = progress.add_task(_plain(name[:_NAME_CHARACTERS]), total=n_bytes)
    with progress if sys.stderr.isatty() else nullcontext():
        yield partial(progress.advance, task)


def print_store_unavailable(error: StoreError) -> None:
    """Print why caches stay in memory only."""
    print_notice(f"the disk store is off: {error}; caches stay in memory only")


def _new_progress(*more: Callable[[], ProgressColumn], console: Console | None = None) -> Progress:
    """Return bars on stderr that vanish when they end. A narrow terminal cuts columns."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    console = Console(stderr=True) if console is None else console
    wide = console.width >= _WIDE
    words = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    rest = [*(make() for make in more), TimeRemainingColumn(compact=True)]
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", table_column=words),
        BarColumn(_BAR if wide else _SHORT_BAR),
        TaskProgressColumn(),
        *(rest if console.width >= _NARROW else ()),
        console=console,
        transient=True,
        expand=not wide,
    )


def _token_speed() -> ProgressColumn:
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class TokenSpeed(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            words = "" if speed is None else f"{speed:,.0f} tok/s"
            return Text(words, style="progress.data.speed", no_wrap=True)

    return TokenSpeed()


def _plain(words: str) -> str:
    """Return `words` without control characters and square brackets."""
    return "".join(c for c in words if c.isprintable()).replace("[", "(")
