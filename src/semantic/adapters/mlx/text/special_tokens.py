"""Escapes special tokens spelled in users' texts, so that they stay text.

Before the template runs, each special token in a text is replaced by a placeholder. When the
rendered chat is encoded, placeholders are encoded as ordinary text, character by character if
need be, so only what the template itself writes becomes a special token. Text without special
tokens is encoded unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

Encode = Callable[[str], list[int]]
"""Text to tokens; special tokens in the text become themselves, nothing is added."""

_NEVER = "(?!)"


class SpecialTokens:
    """The special tokens of one tokenizer, and an encoder that honours escapes."""

    def __init__(
        self, encode: Encode, special: Mapping[str, int], marks: Mapping[str, int]
    ) -> None:
        """`special` tokens are escaped in every text; `marks`, which a template writes around
        calls and thoughts, are allowed in texts of the system and the assistant."""
        self._encode = encode
        self._tokens = frozenset(special.values()) | frozenset(marks.values())
        self.special = _any_of(special)
        self.all = _any_of([*special, *marks])
        self._newline = encode("\n")
        # SentencePiece puts a space before every text; none belongs in the middle of one.
        self._adds_space = encode("a") != self._encode_after_newline("a")

    def encode(self, text: str, escaper: Escaper) -> list[int]:
        """The tokens of a rendered chat whose texts were escaped by `escaper`."""
        pieces = escaper.placeholder.split(text)
        tokens = self._encode(pieces[0])
        for at, piece in enumerate(pieces[1:], start=1):
            if at % 2:
                tokens += self._encode_as_text(escaper.texts[int(piece)])
            elif piece:
                tokens += self.encode_following(piece)
        return tokens

    def _encode_as_text(self, text: str) -> list[int]:
        """The tokens of `text` without special ones: its parts are not special."""
        tokens = self.encode_following(text)
        if len(text) == 1 or not self._tokens.intersection(tokens):
            return tokens
        return self._encode_as_text(text[:1]) + self._encode_as_text(text[1:])

    def encode_following(self, text: str) -> list[int]:
        """The tokens of a text that follows another text."""
        return self._encode_after_newline(text) if self._adds_space else self._encode(text)

    def _encode_after_newline(self, text: str) -> list[int]:
        tokens = self._encode("\n" + text)
        size = len(self._newline)
        return tokens[size:] if tokens[:size] == self._newline else self._encode(text)


class Escaper:
    """Replaces special tokens in the texts of one chat by placeholders."""

    def __init__(self, special_tokens: SpecialTokens, texts: Iterable[str]) -> None:
        """`texts` are all texts of the chat: no placeholder occurs in any of them."""
        self._special_tokens = special_tokens
        self._word = _word_not_in([text for text in texts if "hiddentext" in text])
        self.placeholder = re.compile(f"{self._word}([0-9]+)z")
        self.texts: list[str] = []

    def __call__(self, text: str, *, marks: bool = False) -> str:
        """`text` with placeholders for special tokens, and for `marks` if requested."""
        pattern = self._special_tokens.all if marks else self._special_tokens.special
        return pattern.sub(self._replace, text)

    def _replace(self, found: re.Match[str]) -> str:
        self.texts.append(found[0])
        return f"{self._word}{len(self.texts) - 1}z"


def _word_not_in(texts: Iterable[str]) -> str:
    word = "hiddentext"
    while any(word in text for text in texts):
        word += "x"
    return word


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `tokens`, the longest first."""
    longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or _NEVER)
