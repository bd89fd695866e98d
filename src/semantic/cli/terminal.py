"""Terminal and pipe: who is watching, text that comes in, Ctrl-C. Knows nothing of models."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from semantic.domain.errors import InvalidRequestError


def is_interactive() -> bool:
    """Whether a person types and reads here."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def write(text: str) -> None:
    """`text` on stdout, at once and nothing more."""
    typer.echo(text, nl=False)


def print_any_character() -> None:
    """Characters that the output's encoding lacks are escaped, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def read_stdin() -> str:
    """All of stdin. Raises InvalidRequestError when it is no UTF-8."""
    return decode(sys.stdin.buffer.read(), "stdin")


def stdin_lines() -> Iterator[str]:
    """Lines of stdin as they come, without their ends. Raises as `read_stdin`."""
    for line in sys.stdin.buffer:
        yield decode(line, "stdin").rstrip("\r\n")


def read_file(path: Path) -> str:
    """The text of a file. Raises InvalidRequestError when it cannot be read or is no UTF-8."""
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from error


def decode(data: bytes, source: str) -> str:
    """UTF-8 text; a byte order mark is dropped."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{source} is no UTF-8 text: byte {error.object[error.start]:#x} at {error.start}"
        ) from error


@contextmanager
def on_interrupt(action: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `action` instead of ending the program.

    A step of the engine must not be torn apart, so no exception is raised in it.
    """
    previous = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
