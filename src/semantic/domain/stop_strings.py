"""Stop strings end the answer that a client sees, in whatever pieces the text arrives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from semantic.domain.value_objects import Thoughts

_LINE: Final = 64
"""The maximum number of characters before a mark in which to look for signs of a mention."""
MENTIONS: Final = re.compile(r"""\S[ \t]+\Z|["'(\[{]\Z""")
"""Matches the text before a mark if the line only mentions the mark."""


def first_mark(marks: Sequence[str], text: str, start: int = 0) -> tuple[int, str | None]:
    """Return the first of `marks` in `text` from `start` on, with its position.

    If `text` has none, return the position from which its end could begin a mark.
    """
    found: tuple[int, str] | None = None
    for mark in marks:
        at = text.find(mark, start, None if found is None else found[0] + len(mark) - 1)
        found = found if at < 0 else (at, mark)
    if found is not None:
        return found
    longest = max(map(len, marks), default=1) - 1
    for size in range(min(longest, len(text) - start), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return len(text) - size, None
    return len(text), None


class StopStrings:
    """Cuts a stream of text at the first stop string outside `thoughts`."""

    def __init__(self, stops: Sequence[str], thoughts: Thoughts | None = None) -> None:
        self._stops = tuple(stops)
        self._begins = () if thoughts is None else (thoughts.start,)
        self._ends = () if thoughts is None else (thoughts.end,)
        self._is_thought = thoughts is not None and thoughts.opened
        self._pending = self._line = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        """True once a stop string has cut the text."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """Add `text` and return the text that can be sent."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        self._pending += text
        emitted = ""
        while True:
            marks = self._ends if self._is_thought else (*self._stops, *self._begins)
            start, mark = self._first(marks)
            if mark in self._stops and not self._is_thought:
                self.matched = mark
                emitted += self._pending[:start]
                self._pending = ""
                return emitted
            at = start + len(mark)
            shown, self._pending = self._pending[:at], self._pending[at:]
            emitted += shown
            before, self._line = self._line + shown[:start], f"{self._line}{shown}"[-_LINE:]
            if not mark:
                return emitted
            if self._is_thought or not (MENTIONS.search(before) or before.endswith("`")):
                self._is_thought = not self._is_thought

    def flush(self) -> str:
        """Return the text that `push` still holds back. Call this at the end of an uncut answer."""
        text, self._pending = self._pending, ""
        return text

    def _first(self, marks: Sequence[str]) -> tuple[int, str]:
        """Return the position of the first complete mark, and the mark. Without such a mark, return
        the number of characters that can be sent, and an empty string."""
        text = self._pending
        found = [(text.find(mark) + len(mark), mark) for mark in marks if mark in text]
        if not found:
            return first_mark(marks, text)[0], ""
        end, mark = min(found, key=lambda one: (one[0], -len(one[1])))
        return end - len(mark), mark
