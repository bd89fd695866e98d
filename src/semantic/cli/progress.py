"""Progress of loading, prefill and downloads as bars on stderr, on a terminal only.

Knows the engine's events and the server's observer; not what is loaded or answered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from semantic.bootstrap import App, Settings, build_engine
from semantic.cli.edge import print_notice
from semantic.domain.errors import StoreError
from semantic.domain.value_objects import PrefillEvent, TokenEvent
from semantic.ports.inbound import EngineEvent

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

    from semantic.adapters.http.metrics import AnswerRecord

_NAME_CHARACTERS = 40
"""Characters of an agent's name in front of its bar."""


class ProgressBar:
    """One bar for a whole command, removed afterwards. Hidden unless stderr is a terminal."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._done: dict[str, int] = {}
        self._total: dict[str, int] = {}
        self._generated = 0

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._progress = _new_progress()
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
        """`build_engine` with a bar; without the disk tier, and a notice, if that is unusable.

        Raises what `build_engine` raises otherwise.
        """
        self.show(f"loading {settings.model}")
        app = build_engine(settings, print_store_unavailable)
        self.show("ready")
        return app

    def show(self, words: str) -> None:
        """What is being done, of a size that is not known."""
        self._show(_plain(words), 0, None)

    def expect(self, uid: str, prompt_tokens: int) -> None:
        """Add a request to the total: all tokens of its prompt but the last are prefilled."""
        self._total[uid] = prompt_tokens - 1

    def update(self, event: EngineEvent) -> None:
        """Advance by an event of the engine."""
        if self._progress is None:
            return
        if isinstance(event, PrefillEvent):
            self.prefill(event.uid, event.done, event.total)
        elif isinstance(event, TokenEvent):
            self._generated += 1
            self._show_prefill()

    def prefill(self, uid: str, done: int, total: int) -> None:
        """`done` of `total` tokens of a request's prompt are computed."""
        self._done[uid], self._total[uid] = done, total
        self._show_prefill()

    def _show_prefill(self) -> None:
        words = f"prefill, {self._generated} tokens generated"
        self._show(words, sum(self._done.values()), sum(self._total.values()))

    def hide_from_stdout(self) -> None:
        """Remove the bar if answers are about to be written to the same terminal."""
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
    """Implements the server's `Observer`: a bar for each prompt in prefill."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._agents: dict[str, str] = {}
        self._bars: dict[str, TaskID] = {}

    def accepted(self, uid: str, agent: str, prompt_tokens: int) -> None:
        """See `Observer.accepted`."""
        del prompt_tokens
        self._agents[uid] = agent

    def prefilled(self, uid: str, done: int, total: int) -> None:
        """See `Observer.prefilled`."""
        if uid not in self._bars:
            if not self._bars:
                self._progress.start()
            name = self._agents.get(uid, "")
            self._bars[uid] = self._progress.add_task(f"prefill {_plain(name)}", total=total)
        self._progress.update(self._bars[uid], completed=done, total=total)

    def first_token(self, uid: str) -> None:
        """See `Observer.first_token`."""
        self._remove(uid)

    def finished(self, uid: str | None, record: AnswerRecord) -> None:
        """See `Observer.finished`."""
        del record
        self._agents.pop(uid or "", None)
        self._remove(uid or "")

    def _remove(self, uid: str) -> None:
        if uid in self._bars:
            self._progress.remove_task(self._bars.pop(uid))
            if not self._bars:
                self._progress.stop()


def server_progress() -> ServerProgress | None:
    """A server's bars; None unless stderr is a terminal."""
    return ServerProgress(_new_progress()) if sys.stderr.isatty() else None


@contextmanager
def download_bar(name: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar of `n_bytes` with speed and time left; yields what advances it, from any thread."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    more = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    progress = _new_progress(*more)
    task = progress.add_task(_plain(name), total=n_bytes)
    with progress if sys.stderr.isatty() else nullcontext():
        yield partial(progress.advance, task)


def print_store_unavailable(error: StoreError) -> None:
    """A notice that caches are kept in memory only, and why."""
    print_notice(f"the disk store is off: {error}; caches are kept in memory only")


def _new_progress(*more: ProgressColumn) -> Progress:
    """Bars on stderr that are erased when they stop, with `more` columns behind them."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        *more,
        console=Console(stderr=True),
        transient=True,
    )


def _plain(name: str) -> str:
    """A client's text without control characters and rich's markup."""
    return "".join(c for c in name[:_NAME_CHARACTERS] if c.isprintable()).replace("[", "(")
