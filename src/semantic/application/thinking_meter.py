"""ThinkingMeter: counts the reasoning of an answer, and says where its end must follow.

Knows the texts of marks and the tokens of one; not how an answer is generated.
"""

from __future__ import annotations

from collections import deque

from semantic.domain.value_objects import ThinkingBudget


class ThinkingMeter:
    """Counts the reasoning of one answer, token by token; tokens that complete a mark are none."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._inside = budget.opened
        self._used = 0
        self._text = ""  # the end of what was written: the beginning of a mark
        self._last: deque[int] = deque(maxlen=len(budget.end_tokens))
        self._forced = 0  # tokens of the mark that are still to come

    def push(self, token: int, text: str) -> tuple[int, ...]:
        """Count the next token, with the text that is final with it.

        Returns the tokens that must follow: none, or what is left of the end mark. Those are
        pushed, too.
        """
        was_inside = self._inside
        self._last.append(token)
        self._read(text)
        if self._forced:
            self._forced -= 1
            self._inside = self._forced > 0
            return ()
        if tuple(self._last) == self._budget.end_tokens:
            self._inside = False
        self._used += was_inside and self._inside
        if not self._inside or self._used < self._budget.tokens:
            return ()
        rest = self._rest()
        self._forced = len(rest)
        return rest

    def _read(self, text: str) -> None:
        """Enter and leave reasoning at the marks in `text`."""
        self._text += text
        while True:
            mark = self._budget.end if self._inside else self._budget.start
            before, found, after = self._text.partition(mark)
            if not found:
                self._text = before[max(0, len(before) - len(mark) + 1) :]
                return
            self._text, self._inside = after, not self._inside

    def _rest(self) -> tuple[int, ...]:
        """The tokens of the end mark after those that are already written."""
        end, last = self._budget.end_tokens, tuple(self._last)
        for n_written in range(min(len(last), len(end) - 1), 0, -1):
            if last[-n_written:] == end[:n_written]:
                return end[n_written:]
        return end
