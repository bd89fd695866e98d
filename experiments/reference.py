"""Reference answers of plain mlx-lm with its own caches, which every path must equal.

Knows nothing of blocks, pools or our caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, the end token included.

    `smallest_gap` is the least distance, in log-probability, between a token chosen and the
    second likeliest: rounding below it cannot change the answer.
    """

    tokens: tuple[int, ...]
    smallest_gap: float


def greedy(
    model: Module, prompt: Sequence[int], max_tokens: int, eos: frozenset[int] = frozenset()
) -> Answer:
    """mlx-lm's own generation loop on `prompt`."""
    tokens: list[int] = []
    smallest_gap = float("inf")
    for token, logprobs in generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens):
        tokens.append(int(token))
        second, first = cast(list[float], mx.topk(logprobs, 2).astype(mx.float32).tolist())
        smallest_gap = min(smallest_gap, abs(first - second))
        if token in eos:
            break
    return Answer(tuple(tokens), smallest_gap)
