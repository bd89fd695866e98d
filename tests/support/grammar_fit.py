"""Whether a grammar lets a model write a text."""

from __future__ import annotations

import functools

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from semantic.adapters.mlx.sampling.grammar_compiler import grammar_source
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.domain.grammar import Grammar

FULL, PART, WRONG = (True, True), (True, False), (False, False)


@functools.cache
def trie_of(tokenizer: MLXTokenizer) -> LLTokenizer:
    return from_tokenizer(tokenizer.inner._tokenizer)  # type: ignore[attr-defined]


def fits(tokenizer: MLXTokenizer, grammar: Grammar, text: str) -> tuple[bool, bool]:
    """Whether `text` may be written, and whether the answer may end there."""
    matcher = LLMatcher(trie_of(tokenizer), grammar_source(grammar))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if matcher.try_consume_tokens(tokens) < len(tokens):
        return WRONG
    return True, matcher.is_accepting()
