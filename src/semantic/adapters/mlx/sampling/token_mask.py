"""A grammar as a logits processor: at each step it leaves only the tokens that may come next.

Follows one sequence. Never raises, since that would end all sequences of the step: a grammar
that fails lets its own sequence end, and tells why.
"""

from __future__ import annotations

from typing import cast

import mlx.core as mx
from llguidance import LLMatcher

from semantic.adapters.mlx.arrays import array_from, async_eval
from semantic.adapters.mlx.sampling.free_text import FreeText
from semantic.adapters.mlx.sampling.token_bytes import TokenBytes

_BITS = mx.array(list(range(8)), dtype=mx.uint8)  # computed by nobody: any thread may read it


class GrammarMask:
    """Follows one sequence from the beginning of its answer.

    The first call is told all that was said before, so a preemption changes nothing.
    """

    def __init__(
        self, tokens: TokenBytes, matcher: LLMatcher, free: FreeText | None, n_prompt: int
    ) -> None:
        """`matcher` is this sequence's own; the first `n_prompt` tokens are no part of the
        answer."""
        self._tokens = tokens
        self._matcher = matcher
        self._free = free
        self._state: bytes | None = None if free is None else b""
        self._seen = n_prompt
        self._ended = False
        self._failure: tuple[int, str] | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """`logits` (1, vocab) of the token after `tokens`, without those that may not come."""
        # The newest token has to be known here; the logits, which follow from it, are computed
        # meanwhile.
        async_eval(logits)
        for token in cast(list[int], tokens[self._seen :].tolist()):
            self._take(token)
        self._seen = tokens.size
        return mx.where(self._allowed(), logits, mx.array(-mx.inf, logits.dtype))

    def failure_at(self, position: int) -> str | None:
        """Why the token at `position`, the prompt's tokens counted, does not fit the grammar."""
        if self._failure is None or position < self._failure[0]:
            return None
        return self._failure[1]

    def _take(self, token: int) -> None:
        self._seen += 1
        if self._ended or self._failure is not None:
            return  # one step is computed ahead, also behind the end
        if self._free is not None and self._state is not None:
            self._state = self._free.after(self._state, token)
        elif token in self._tokens.ends and self._matcher.is_accepting():
            self._ended = True
        elif not self._matcher.consume_token(token):
            self._fail()

    def _allowed(self) -> mx.array:
        if self._ended or self._failure is not None:
            return self._tokens.only_ends
        if self._free is not None and self._state is not None:
            return self._free.allowed(self._state)
        size = self._tokens.size
        mask = self._matcher.compute_bitmask()[: -(-size // 8)]
        if self._matcher.is_error() or not int.from_bytes(mask, "little") & ((1 << size) - 1):
            self._fail()
            return self._tokens.only_ends
        bits = (array_from(mask, mx.uint8, (len(mask), 1)) >> _BITS) & 1
        return bits.reshape(-1)[:size].astype(mx.bool_)

    def _fail(self) -> None:
        reason = self._matcher.get_error() or "none of the model's tokens can come next"
        self._failure = (self._seen, f"the grammar failed: {reason.strip().splitlines()[0]}")
