"""Sampling parameters as mlx-lm's samplers and logits processors.

A seeded draw depends on the seed and the position in the answer alone, so it is the same in any
batch and after a preemption. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    greedy_sampler,
    make_logits_processors,
)

from semantic.domain.value_objects import SamplingParams

_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Keeps the keys of neighbouring seeds apart: 2**64 divided by the golden ratio."""

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


def make_sampler(params: SamplingParams, drawn: int) -> Sampler:
    """A sampler of log-probabilities (1, vocab) for the answer's token `drawn` and those after.

    Called once per token. All greedy requests share one, so that a batch is sampled in one call.
    """
    if params.greedy:
        return greedy_sampler
    if params.seed is None:
        raise ValueError("a sampled request needs a seed")
    first = params.seed * _SEED_STRIDE + drawn
    inverse_temperature = 1.0 / params.temperature
    calls = 0

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal calls
        key = mx.random.key((first + calls) % 2**63)
        calls += 1
        return mx.random.categorical(_filter(logprobs, params) * inverse_temperature, key=key)

    return sample


def make_processors(params: SamplingParams, n_prompt: int) -> list[LogitsProcessor]:
    """Logits processors for the penalties and biases asked for.

    mlx-lm calls them with the tokens so far and the logits (1, vocab) of the next one, once for
    each token. The first `n_prompt` tokens are no part of the answer.
    """
    processors: list[LogitsProcessor] = make_logits_processors(
        logit_bias=dict(params.logit_bias) or None,
        repetition_penalty=params.repetition_penalty,
        repetition_context_size=params.repetition_context,
    )
    if params.presence_penalty or params.frequency_penalty:
        processors.append(_penalty(params.presence_penalty, params.frequency_penalty, n_prompt))
    return processors


def _penalty(presence: float, frequency: float, n_prompt: int) -> LogitsProcessor:
    """OpenAI's penalties: of presence for a token that the answer has, of frequency for each time.

    mlx-lm's own count the prompt's tokens too, and only the last ones. The counts are kept from
    step to step; the first call counts all that was said before, so a preemption changes nothing.
    """
    counts: mx.array | None = None
    counted = n_prompt

    def penalize(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal counts, counted
        if counts is None:
            counts = mx.zeros((logits.shape[-1],), mx.float32)
        if tokens.size > counted:
            counts = counts.at[tokens[counted:]].add(1)
            counted = tokens.size
        cost = frequency * counts + presence * (counts > 0)
        return logits - cost.astype(logits.dtype)

    return penalize


def _filter(logprobs: mx.array, params: SamplingParams) -> mx.array:
    """mlx-lm's filters in mlx-lm's order."""
    if 0 < params.top_p < 1:
        logprobs = apply_top_p(logprobs, params.top_p)
    if params.min_p > 0:
        logprobs = apply_min_p(logprobs, params.min_p)
    if 0 < params.top_k < logprobs.shape[-1]:
        logprobs = apply_top_k(logprobs, params.top_k)
    return logprobs
