"""Incremental text of a token list, equal to decoding it whole.

A token costs as much in a long text as in a short one. Knows functions of tokens; no tokenizer.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
_CONTEXT_PIECES = 4
"""Pieces decoded again before each new one, since preceding tokens can change a token's text (a
leading space, a combining accent). A context begins with a piece, never inside a character."""


class ByteDetokenizer:
    """Implements `Detokenizer` for tokens whose text is the concatenation of their bytes."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """`bytes_of` gives a token's bytes: UTF-8, which may begin or end inside a character."""
        self._bytes_of = bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        """See `Detokenizer.push`."""
        return self._decode(self._bytes_of(token))

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._decode(b"", True)


class StreamingDetokenizer:
    """Implements `Detokenizer` for any tokenizer: decodes each token with a few before it."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # the context, and what follows it
        self._ends: list[int] = []  # of the pieces in the context
        self._context = ""  # the text of tokens[:ends[-1]], which was emitted

    def push(self, token: int) -> str:
        """See `Detokenizer.push`."""
        self._tokens.append(token)
        window = self._decode(self._tokens)
        return "" if window.endswith(_INCOMPLETE) else self._emit(window)

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        if not self._tokens or (self._ends and self._ends[-1] == len(self._tokens)):
            return ""
        return self._emit(self._decode(self._tokens))

    def _emit(self, window: str) -> str:
        text = window[len(self._context) :]
        self._ends.append(len(self._tokens))
        self._context = window
        if len(self._ends) > 2 * _CONTEXT_PIECES:
            self._shorten()
        return text

    def _shorten(self) -> None:
        """Forget all but the last pieces; rarely, because their text must be decoded anew."""
        cut = self._ends[-_CONTEXT_PIECES - 1]
        del self._tokens[:cut]
        self._ends = [end - cut for end in self._ends[-_CONTEXT_PIECES:]]
        self._context = self._decode(self._tokens)
