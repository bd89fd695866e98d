"""`semantic top`: shows a running server's figures in a terminal, updated every second."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from textwrap import wrap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, cast

import typer

from semantic.cli.options import (
    DEFAULT_KEY_VARIABLE,
    DEFAULT_SERVER,
    AsJson,
    KeyVariable,
    ServerUrl,
)
from semantic.cli.report import fitted, show_bytes, show_name, show_seconds, terminal_width, to_line
from semantic.domain.errors import OperatorError
from semantic_server.cli.running import unloaded_when

if TYPE_CHECKING:
    from rich.console import Console

    from semantic_server.clients.server_connection import Document
    from semantic_server.http.overview import (
        Changes,
        LiveRow,
        ModelRow,
        Overview,
        Saved,
        TimelineSpan,
    )

_RETRY_SECONDS = 2.0
_ENDED = 8
"""The maximum number of finished requests on the screen."""
_BAR = 24
_TIERS = {"process": "process", "pool": "pool", "memory": "RAM tier", "disk": "disk"}


@dataclass(frozen=True, slots=True)
class TopOptions:
    url: ServerUrl = DEFAULT_SERVER
    key_variable: KeyVariable = DEFAULT_KEY_VARIABLE
    once: Annotated[
        bool, typer.Option("--once", help="Print the overview once. Default without a terminal.")
    ] = False


def top(options: TopOptions, as_json: AsJson = False) -> None:
    """Show what a running server saves, holds and does, each second until q or Ctrl-C.

    A tenant's key shows that tenant's requests; the budgets need an operator's key.
    """
    from semantic_server.clients.server_connection import follow_overview, read_overview

    if as_json or options.once or not sys.stdout.isatty():
        document = read_overview(options.url, options.key_variable)
        view = View()
        view.apply("overview", document)
        lines = view.lines(terminal_width())
        typer.echo(to_line(dict(document)) if as_json else "\n".join(lines))
        return
    from rich.console import Console

    with suppress(KeyboardInterrupt), _interrupted_by_q():
        watch(lambda: follow_overview(options.url, options.key_variable), Console())


@contextmanager
def _interrupted_by_q() -> Iterator[None]:
    """Make the key q the same as Ctrl-C within the `with` block, if stdin is a terminal."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield
        return
    terminal, main = sys.stdin.fileno(), threading.get_ident()

    def read() -> None:
        while (key := os.read(terminal, 1)) and key != b"q":
            pass
        signal.pthread_kill(main, signal.SIGINT)

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    threading.Thread(target=read, daemon=True).start()
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def watch(
    follow: Callable[[], Iterator[tuple[str, Document]]],
    console: Console,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show events from `follow`, and call it again when they end. Raises OperatorError if
    the first call fails."""
    from rich.live import Live
    from rich.text import Text

    view = View()
    events = follow()
    first = next(events, None)
    if first is None:
        raise OperatorError("the server ended the stream before its first event")
    view.apply(*first)
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def show(*notes: str) -> None:
            lines = [*notes, *view.lines(console.width)][: max(1, console.height - 1)]
            live.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)

        while True:
            show()
            try:
                for name, document in events:
                    view.apply(name, document)
                    show()
                note = "the server ended the stream"
            except OperatorError as error:
                note = str(error)
            show(f"{note}; next attempt in {_RETRY_SECONDS:.0f} s", "")
            sleep(_RETRY_SECONDS)
            events = follow()


class View:
    """The figures on the screen."""

    def __init__(self) -> None:
        self._overview: Overview | None = None
        self._changes: Changes | None = None
        self._tiers: dict[str, tuple[int, int]] = {}
        self._counts = ""
        self._ended: dict[tuple[str, float], TimelineSpan] = {}

    def apply(self, name: str, document: Document) -> None:
        """Apply one event to the figures. Raises OperatorError for a malformed overview."""
        found = _with_attributes(document)
        try:
            if name == "overview":
                self._overview = cast("Overview", found)
                self._ended.clear()
                self._take(self._overview.changes)
                deque(self.lines(None), maxlen=0)
            elif name == "changes":
                self._take(cast("Changes", found))
        except (AttributeError, LookupError, TypeError, ValueError):
            message = "expected an overview of this version, got one with other fields"
            raise OperatorError(message) from None

    def lines(self, width: int | None) -> Iterator[str]:
        """Yield the figures in lines of at most `width` cells, if it is not None."""
        overview, changes = self._overview, self._changes
        if overview is None or changes is None:
            return
        model = "a model that loads" if overview.model is None else overview.model
        head = f"{show_name(model)}, version {overview.version}, {changes.state}"
        for line in (head, sentence(changes.saved.today)):
            yield from [line] if width is None else wrap(line, width)
        yield ""
        if self._tiers:
            yield from fitted([_budget(name, *self._tiers[name]) for name in self._tiers], width)
            yield self._counts
            yield ""
        if changes.models is not None:
            yield from fitted([_MODELS_HEAD, *map(_model, changes.models)], width)
            yield ""
        yield from _requests(changes, width)
        ended = sorted(self._ended.values(), key=lambda one: one.end or 0.0, reverse=True)
        if ended:
            yield ""
            yield from fitted([_ENDED_HEAD, *map(_ended, ended)], width)

    def _take(self, changes: Changes) -> None:
        self._changes = changes
        for sample in (changes.samples or ())[-1:]:
            tiers = vars(sample.tiers)
            self._tiers = {name: tiers[name] for name in _TIERS if name in tiers}
            counts = f"{sample.running} running, {sample.waiting} waiting, "
            self._counts = f"{counts}{sample.preemptions} preempted since the start"
        for span in changes.spans:
            if span.end is not None:
                self._ended[span.id, span.phases[0][1]] = span
        newest = sorted(self._ended.items(), key=lambda one: one[1].end or 0.0)[-_ENDED:]
        self._ended = dict(newest)


def _with_attributes(document: Document) -> object:
    """Return a document whose objects have attributes. They stand for the models of the server's
    overview, whose import takes half a second."""
    return json.loads(json.dumps(document), object_hook=lambda one: SimpleNamespace(**one))


def sentence(saved: Saved) -> str:
    """Return a sentence about the saved prefill, such as "14 min of prefill saved today"."""
    if not saved.prompt_tokens:
        return "No prompt today."
    share = 100 * saved.cached_tokens // saved.prompt_tokens
    return (
        f"{show_duration(saved.seconds)} of prefill saved today; the cache had {share} % of "
        f"{saved.prompt_tokens:,} prompt tokens."
    )


def show_duration(seconds: float) -> str:
    """Return a duration as text, such as 12.0 s, 14 min or 2 h 14 min."""
    if seconds < 60:  # noqa: PLR2004 - seconds of a minute
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _budget(name: str, used: int, most: int) -> tuple[str, ...]:
    share = min(1.0, used / most) if most else 0.0
    filled = round(share * _BAR)
    bar = "#" * filled + "." * (_BAR - filled)
    return _TIERS[name], f"{show_bytes(used)} of {show_bytes(most)}, {share:.0%}", bar


_MODELS_HEAD = (
    *("model", "state", "memory", "weights", "pool", "agents"),
    *("running", "waiting", "tok/s", "unloaded"),
)


def _model(row: ModelRow) -> tuple[str, ...]:
    return (
        show_name(row.id),
        row.state if row.idle_for is None else f"idle for {show_duration(row.idle_for)}",
        show_bytes(row.memory_bytes),
        "" if row.weights_bytes is None else show_bytes(row.weights_bytes),
        "" if row.pool is None else f"{row.pool[0] / max(1, row.pool[1]):.0%}",
        *("" if one is None else str(one) for one in (row.agents, row.running, row.waiting)),
        f"{row.tokens_per_second:.0f}" if row.tokens_per_second else "",
        unloaded_when(row.pinned, row.expires_in),
    )


def _requests(changes: Changes, width: int | None) -> Iterator[str]:
    if not changes.requests:
        yield "Nothing runs or waits."
        return
    head = ("agent", "state", "prompt", "cached", "answer", "for", "preempted")
    rows = [head, *map(_request, changes.requests)]
    if changes.models is not None:
        of = ("model", *(show_name(one.model) for one in changes.requests))
        rows = [(*row, model) for row, model in zip(rows, of, strict=True)]
    yield from fitted(rows, width)
    if changes.more_requests:
        yield f"and {changes.more_requests} more"


def _request(row: LiveRow) -> tuple[str, ...]:
    return (
        show_name(row.agent),
        _state(row),
        f"{row.prompt_tokens:,}",
        f"{row.cached_tokens:,}",
        f"{row.generated_tokens:,}",
        show_duration(row.seconds),
        str(row.preemptions or ""),
    )


def _state(row: LiveRow) -> str:
    if row.state == "prefill":
        return f"prefill {100 * row.read_tokens // row.prompt_tokens} %"
    if row.state == "queued":
        return "preempted, waiting" if row.preemptions else "queued"
    return "decoding" if row.tokens_per_second is None else f"{row.tokens_per_second:.0f} tok/s"


_ENDED_HEAD = ("ended", "because of", "cached", "answer", "first token after", "took")


def _ended(span: TimelineSpan) -> tuple[str, ...]:
    begun = span.phases[0][1]
    first = next((at - begun for phase, at in span.phases if phase == "decoding"), None)
    return (
        show_name(span.agent),
        span.finish or "",
        f"{span.cached_tokens:,} of {span.prompt_tokens:,}",
        f"{span.generated_tokens:,}",
        show_seconds(first),
        show_seconds((span.end or begun) - begun),
    )
