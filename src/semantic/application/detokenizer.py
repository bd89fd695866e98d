"""StreamingDetokenizer: incremental text of a token list, equal to decoding it whole.

Knows only a decoding function; not its tokenizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
_CONTEXT_PIECES = 4
"""Pieces decoded again before each new one, since preceding tokens can change a token's text (a
leading space, a combining accent). A context begins with a piece, never inside a character."""


class StreamingDetokenizer:
    """Decodes tokens one by one; text is emitted once no later token can change it."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._starts: deque[int] = deque([0], maxlen=_CONTEXT_PIECES)
        self._emitted = 0  # tokens whose text was emitted

    def push(self, token: int) -> str:
        """The text that is final with `token`; empty while a character is incomplete."""
        self._tokens.append(token)
        window = self._decode(self._tokens[self._starts[0] :])
        return "" if window.endswith(_INCOMPLETE) else self._emit(window)

    def flush(self) -> str:
        """The remaining text; incomplete bytes become U+FFFD, as the tokenizer decodes them."""
        if self._emitted == len(self._tokens):
            return ""
        return self._emit(self._decode(self._tokens[self._starts[0] :]))

    def _emit(self, window: str) -> str:
        before = self._decode(self._tokens[self._starts[0] : self._emitted])
        self._emitted = len(self._tokens)
        self._starts.append(self._emitted)
        return window[len(before) :]
