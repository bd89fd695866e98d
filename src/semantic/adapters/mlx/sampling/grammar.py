"""Grammars: which languages a model's answers can be held to, and how they are.

llguidance compiles them to automata over the model's tokens. Knows the tokenizer; neither
sequences nor how a model runs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits

from semantic.adapters.mlx.recent import Recent
from semantic.adapters.mlx.sampling.deep_stack import on_deep_stack
from semantic.adapters.mlx.sampling.free_text import FreeText
from semantic.adapters.mlx.sampling.grammar_source import grammar_source
from semantic.adapters.mlx.sampling.token_bytes import TokenBytes
from semantic.adapters.mlx.sampling.token_mask import GrammarMask
from semantic.domain.errors import InvalidRequestError
from semantic.domain.grammar import Grammar

_KEPT = 32
"""Compiled grammars; one takes a megabyte or more."""
_KEPT_MARKS = 8
_LONGEST_PROBLEM = 200
_LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's own: they bound what a compilation and a step may take. Its verbose errors would
tell the whole grammar."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar at its beginning; sequences get copies of `matcher`."""

    matcher: LLMatcher
    free: FreeText | None


class Grammars:
    """The grammars of one model. Any thread may use it."""

    def __init__(self, tokenizer: object | None, ends: Collection[int], size: int) -> None:
        """`tokenizer` is Hugging Face's or mlx-lm's; without one no grammar can be enforced.

        `ends` are the tokens that end an answer, `size` is how many logits the model gives.
        """
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._size = size
        self._compiled: Recent[Grammar, _Compiled] = Recent(_KEPT)
        self._free: Recent[str, FreeText] = Recent(_KEPT_MARKS)

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidRequestError, naming what is wrong, unless `grammar` can be enforced.

        Compiles it, and tries its first steps.
        """
        self._get(grammar)

    def mask(self, grammar: Grammar, n_prompt: int) -> GrammarMask:
        """A logits processor for one sequence, whose first `n_prompt` tokens are no answer.

        Raises InvalidRequestError as `check`.
        """
        compiled = self._get(grammar)
        matcher = compiled.matcher.deep_copy()
        return GrammarMask(self._tokens, matcher, compiled.free, n_prompt)

    def _get(self, grammar: Grammar) -> _Compiled:
        return self._compiled.get(grammar, lambda: self._compile(grammar))

    def _compile(self, grammar: Grammar) -> _Compiled:
        source = grammar_source(grammar)
        tokens = self._tokens
        matcher = on_deep_stack(lambda: _begun(tokens, source))
        if matcher.is_error():
            name = grammar.kind.replace("_", " ")
            raise InvalidRequestError(f"{name}: {_one_line(matcher.get_error())}")
        mark = grammar.after
        if mark is None:
            return _Compiled(matcher, None)
        return _Compiled(matcher, self._free.get(mark, lambda: FreeText(tokens, mark)))

    @cached_property
    def _tokens(self) -> TokenBytes:
        if self._tokenizer is None:
            raise InvalidRequestError("grammar: this model has no tokenizer to enforce one with")
        return TokenBytes(self._tokenizer, self._ends, self._size)


def _begun(tokens: TokenBytes, source: str) -> LLMatcher:
    """A matcher that has computed its first mask, or one that failed within two steps: what
    explodes at once does so here, where no answer waits for it."""
    matcher = LLMatcher(tokens.trie, source, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        return matcher
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    if matcher.is_error() or not mask:
        return matcher
    trial = matcher.deep_copy()
    trial.consume_token((mask & -mask).bit_length() - 1)
    trial.compute_bitmask()
    return trial if trial.is_error() else matcher


def _one_line(problem: str) -> str:
    """The line of llguidance's message that says what is wrong."""
    lines = [line.strip() for line in problem.strip().splitlines()]
    told = [line for line in lines if line.startswith("error:")] or lines or ["cannot be compiled"]
    return told[0][:_LONGEST_PROBLEM]
