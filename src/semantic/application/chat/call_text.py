"""CallText: collects the text of a tool call until it is complete.

Knows the marks around a call; its content is parsed by a given function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from semantic.domain.errors import ToolCallError
from semantic.ports.chat import Marks, WrittenCall


@dataclass(frozen=True, slots=True)
class ReadCall:
    """The text between two marks: its calls or a `problem`, and the text after it in `rest`.

    `closed`: the end mark was there.
    """

    text: str
    calls: tuple[WrittenCall, ...] = ()
    problem: str | None = None
    rest: str = ""
    closed: bool = True


class CallText:
    """Collects one call's text until it can be parsed.

    The end mark may occur inside the arguments. So text that cannot be parsed continues to the
    next end mark, unless another call follows: then it was complete and is invalid.
    """

    def __init__(self, marks: Marks, read: Callable[[str], list[WrittenCall]]) -> None:
        self._marks = marks
        self._read = read
        self._text = ""
        self._searched = 0  # no end mark begins before this position
        self._wrong: ReadCall | None = None  # the parse up to the last end mark

    def push(self, text: str) -> None:
        self._text += text

    def next(self) -> ReadCall | None:
        """Remove and return the call if it is complete."""
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
        """The call at the answer's end; None if it was `cut` off before it was complete.

        A call without an end mark is complete if it can be parsed. One that cannot be, in an
        answer that a stop string ended (`stopped`), is dropped: it may have been unfinished.
        """
        if self._wrong is not None:
            return self._done(self._wrong)
        if cut:
            return None
        found = self._done(replace(self._reading(self._text, ""), closed=False))
        return None if stopped and found.problem is not None else found

    def _reading(self, text: str, rest: str) -> ReadCall:
        try:
            return ReadCall(text, tuple(self._read(text)), rest=rest)
        except ToolCallError as error:
            return ReadCall(text, problem=str(error))

    def _done(self, found: ReadCall) -> ReadCall:
        if found is self._wrong:
            found = replace(found, rest=self._text[self._searched :])
        self._text, self._searched, self._wrong = "", 0, None
        return found
