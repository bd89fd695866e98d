"""Writes an answer to stdout as it streams, plain or as Markdown."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final, Protocol, Self

from semantic.cli.terminal import write

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_FENCE: Final = re.compile(r" {0,3}(```|~~~)")


class AnswerWriter(Protocol):
    """Writes one answer. The end of the `with` block restores the terminal."""

    def __enter__(self) -> object: ...

    def __exit__(self, *failure: object) -> None: ...

    def thought(self, text: str) -> None:
        """Write more of the reasoning before the answer."""

    def text(self, text: str) -> None:
        """Write more of the answer."""

    def end(self, mark: str) -> None:
        """End the answer, then write `mark`."""


class PlainWriter:
    """Writes the text of an answer unchanged."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None: ...

    def thought(self, text: str) -> None:
        """See `AnswerWriter.thought`."""

    def text(self, text: str) -> None:
        write(text)

    def end(self, mark: str) -> None:
        write(f"{mark}\n")


class MarkdownWriter:
    """Renders each complete Markdown block. Shows an incomplete block as plain text. Escapes
    control characters."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._open = ""
        self._thoughts = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._hide()

    def thought(self, text: str) -> None:
        self._thoughts += _harmless(text)
        self._show(self._thoughts, "dim")

    def text(self, text: str) -> None:
        self._end_thoughts()
        self._open += _harmless(text)
        whole, self._open = complete_blocks(self._open)
        if whole:
            self._print(whole)
        self._show(self._open, "")

    def end(self, mark: str) -> None:
        self._end_thoughts()
        self._print(self._open)
        self._open = ""
        if mark:
            self._console.print(mark.strip(), markup=False, highlight=False)

    def _end_thoughts(self) -> None:
        if self._thoughts:
            self._hide()
            self._console.print(self._thoughts, style="dim", markup=False, highlight=False)
            self._thoughts = ""

    def _print(self, text: str) -> None:
        from rich.markdown import Markdown

        self._hide()
        if text.strip():
            self._console.print(Markdown(text, hyperlinks=False))

    def _show(self, text: str, style: str) -> None:
        from rich.live import Live
        from rich.text import Text

        if not text:
            return
        if self._live is None:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        room = max(1, self._console.height // 2)
        lines = Text(text, style=style).wrap(self._console, self._console.width)[-room:]
        self._live.update(Text("\n").join(lines), refresh=True)

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def complete_blocks(text: str) -> tuple[str, str]:
    """Split `text` into its complete Markdown blocks and the remaining text."""
    fence, end, start = "", 0, 0
    for line in text.splitlines(keepends=True):
        start += len(line)
        found = _FENCE.match(line)
        if found is not None and fence in ("", found[1]):
            fence = "" if fence else found[1]
        elif not line.strip() and line.endswith("\n") and not fence:
            end = start
    return text[:end], text[end:]


def answer_writer() -> AnswerWriter:
    """Return the writer for stdout. It writes Markdown to a terminal, and else plain text."""
    if not sys.stdout.isatty():
        return PlainWriter()
    from rich.console import Console

    console = Console()
    return PlainWriter() if console.is_dumb_terminal else MarkdownWriter(console)


def _harmless(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
