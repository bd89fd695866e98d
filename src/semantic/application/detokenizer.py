"""Text of a growing token list, piece by piece, equal to decoding it whole.

Knows only a function that decodes; not which tokenizer it belongs to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
_CONTEXT_PIECES = 4
"""Pieces decoded again before each new one: what precedes a token can change its text (a leading
space, a joined accent). A context begins where a piece began, never inside a character."""


class StreamingDetokenizer:
    """Decodes tokens one by one; text is given out once no later token can change it."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._starts: deque[int] = deque([0], maxlen=_CONTEXT_PIECES)
        self._emitted = 0  # tokens whose text was given out

    def push(self, token: int) -> str:
        """The text that became certain with `token`; empty while a character is incomplete."""
        self._tokens.append(token)
        window = self._decode(self._tokens[self._starts[0] :])
        return "" if window.endswith(_INCOMPLETE) else self._emit(window)

    def flush(self) -> str:
        """The rest, at the end: incomplete bytes become U+FFFD, as the tokenizer decodes them."""
        if self._emitted == len(self._tokens):
            return ""
        return self._emit(self._decode(self._tokens[self._starts[0] :]))

    def _emit(self, window: str) -> str:
        before = self._decode(self._tokens[self._starts[0] : self._emitted])
        self._emitted = len(self._tokens)
        self._starts.append(self._emitted)
        return window[len(before) :]
