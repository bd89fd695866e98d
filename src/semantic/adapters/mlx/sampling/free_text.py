"""The free part of an answer that comes before a grammar: it lasts until a mark was written.

Works on bytes, so that it makes no difference how a mark is divided into tokens. Knows no
grammars.
"""

from __future__ import annotations

import mlx.core as mx

from semantic.adapters.mlx.sampling.token_bytes import TokenBytes


class FreeText:
    """Follows an answer up to `mark`. A state is the part of the mark that was just written.

    What comes after the mark belongs to the grammar, so no token may write the mark's end and
    something more; and an answer may not end before it.
    """

    def __init__(self, tokens: TokenBytes, mark: str) -> None:
        self._tokens = tokens
        self._mark = mark.encode()
        # Only these can write the mark's end and something more.
        self._longer = [i for i, text in enumerate(tokens.texts) if self._mark[-1] in text[:-1]]
        self._allowed: dict[bytes, mx.array] = {}
        self.allowed(b"")  # the usual state: made here, where no answer waits for it

    def after(self, state: bytes, token: int) -> bytes | None:
        """The state after `token`; None when the mark is complete."""
        text = self._tokens.texts[token] if token < len(self._tokens.texts) else b""
        text = state + text
        if self._mark in text:
            return None
        longest = min(len(text), len(self._mark) - 1)
        begun = (text[-size:] for size in range(longest, 0, -1))
        return next((end for end in begun if self._mark.startswith(end)), b"")

    def allowed(self, state: bytes) -> mx.array:
        """Bools (vocab,): the tokens that may come in `state`."""
        if state not in self._allowed:
            texts = self._tokens.texts
            over = [token for token in self._longer if self._overruns(state + texts[token])]
            self._allowed[state] = self._tokens.all_but_ends(without=over)
        return self._allowed[state]

    def _overruns(self, text: bytes) -> bool:
        at = text.find(self._mark)
        return 0 <= at < len(text) - len(self._mark)
