"""Sampling: seeded samplers, logits processors and log-probabilities.

A seeded draw depends only on the seed and on the token's index in the answer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, cast, runtime_checkable

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    greedy_sampler,
    make_logits_processors,
)

from semantic.domain.errors import NotFiniteError
from semantic.domain.value_objects import SamplingParams, TokenLogprob

_SEED_STRIDE = 0x9E3779B97F4A7C15
"""The distance between the keys of adjacent seeds: 2**64 divided by the golden ratio."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Top-p, min-p, top-k and temperature. Rows with equal filters share one draw."""

    temperature: float
    top_p: float
    min_p: float
    top_k: int

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Filter `logprobs`, (rows, vocab), in the order of mlx-lm."""
        if self.top_p < 1:
            logprobs = apply_top_p(logprobs, self.top_p)
        if self.min_p > 0:
            logprobs = apply_min_p(logprobs, self.min_p)
        if 0 < self.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, self.top_k)
        return logprobs * (1.0 / self.temperature)


_SCORED_ROWS = 32
"""The number of positions per step of `score_tokens`."""

Sampler = Callable[[mx.array], mx.array]
"""Takes log-probabilities, (1, vocab). Returns a token id, (1,)."""

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""Takes a sequence's tokens and its next logits, (1, vocab). Returns the logits to sample from."""


@runtime_checkable
class Branching(Protocol):
    """A logits processor with a state that depends on the tokens seen so far."""

    def __call__(self, tokens: mx.array, logits: mx.array, /) -> mx.array: ...

    def branch(self) -> Self:
        """Return a copy, to see other tokens."""

    def adopt(self, branch: Self) -> None:
        """Take over the state of a branch."""


def branches(processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
    """Return copies of `processors` as far as they have a state."""
    return [one.branch() if isinstance(one, Branching) else one for one in processors]


def adopt(processors: Sequence[LogitsProcessor], branched: Sequence[LogitsProcessor]) -> None:
    """Make `processors` take over the states of their `branches`."""
    for mine, other in zip(processors, branched, strict=True):
        if isinstance(mine, Branching) and mine is not other:
            mine.adopt(cast(Branching, other))


class SeededSampler:
    """Samples token number `drawn` of an answer, then each later token."""

    def __init__(self, params: SamplingParams, drawn: int) -> None:
        """Raise ValueError if `params` has no seed."""
        if params.seed is None:
            raise ValueError("a sampled request needs a seed")
        self.filters = Filters(params.temperature, params.top_p, params.min_p, params.top_k)
        self._next = params.seed * _SEED_STRIDE + drawn

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Return a token id, (1,), from log-probabilities, (1, vocab)."""
        return mx.random.categorical(self.filters(logprobs), key=mx.random.key(self.take_seed()))

    def take_seed(self) -> int:
        """Return the seed for the next token."""
        seed = self._next % 2**63
        self._next += 1
        return seed

    def give_back(self, n_tokens: int) -> None:
        """Return to the seed before the last `n_tokens`."""
        self._next -= n_tokens


def give_back(sampler: Sampler, n_tokens: int) -> None:
    """Let `sampler` draw its last `n_tokens` tokens again."""
    if isinstance(sampler, SeededSampler):
        sampler.give_back(n_tokens)


def make_sampler(params: SamplingParams, drawn: int) -> Sampler:
    """Return a sampler for token number `drawn` of an answer and all later tokens. Raises
    ValueError if a needed seed is missing."""
    return greedy_sampler if params.greedy else SeededSampler(params, drawn)


def draw(samplers: Sequence[Sampler], logprobs: mx.array) -> mx.array:
    """Draw a token for each row with the row's own sampler. Token ids are (rows,), and `logprobs`
    is (rows, vocab)."""
    groups: dict[object, list[int]] = {}
    for row, sampler in enumerate(samplers):
        alike = sampler.filters if isinstance(sampler, SeededSampler) else sampler
        groups.setdefault(alike, []).append(row)
    if len(groups) == 1:
        return _draw_alike(samplers, logprobs)
    drawn = [
        _draw_alike([samplers[row] for row in rows], logprobs[mx.array(rows)])
        for rows in groups.values()
    ]
    places = [row for rows in groups.values() for row in rows]
    order = sorted(range(len(places)), key=places.__getitem__)
    return mx.concatenate(drawn)[mx.array(order)]


def make_processors(params: SamplingParams, n_prompt: int) -> list[LogitsProcessor]:
    """Return logits processors for the penalties and the logit bias in `params`. The answer begins
    after `n_prompt` tokens."""
    processors: list[LogitsProcessor] = make_logits_processors(
        logit_bias=dict(params.logit_bias) or None,
        repetition_penalty=params.repetition_penalty,
        repetition_context_size=params.repetition_context,
    )
    if params.presence_penalty or params.frequency_penalty:
        processors.append(_Penalty(params.presence_penalty, params.frequency_penalty, n_prompt))
    return processors


def read_logprob(logprobs: mx.array, token: int, n_top: int) -> TokenLogprob:
    """Return the log-probabilities of `token` and of the `n_top` most likely tokens."""
    top: tuple[tuple[int, float], ...] = ()
    if n_top:
        n_top = min(n_top, logprobs.shape[-1])
        indices = mx.argpartition(-logprobs, kth=n_top - 1)[:n_top]
        values = cast(list[float], logprobs[indices].astype(mx.float32).tolist())
        top = _most_likely(cast(list[int], indices.tolist()), values)
    return TokenLogprob(token, cast(float, logprobs[token].item()), top)


def score_tokens(logits: mx.array, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
    """Return the log-probabilities of each of `tokens` and of the `n_top` most likely tokens in its
    place.

    `logits` is (len(tokens), vocab). Raises NotFiniteError for NaN or infinity.
    """
    mx.eval(logits)
    scores: list[TokenLogprob] = []
    for start in range(0, len(tokens), _SCORED_ROWS):
        rows = logits[start : start + _SCORED_ROWS].astype(mx.float32)
        scores += _score_rows(rows, tokens[start : start + _SCORED_ROWS], n_top)
    return scores


class _Penalty:
    """Unlike mlx-lm's penalties, OpenAI's count all tokens of the answer and no others."""

    def __init__(self, presence: float, frequency: float, n_prompt: int) -> None:
        self._presence, self._frequency = presence, frequency
        self._counts: mx.array | None = None
        self._counted = n_prompt

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        counts = self._counts
        if counts is None:
            counts = mx.zeros((logits.shape[-1],), mx.float32)
        if tokens.size > self._counted:
            counts = counts.at[tokens[self._counted :]].add(1)
            self._counted = tokens.size
        self._counts = counts
        cost = self._frequency * counts + self._presence * (counts > 0)
        return logits - cost.astype(logits.dtype)

    def branch(self) -> _Penalty:
        return copy.copy(self)

    def adopt(self, branch: _Penalty) -> None:
        self._counts, self._counted = branch._counts, branch._counted


def _draw_alike(samplers: Sequence[Sampler], logprobs: mx.array) -> mx.array:
    seeded = [one for one in samplers if isinstance(one, SeededSampler)]
    if len(seeded) <= 1:
        return samplers[0](logprobs)
    seeds = [one.take_seed() for one in seeded]
    keys = mx.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], mx.uint32)
    return _categorical(seeded[0].filters(logprobs), keys)


def _categorical(logits: mx.array, keys: mx.array) -> mx.array:
    """Like `mx.random.categorical`, but draw each row of (rows, vocab) with its own key."""
    logits = logits.astype(mx.float32)
    top = mx.max(logits, axis=-1, keepdims=True)
    certain = (logits == top).astype(mx.float32)
    weights = mx.where(mx.isinf(top), certain, mx.exp(logits - top))
    below = mx.cumsum(weights, axis=-1, inclusive=False)
    share = mx.vmap(lambda key: mx.random.uniform(shape=(1,), key=key))(keys)
    at = share * mx.sum(weights, axis=-1, keepdims=True)
    # Skip the first entry instead of subtracting 1: in a row of NaN, no entry is below.
    return mx.sum(below[:, 1:] <= at, axis=-1).astype(mx.uint32)


def _score_rows(logits: mx.array, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
    n_top = min(n_top, logits.shape[-1])
    normalizers = mx.logsumexp(logits, axis=-1, keepdims=True)
    if not mx.all(mx.isfinite(normalizers)).item():
        raise NotFiniteError
    logprobs = logits - normalizers
    own = mx.take_along_axis(logprobs, mx.array(list(tokens))[:, None], axis=-1)[:, 0]
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if n_top:
        indices = mx.argpartition(-logprobs, kth=n_top - 1, axis=-1)[:, :n_top]
        values = mx.take_along_axis(logprobs, indices, axis=-1)
        rows = zip(
            cast(list[list[int]], indices.tolist()),
            cast(list[list[float]], values.tolist()),
            strict=True,
        )
        tops = [_most_likely(*row) for row in rows]
    scores = cast(list[float], own.tolist())
    return [TokenLogprob(*one) for one in zip(tokens, scores, tops, strict=True)]


def _most_likely(tokens: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    pairs = [pair for pair in zip(tokens, values, strict=True) if pair[1] > -math.inf]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
