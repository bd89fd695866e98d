"""Text of an answer on its way to whoever asked, with the log-probabilities of its tokens.

Knows what of it may be given out yet. Knows marks only as texts; not what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semantic.domain.value_objects import TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenText:
    """A text and where in it the tokens begin whose log-probabilities are known."""

    text: str = ""
    logprobs: tuple[tuple[int, TokenLogprob], ...] = ()

    @classmethod
    def of(cls, text: str, logprobs: Sequence[TokenLogprob] = ()) -> TokenText:
        """The text of one token; of several, all are said to begin where it begins."""
        return cls(text, tuple((0, logprob) for logprob in logprobs))

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs)

    def __add__(self, other: TokenText) -> TokenText:
        moved = tuple((at + len(self.text), logprob) for at, logprob in other.logprobs)
        return TokenText(self.text + other.text, self.logprobs + moved)

    def split(self, at: int) -> tuple[TokenText, TokenText]:
        """What comes before character `at`, and the rest; a token belongs where it begins."""
        before = tuple(entry for entry in self.logprobs if entry[0] < at)
        rest = tuple((start - at, value) for start, value in self.logprobs if start >= at)
        return TokenText(self.text[:at], before), TokenText(self.text[at:], rest)

    @property
    def values(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities alone, in order."""
        return tuple(logprob for _, logprob in self.logprobs)


class MarkFinder:
    """Cuts a stream of text at marks; holds back what could still become one.

    No mark is part of another one.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._held = TokenText()

    def push(self, text: TokenText) -> None:
        self._held += text

    def take(self) -> tuple[TokenText, str | None]:
        """The text before the next mark, and that mark: it is gone then.

        Without a complete mark, the text that is certain to be none, and None.
        """
        found = self._first()
        if found is not None:
            at, mark = found
            before, rest = self._held.split(at)
            self._held = rest.split(len(mark))[1]
            return before, mark
        certain = len(self._held.text) - self._open_mark()
        if certain == len(self._held.text):
            return self.take_all(), None
        before, self._held = self._held.split(certain)
        return before, None

    def take_all(self) -> TokenText:
        """All that is held."""
        held, self._held = self._held, TokenText()
        return held

    def _first(self) -> tuple[int, str] | None:
        """Where the first complete mark begins, and which one it is."""
        places = ((self._held.text.find(mark), mark) for mark in self._marks)
        return min((place for place in places if place[0] >= 0), default=None)

    def _open_mark(self) -> int:
        """Length of the longest end of what is held that begins a mark."""
        text = self._held.text
        longest = max(map(len, self._marks), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(mark.startswith(text[-size:]) for mark in self._marks):
                return size
        return 0


class Trimmer:
    """Drops the white space beside marks.

    It comes back when more text follows: "one <mark> two" is "one two". White space at an end of
    the whole answer, where no mark is, stays.
    """

    def __init__(self, *, after_mark: bool) -> None:
        self._after_mark = after_mark
        self._space = TokenText()  # white space that was not given out yet
        self._bare = TokenText()  # tokens without text yet, behind a mark
        self._given = False

    def push(self, text: TokenText) -> TokenText:
        """What may be given out."""
        if self._after_mark:
            text = self._bare + text
            blank = len(text.text) - len(text.text.lstrip())
            text = text.split(blank)[1]
            if not text.text:
                self._bare = text
                return TokenText()
            self._after_mark = False
        whole = self._space + text
        given, self._space = whole.split(len(whole.text.rstrip()))
        if not self._space.text:
            given, self._space = given + self._space, TokenText()
        self._given = self._given or bool(given.text)
        return given

    def mark(self) -> None:
        """A mark stands here."""
        self._after_mark, self._bare = True, TokenText()
        if not self._given:
            self._space = TokenText()

    def flush(self) -> TokenText:
        """What is left when the answer ends."""
        return TokenText() if self._after_mark else self._space
