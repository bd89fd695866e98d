"""How far loading and prefill are: on stderr, and only when a person looks at it."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from semantic.bootstrap import App, Settings, build_engine
from semantic.cli.edge import print_notice
from semantic.domain.errors import StoreError
from semantic.domain.value_objects import PrefillEvent, TokenEvent
from semantic.ports.inbound import EngineEvent

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressBar:
    """A bar that disappears when it is no longer needed. Without a terminal it does nothing."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._done: dict[str, int] = {}
        self._total: dict[str, int] = {}
        self._generated = 0

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._progress = new_progress()
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.hide()

    def load(self, settings: Settings) -> App:
        """`build_engine`, with a bar, and without a disk when that cannot be used.

        Raises as it does otherwise.
        """
        self._show(f"loading {settings.model}", 0, None)
        app = build_engine(settings, say_that_the_disk_is_off)
        self._show("ready", 0, None)
        return app

    def expect(self, uid: str, prompt_tokens: int) -> None:
        """A request is coming; all but its last token are prefilled."""
        self._total[uid] = prompt_tokens - 1

    def note(self, event: EngineEvent) -> None:
        """Show what an event of the engine says about the way so far."""
        if self._progress is None:
            return
        if isinstance(event, PrefillEvent):
            self._done[event.uid] = event.done
            self._total[event.uid] = event.total
        elif isinstance(event, TokenEvent):
            self._generated += 1
        words = f"prefill, {self._generated} tokens generated"
        self._show(words, sum(self._done.values()), sum(self._total.values()))

    def make_way(self) -> None:
        """Answers are about to be written: a bar on the same terminal would be in their way."""
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


def say_that_the_disk_is_off(error: StoreError) -> None:
    """What goes on without a disk, and why."""
    print_notice(f"the disk store is off: {error}; caches are kept in memory only")


def new_progress() -> Progress:
    """Bars on stderr that leave nothing behind."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        console=Console(stderr=True),
        transient=True,
    )
