"""Constrained decoding: a logits processor that masks tokens by a compiled grammar.

The processor never raises: an error would end every sequence in the step.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import cast

import mlx.core as mx
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from semantic.adapters.mlx.arrays import array_from, async_eval
from semantic.adapters.mlx.sampling.grammar_child import next_mask
from semantic.domain.errors import GRAMMAR_FAILED, InvalidRequestError

_BITS = mx.array(list(range(8)), dtype=mx.uint8)  # never evaluated: any thread may read it


class Vocabulary:
    """The tokens of one model as bytes, and masks over them.

    A model may have more logits than its tokenizer has tokens. Masks exclude the excess logits.
    """

    def __init__(self, tokenizer: object, eos: Collection[int], size: int) -> None:
        """`size` is the number of logits. Raises InvalidRequestError for a bad tokenizer."""
        inner = tokenizer
        if isinstance(tokenizer, TokenizerWrapper):
            inner = tokenizer._tokenizer  # noqa: SLF001  not accessible otherwise
        if not isinstance(inner, PreTrainedTokenizerFast):
            raise InvalidRequestError("grammar: cannot constrain this model's tokenizer")
        self.size = size
        self.eos = frozenset(token for token in eos if token < size)
        if not self.eos:
            raise InvalidRequestError("grammar: this model has no token that ends an answer")
        n_known = len(inner)
        self.trie = from_tokenizer(inner, n_vocab=max(size, n_known), eos_token=sorted(self.eos))
        self._n_known = min(size, n_known)

    @cached_property
    def texts(self) -> list[bytes]:
        """The bytes of each token of the tokenizer."""
        trie: LLTokenizer = self.trie
        return [trie.decode_bytes([token]) for token in range(self._n_known)]

    @cached_property
    def only_eos(self) -> mx.array:
        """A mask, (size,), that allows only EOS tokens."""
        return mx.array([token in self.eos for token in range(self.size)])

    def all_but_eos(self, without: Collection[int] = ()) -> mx.array:
        """Return a mask, (size,), of all tokens except EOS tokens and those in `without`."""
        allowed = [True] * len(self.texts) + [False] * (self.size - len(self.texts))
        for token in (*self.eos, *without):
            allowed[token] = False
        return mx.array(allowed)


class FreePrefix:
    """Unconstrained text before a grammar, up to and including `mark`. A state is the part of
    `mark` that the text has reached, in bytes."""

    def __init__(self, vocabulary: Vocabulary, mark: str) -> None:
        self._vocabulary = vocabulary
        self._mark = mark.encode()
        # Only these tokens can write the mark's end and more text.
        self._longer = [i for i, text in enumerate(vocabulary.texts) if self._mark[-1] in text[:-1]]
        self._masks: dict[bytes, mx.array] = {}
        self.mask(b"")  # the usual state, before a batch waits for it

    def advance(self, state: bytes, token: int) -> bytes | None:
        """Return the state after `token`; None once the mark is complete."""
        texts = self._vocabulary.texts
        text = state + (texts[token] if token < len(texts) else b"")
        if self._mark in text:
            return None
        longest = min(len(text), len(self._mark) - 1)
        suffixes = (text[-size:] for size in range(longest, 0, -1))
        return next((suffix for suffix in suffixes if self._mark.startswith(suffix)), b"")

    def mask(self, state: bytes) -> mx.array:
        """Return a mask, (size,), of the tokens allowed in `state`."""
        if state not in self._masks:
            texts = self._vocabulary.texts
            overrunning = [token for token in self._longer if self._overruns(state + texts[token])]
            self._masks[state] = self._vocabulary.all_but_eos(without=overrunning)
        return self._masks[state]

    def _overruns(self, text: bytes) -> bool:
        at = text.find(self._mark)
        return 0 <= at < len(text) - len(self._mark)


class GrammarMask:
    """The token mask for one sequence."""

    def __init__(
        self, vocabulary: Vocabulary, matcher: LLMatcher, prefix: FreePrefix | None, n_prompt: int
    ) -> None:
        """`matcher` belongs to this sequence alone. The answer begins after `n_prompt` tokens."""
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._prefix = prefix
        self._prefix_state: bytes | None = None if prefix is None else b""
        self._seen = n_prompt
        self._ended = False
        self._failure: tuple[int, str] | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return `logits`, (1, vocab), with minus infinity for forbidden tokens."""
        # Reading the newest token waits until MLX has it; meanwhile MLX goes on to the logits.
        async_eval(logits)
        for token in cast(list[int], tokens[self._seen :].tolist()):
            self._consume(token)
        self._seen = tokens.size
        return mx.where(self._allowed(), logits, mx.array(-mx.inf, logits.dtype))

    def branch(self) -> GrammarMask:
        """See `Branching`."""
        found = GrammarMask(self._vocabulary, self._matcher.deep_copy(), self._prefix, self._seen)
        found._prefix_state = self._prefix_state
        found._ended, found._failure = self._ended, self._failure
        return found

    def adopt(self, branch: GrammarMask) -> None:
        """See `Branching`."""
        self._matcher, self._prefix_state = branch._matcher, branch._prefix_state
        self._seen, self._ended, self._failure = branch._seen, branch._ended, branch._failure

    def failure_at(self, position: int) -> str | None:
        """Return why the grammar failed at or before token `position`; None if it did not fail."""
        if self._failure is None or position < self._failure[0]:
            return None
        return self._failure[1]

    def _consume(self, token: int) -> None:
        self._seen += 1
        if self._ended or self._failure is not None:
            return  # decoding runs one step ahead, even past the end
        if self._prefix is not None and self._prefix_state is not None:
            self._prefix_state = self._prefix.advance(self._prefix_state, token)
        elif token in self._vocabulary.eos and self._matcher.is_accepting():
            self._ended = True
        elif not self._matcher.consume_token(token):
            self._fail()

    def _allowed(self) -> mx.array:
        if self._ended or self._failure is not None:
            return self._vocabulary.only_eos
        if self._prefix is not None and self._prefix_state is not None:
            return self._prefix.mask(self._prefix_state)
        size = self._vocabulary.size
        mask = next_mask(self._matcher, self._vocabulary.trie)[: -(-size // 8)]
        if self._matcher.is_error() or not int.from_bytes(mask, "little") & ((1 << size) - 1):
            self._fail()
            return self._vocabulary.only_eos
        bits = (array_from(mask, mx.uint8, (len(mask), 1)) >> _BITS) & 1
        return bits.reshape(-1)[:size].astype(mx.bool_)

    def _fail(self) -> None:
        reason = self._matcher.get_error() or "none of the model's tokens can come next"
        self._failure = (self._seen, f"{GRAMMAR_FAILED}: {reason.strip().splitlines()[0]}")
