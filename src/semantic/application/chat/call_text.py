"""The text of a tool call while it is written, and where it ends.

Knows the marks around it; what it says is read by a function that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from semantic.domain.errors import ToolCallError
from semantic.ports.chat import Marks, WrittenCall


@dataclass(frozen=True, slots=True)
class ReadCall:
    """What stood between two marks: calls, or a `problem` with them; and the text behind."""

    text: str
    calls: tuple[WrittenCall, ...] = ()
    problem: str | None = None
    rest: str = ""


class CallText:
    """Gathers one call's text until it can be read.

    The mark that ends a call may stand inside its arguments. So a text that cannot be read goes
    on to the next such mark, unless another call follows: then it was complete and is wrong.
    """

    def __init__(self, marks: Marks, read: Callable[[str], list[WrittenCall]]) -> None:
        self._marks = marks
        self._read = read
        self._text = ""
        self._searched = 0  # no mark that ends it begins before
        self._wrong: ReadCall | None = None  # as read up to the last mark

    def push(self, text: str) -> None:
        self._text += text

    def next(self) -> ReadCall | None:
        """The call, when it is complete; it is gone then."""
        end = self._marks.end
        while end:
            if self._wrong is None:
                at = self._text.find(end, self._searched)
                if at < 0:
                    self._searched = max(self._searched, len(self._text) - len(end) + 1)
                    return None
                self._searched = at + len(end)
                found = self._reading(self._text[:at], self._text[self._searched :])
                if found.problem is None:
                    return self._done(found)
                self._wrong = found
            follows = self._text[self._searched :].lstrip()
            if follows.startswith(self._marks.start):
                return self._done(self._wrong)
            if self._marks.start.startswith(follows):
                return None
            self._wrong = None
        return None

    def finish(self, *, cut: bool, stopped: bool = False) -> ReadCall | None:
        """The call at the answer's end; None when it was `cut` before it was complete.

        One without a mark at its end is complete when it can be read. Of one that cannot, where a
        stop string ended the answer, nobody knows what the model would have written: `stopped`.
        """
        if self._wrong is not None:
            return self._done(self._wrong)
        if cut:
            return None
        found = self._done(self._reading(self._text, ""))
        return None if stopped and found.problem is not None else found

    def _reading(self, text: str, rest: str) -> ReadCall:
        try:
            return ReadCall(text, tuple(self._read(text)), rest=rest)
        except ToolCallError as error:
            return ReadCall(text, problem=str(error))

    def _done(self, found: ReadCall) -> ReadCall:
        self._text, self._searched, self._wrong = "", 0, None
        return found
