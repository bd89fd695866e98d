"""ThinkingMeter: counts the reasoning of an answer, and says where its end must follow.

Knows the texts of marks and the tokens of one; not how an answer is generated.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from semantic.domain.value_objects import ThinkingBudget

_Part = Literal["text", "thought", "call"]


class ThinkingMeter:
    """Counts the reasoning of one answer, token by token; tokens that complete a mark are none.

    A call ends reasoning, and marks of reasoning within it are text.
    """

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._part: _Part = "thought" if budget.opened else "text"
        # The marks that end each part, and the part that each begins.
        self._ends: dict[_Part, dict[str, _Part]] = {
            "text": _marks({budget.start: "thought", budget.call_start: "call"}),
            "thought": _marks({budget.end: "text", budget.call_start: "call"}),
            "call": _marks({budget.call_end: "text"}),
        }
        self._used = 0
        self._text = ""  # the end of what was written: the beginning of a mark
        self._last: deque[int] = deque(maxlen=len(budget.end_tokens))
        self._forced = 0  # tokens of the mark that are still to come
        self._lead = ""  # what was written before any reasoning
        self._is_over = False  # no reasoning can follow

    def push(self, token: int, text: str) -> tuple[int, ...]:
        """Count the next token, with the text that is final with it.

        Returns the tokens that must follow: none, or what is left of the end mark. Those are
        pushed, too.
        """
        if self._is_over:
            return ()
        was_inside = self._inside
        self._last.append(token)
        self._read(text)
        if self._forced:
            self._forced -= 1
            self._part = "thought" if self._forced else "text"
        elif self._inside and tuple(self._last) == self._budget.end_tokens:
            self._part = "text"
        self._is_over = self._budget.only_first and self._has_passed(text, was_inside=was_inside)
        if self._forced or self._is_over:
            return ()
        self._used += was_inside and self._inside
        if not self._inside or self._used < self._budget.tokens:
            return ()
        rest = self._rest()
        self._forced = len(rest)
        return rest

    @property
    def _inside(self) -> bool:
        return self._part == "thought"

    def _has_passed(self, text: str, *, was_inside: bool) -> bool:
        """Whether the answer's reasoning has ended, or the answer has begun without any."""
        if self._inside:
            return False
        self._lead = (self._lead + text).lstrip()
        return was_inside or not self._budget.start.startswith(self._lead)

    def _read(self, text: str) -> None:
        """Go from part to part at the marks in `text`."""
        self._text += text
        while True:
            ends = self._ends[self._part]
            places = ((self._text.find(mark), mark) for mark in ends)
            at, mark = min((place for place in places if place[0] >= 0), default=(-1, ""))
            if at < 0:
                open_mark = max(map(len, ends), default=1) - 1
                self._text = self._text[max(0, len(self._text) - open_mark) :]
                return
            self._text, self._part = self._text[at + len(mark) :], ends[mark]

    def _rest(self) -> tuple[int, ...]:
        """The tokens of the end mark after those that are already written."""
        end, last = self._budget.end_tokens, tuple(self._last)
        for n_written in range(min(len(last), len(end) - 1), 0, -1):
            if last[-n_written:] == end[:n_written]:
                return end[n_written:]
        return end


def _marks(parts: dict[str, _Part]) -> dict[str, _Part]:
    return {mark: part for mark, part in parts.items() if mark}
