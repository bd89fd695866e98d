"""Reads text from stdin and files, writes text to stdout, and handles Ctrl-C."""

from __future__ import annotations

import io
import os
import select
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from semantic.cli.edge import print_notice
from semantic.domain.errors import InvalidRequestError


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def write(text: str) -> None:
    """Write `text` to stdout without a newline, and flush."""
    typer.echo(text, nl=False)


def escape_unencodable() -> None:
    """Make stdout and stderr escape characters that their encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def read_stdin() -> str:
    """Return all of stdin. Raises InvalidRequestError for bytes that are not UTF-8."""
    return decode(sys.stdin.buffer.read(), "stdin")


def piped_text(seconds: float | None = None) -> str | None:
    """Return all of stdin, or None unless it is a pipe or a file. Raises as `read_stdin` does.

    A program may start this one with a pipe that it never writes to. If a pipe is open and empty
    for `seconds`, print a notice and return None; without `seconds`, wait for the pipe's end.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode if sys.stdin else 0
    except OSError:  # closed
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return None
    if seconds is not None and not select.select([sys.stdin], [], [], seconds)[0]:
        print_notice(
            f"stdin was silent for {seconds:.0f} s, so only PROMPT counts; without PROMPT, a run "
            "waits for a slow writer"
        )
        return None
    return read_stdin()


def stdin_lines() -> Iterator[str]:
    """Yield the lines of stdin as they arrive. Raises the same errors as `read_stdin`."""
    for line in sys.stdin.buffer:
        yield decode(line, "stdin").rstrip("\r\n")


def read_file(path: Path) -> str:
    """Return the text of a file. Raises InvalidRequestError unless it is readable UTF-8."""
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from error


def decode(data: bytes, source: str) -> str:
    """Decode UTF-8 without a byte order mark. Raises InvalidRequestError, which names `source`."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{source} is not UTF-8 text: byte {error.object[error.start]:#x} at {error.start}"
        ) from error


def require_text(prompt: str) -> str:
    """Return `prompt`. Raises InvalidRequestError for an empty text or half a surrogate pair."""
    if not prompt:
        raise InvalidRequestError("the prompt is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the prompt is not UTF-8 text") from error
    return prompt


@contextmanager
def on_signals(action: Callable[[int], object], *signals: int) -> Iterator[None]:
    """Call `action` for each of `signals`; a KeyboardInterrupt could interrupt an engine's step."""
    before = {one: signal.signal(one, lambda number, _: action(number)) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
