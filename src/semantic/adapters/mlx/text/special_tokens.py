"""Keeps texts of users from becoming the special tokens that they spell.

A text's special tokens are hidden behind plain words before the template sees them. When the
rendered conversation is encoded they come back as ordinary text, letter by letter, so only what
the template itself writes becomes a special token. Everything else is encoded as it always is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

Encode = Callable[[str], list[int]]
"""Text to tokens; special tokens in the text become themselves, nothing is added."""

_NEVER = "(?!)"


class TokenGuard:
    """Knows which texts are special tokens of one tokenizer."""

    def __init__(
        self, encode: Encode, special: Mapping[str, int], marks: Mapping[str, int]
    ) -> None:
        """`special` tokens are never an author's; `marks` are those that a template writes and
        only a system or an assistant may."""
        self._encode = encode
        self._tokens = frozenset(special.values()) | frozenset(marks.values())
        self.special = _any_of(special)
        self.all = _any_of([*special, *marks])
        self._newline = encode("\n")
        # SentencePiece puts a space before every text; none belongs in the middle of one.
        self._spaced = encode("a") != self._behind_newline("a")

    def encode(self, text: str, hidden: Hidden) -> list[int]:
        """The tokens of a rendered conversation with what is `hidden` in it."""
        pieces = hidden.find.split(text)
        tokens = self._encode(pieces[0])
        for at, piece in enumerate(pieces[1:], start=1):
            if at % 2:
                tokens += self._as_text(hidden.texts[int(piece)])
            elif piece:
                tokens += self._inner(piece)
        return tokens

    def _as_text(self, text: str) -> list[int]:
        """The tokens of `text` without special ones: a part of one is none."""
        tokens = self._inner(text)
        if len(text) == 1 or not self._tokens.intersection(tokens):
            return tokens
        return self._as_text(text[:1]) + self._as_text(text[1:])

    def _inner(self, text: str) -> list[int]:
        """The tokens of a text that stands behind another one."""
        return self._behind_newline(text) if self._spaced else self._encode(text)

    def _behind_newline(self, text: str) -> list[int]:
        tokens = self._encode("\n" + text)
        size = len(self._newline)
        return tokens[size:] if tokens[:size] == self._newline else self._encode(text)


class Hidden:
    """What was hidden in the texts of one conversation."""

    def __init__(self, guard: TokenGuard, texts: Iterable[str]) -> None:
        """`texts` are all that the conversation holds: no word that hides is part of one."""
        self._guard = guard
        self._word = _word_not_in([text for text in texts if "hiddentext" in text])
        self.find = re.compile(f"{self._word}([0-9]+)z")
        self.texts: list[str] = []

    def __call__(self, text: str, *, marks: bool = False) -> str:
        """`text` with words in the place of special tokens."""
        return (self._guard.all if marks else self._guard.special).sub(self._hide, text)

    def _hide(self, found: re.Match[str]) -> str:
        self.texts.append(found[0])
        return f"{self._word}{len(self.texts) - 1}z"


def _word_not_in(texts: Iterable[str]) -> str:
    word = "hiddentext"
    while any(word in text for text in texts):
        word += "x"
    return word


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds any of `tokens`, the longest that fits."""
    longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or _NEVER)
