"""SpelledArguments: the arguments of one call in a model's own spelling, as JSON while the model
writes them.

The part that all spellings have in common. Knows no spelling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class SpelledArguments(ABC):
    """Arguments, pushed in any pieces.

    The results of `push` add up to JSON: the `json.dumps` of the object that the model's parser
    finds in the whole call, but with a repeated key twice. `push` returns a string while the model
    writes it, another value at its end. A value that the parser refuses, such as a word for a
    number, is its text.

    `n_ended` counts ended arguments, `n_taken` the characters of the source in closed ones.
    `is_broken`: an argument has no reading. After either `push` returns nothing more.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.is_broken = False
        self.n_taken = 0
        self.n_ended = 0
        self._text = ""  # not read yet, from `_at` on
        self._at = 0
        self._n_read = 0  # characters of the source before `_text`
        self._certain = ["{"]
        self._has_members = False

    @property
    @abstractmethod
    def is_between(self) -> bool:
        """True if no argument is open."""

    @abstractmethod
    def may_end(self, *, cut: bool, stopped: bool) -> bool:
        """Return whether an answer that ends here, `cut` or before a stop string (`stopped`), ends
        the arguments."""

    @abstractmethod
    def ending(self, *, at_mark: bool) -> str:
        """The JSON that ends the arguments here if the model forgot to end the last one. Empty if
        it may not have. `at_mark`: the end mark of the calls follows."""

    @abstractmethod
    def _step(self) -> bool:
        """Read on; False if it takes more text."""

    def push(self, text: str) -> str:
        """The JSON that is certain with more of the source."""
        self._text += text
        while not self.is_closed and not self.is_broken and self._step():
            pass
        self._n_read += self._at
        self._text, self._at = self._text[self._at :], 0
        return self._taken()

    def close(self) -> str:
        """The JSON that ends the arguments where none is open."""
        self._end()
        return self._taken()

    def _end(self) -> None:
        """The arguments end at this position."""
        self.n_taken = self._n_read + self._at
        self.is_closed = True
        self._certain.append("}")

    def _taken(self) -> str:
        certain = "".join(self._certain)
        self._certain.clear()
        return certain

    def _joined(self, members: str) -> str:
        """`members` after those before."""
        return f", {members}" if members and self._has_members else members
