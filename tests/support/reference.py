"""What plain mlx-lm answers: the reference that every path through the engine must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step

import semantic.adapters.mlx  # noqa: F401  loads OpenBLAS before MLX


def generate(
    model: Module, prompt: Sequence[int], max_tokens: int, eos: frozenset[int] = frozenset()
) -> list[int]:
    """Greedy tokens of mlx-lm's own generation loop, with its own caches; the EOS included."""
    tokens = []
    for token, _ in generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens):
        tokens.append(int(token))
        if token in eos:
            break
    return tokens


def logit_gap(model: Module, tokens: Sequence[int], rivals: tuple[int, int]) -> float:
    """How far apart two next tokens are for the model alone, relative to the largest logit."""
    logits = model(mx.array([list(tokens)]))[0, -1].astype(mx.float32)
    gap = mx.abs(logits[rivals[0]] - logits[rivals[1]]) / mx.abs(logits).max()
    return cast(float, gap.item())
