"""Log-probabilities out of a model's figures: of tokens that were chosen, and of given ones.

Natural logarithms. Knows neither sequences nor requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from semantic.domain.value_objects import TokenLogprob

_ROWS = 32
"""Positions whose log-probabilities are in memory at once, a whole vocabulary in fp32 for each."""


def read_logprob(logprobs: mx.array, token: int, n_top: int) -> TokenLogprob:
    """The log-probability of `token` and the `n_top` likeliest, from (vocab,).

    Tokens that could not be chosen at all are not among the likeliest.
    """
    top: tuple[tuple[int, float], ...] = ()
    if n_top:
        n_top = min(n_top, logprobs.shape[-1])
        indices = mx.argpartition(-logprobs, kth=n_top - 1)[:n_top]
        values = cast(list[float], logprobs[indices].astype(mx.float32).tolist())
        top = _sorted(cast(list[int], indices.tolist()), values)
    return TokenLogprob(token, cast(float, logprobs[token].item()), top)


def score_tokens(logits: mx.array, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
    """The log-probability of each of `tokens` and the `n_top` likeliest in its place.

    `logits` is (len(tokens), vocab), of any type; the logarithm of the softmax is fp32.
    """
    mx.eval(logits)
    scores: list[TokenLogprob] = []
    for start in range(0, len(tokens), _ROWS):
        rows = logits[start : start + _ROWS].astype(mx.float32)
        scores += _score_rows(rows, tokens[start : start + _ROWS], n_top)
    return scores


def _score_rows(logits: mx.array, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
    n_top = min(n_top, logits.shape[-1])
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
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
        tops = [_sorted(*row) for row in rows]
    figures = cast(list[float], own.tolist())
    return [TokenLogprob(*one) for one in zip(tokens, figures, tops, strict=True)]


def _sorted(tokens: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    pairs = [pair for pair in zip(tokens, values, strict=True) if pair[1] > -math.inf]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
