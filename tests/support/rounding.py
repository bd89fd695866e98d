"""What rounding costs a model, measured: the bound for figures of two correct computations.

Floating-point sums depend on their order, and the order on the matrices' shapes, the BLAS kernel
and the number of threads. So log-probabilities computed in other chunks, in a batch or on another
machine differ, and a constant that fits one machine fails on the next. A model's own sensitivity is
the scale instead: how far its log-probabilities move when every weight is off by its last bit. That
depends on the model alone, is never zero, and is at least what other orders of summation cost
(`test_rounding.py` compares the two on the machine that runs it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map

import semantic.adapters.mlx  # noqa: F401  loads OpenBLAS before MLX
from tests.support.eight_bits import new_caches

_DRAWS = 2
_N_TOKENS = 200
_CHUNK = 100
_MARGIN = 4.0
"""Twice, for both of two computations were rounded; and twice, for the measure is a sample."""

_measured: dict[int, tuple[Module, float]] = {}


def log_probabilities(model: Module, tokens: Sequence[int], chunk: int) -> mx.array:
    """The log-softmax after each token, (len(tokens), vocab) in fp32, by mlx-lm alone."""
    caches = new_caches(model)
    rows: list[mx.array] = []
    for start in range(0, len(tokens), chunk):
        logits = model(mx.array([list(tokens[start : start + chunk])]), cache=caches)[0]
        logits = logits.astype(mx.float32)
        rows.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(rows)
    return mx.concatenate(rows)


def most_rounding(model: Module) -> float:
    """How far apart two correct computations of one log-probability, or logit, may be.

    Absolute, in nats, for models in fp32. Measured once for each model and process. Two tokens
    whose logits are closer are equally likely: which of them is the greedy one depends on the
    machine.
    """
    known = _measured.get(id(model))
    if known is None:
        vocab = log_probabilities(model, [0], 1).shape[-1]
        known = _measured[id(model)] = model, _MARGIN * last_bit(model, varied(vocab, _N_TOKENS))
    return known[1]


def equally_likely(model: Module, tokens: Sequence[int], rivals: tuple[int, int]) -> bool:
    """Whether rounding decides which of two tokens follows `tokens`."""
    last = log_probabilities(model, tokens, len(tokens))[-1]
    gap = cast(float, mx.abs(last[rivals[0]] - last[rivals[1]]).item())
    return gap < most_rounding(model)


def varied(vocab: int, n_tokens: int) -> list[int]:
    """A text that neither repeats itself nor is drawn anew each time."""
    return [(7 + i * i * 31 + i // 7 * 13) % vocab for i in range(n_tokens)]


def last_bit(model: Module, tokens: Sequence[int]) -> float:
    """The largest change of a log-probability when every weight moves by its last bit."""
    weights = cast("Callable[[], dict[str, object]]", model.parameters)()
    before = log_probabilities(model, tokens, _CHUNK)
    most = 0.0
    try:
        for draw in range(_DRAWS):
            model.update(_moved(weights, mx.random.key(draw)))
            change = mx.abs(log_probabilities(model, tokens, _CHUNK) - before)
            # A token that a model forbids has probability zero both times.
            most = max(most, cast(float, mx.where(mx.isnan(change), 0, change).max().item()))
    finally:
        model.update(weights)
    return most


def _moved(weights: dict[str, object], key: mx.array) -> dict[str, object]:
    keys = iter(mx.random.split(key, 10_000))

    def move(weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        # In half precision a weight's last bit costs far more than any sum, which fp32 holds.
        assert weight.dtype == mx.float32, "the bound is for models in fp32"
        sign = mx.random.randint(0, 2, weight.shape, key=next(keys)) * 2 - 1
        return weight * (1 + sign * mx.finfo(weight.dtype).eps).astype(weight.dtype)

    return cast("dict[str, object]", tree_map(move, weights))
