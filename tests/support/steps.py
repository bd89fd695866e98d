"""Counts what a call does: lines of our own code, and steps of SQLite's machine. No clock."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import TraceFunction


class Steps:
    """Lines of `semantic` that the thread executed; a comprehension counts once per item."""

    def __init__(self) -> None:
        self.n = 0

    def _line(self, _frame: FrameType, event: str, _value: object) -> TraceFunction:
        self.n += event == "line"
        return self._line

    def _call(self, frame: FrameType, _event: str, _value: object) -> TraceFunction | None:
        ours = str(frame.f_globals.get("__name__", "")).startswith("semantic.")
        return self._line if ours else None

    @contextmanager
    def counting(self, *databases: sqlite3.Connection) -> Iterator[None]:
        """Count until the end of the block, also the steps of `databases`."""

        def step() -> int:
            self.n += 1
            return 0

        before = sys.gettrace()
        for db in databases:
            db.set_progress_handler(step, 1)
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
            for db in databases:
                db.set_progress_handler(None, 1)


def steps_of(action: Callable[[], object], *databases: sqlite3.Connection) -> int:
    """How many steps `action` takes."""
    steps = Steps()
    with steps.counting(*databases):
        action()
    return steps.n
