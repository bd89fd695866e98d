"""A model's tokens as bytes: what each of them writes, and which end an answer.

Made once for each model, from a Hugging Face tokenizer. Knows no grammars.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import mlx.core as mx
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from semantic.domain.errors import InvalidRequestError


class TokenBytes:
    """The tokens of one model. `size` is how many logits the model gives.

    The model may have more tokens than the tokenizer; those are nobody's, and never allowed.
    """

    def __init__(self, tokenizer: object, ends: Collection[int], size: int) -> None:
        """`tokenizer` may be mlx-lm's wrapper of one. Takes about a second for 150,000 tokens.

        Raises InvalidRequestError for a tokenizer whose tokens cannot be told, and when no token
        ends an answer.
        """
        inner = tokenizer
        if isinstance(tokenizer, TokenizerWrapper):
            inner = tokenizer._tokenizer  # noqa: SLF001  it has no other name for it
        if not isinstance(inner, PreTrainedTokenizerFast):
            raise InvalidRequestError("grammar: this model's tokenizer cannot be held to one")
        self.size = size
        self.ends = frozenset(token for token in ends if token < size)
        if not self.ends:
            raise InvalidRequestError("grammar: this model has no token that ends an answer")
        n_known = len(inner)
        self.trie = from_tokenizer(inner, n_vocab=max(size, n_known), eos_token=sorted(self.ends))
        self._n_known = min(size, n_known)

    @cached_property
    def texts(self) -> list[bytes]:
        """What each token of the tokenizer writes."""
        trie: LLTokenizer = self.trie
        return [trie.decode_bytes([token]) for token in range(self._n_known)]

    @cached_property
    def only_ends(self) -> mx.array:
        """Bools (size,) that allow the end tokens alone."""
        return mx.array([token in self.ends for token in range(self.size)])

    def all_but_ends(self, without: Collection[int] = ()) -> mx.array:
        """Bools (size,) that allow what the tokenizer has, but no end token and none `without`."""
        allowed = [True] * len(self.texts) + [False] * (self.size - len(self.texts))
        for token in (*self.ends, *without):
            allowed[token] = False
        return mx.array(allowed)
