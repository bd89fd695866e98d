"""Runs work that must not end whoever asked for it, whatever it raises.

The one place outside the command line where everything is caught: an engine that is broken, a
listener that is broken, both are somebody else's bug, and the thread that serves all goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """What was raised instead of a result."""

    error: Exception

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"

    def drop_frames(self) -> None:
        """Let go of all that the functions held through which it was raised."""
        error: BaseException | None = self.error
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__


def attempt(work: Callable[[], T]) -> T | Failure:
    """What `work` returns, or the failure that it ended with."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001  handed on as a value, never swallowed
        return Failure(error)
