"""Reference answers of plain mlx-lm, which every path through the engine must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step

import semantic.adapters.mlx  # noqa: F401  loads OpenBLAS before MLX
from tests.support.rounding import equally_likely


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


def same_answer(
    model: Module, prompt: Sequence[int], found: Sequence[int], expected: Sequence[int]
) -> bool:
    """Whether greedy tokens are the expected ones, but for a choice between equally likely tokens.

    From such a choice on `found` must be what mlx-lm answers to the tokens before.
    """
    for i, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            if not equally_likely(model, [*prompt, *expected[:i]], (one, other)):
                return False
            so_far, rest = [*prompt, *found[: i + 1]], found[i + 1 :]
            return not rest or is_answer(model, so_far, rest, len(rest))
    return len(found) == len(expected)


def is_answer(model: Module, prompt: Sequence[int], found: Sequence[int], max_tokens: int) -> bool:
    """Whether `found` is what mlx-lm answers to `prompt`, as `same_answer` compares."""
    return same_answer(model, prompt, found, generate(model, prompt, max_tokens))


def logit_gap(model: Module, tokens: Sequence[int], rivals: tuple[int, int]) -> float:
    """How far apart two next tokens are for the model alone, relative to the largest logit."""
    logits = model(mx.array([list(tokens)]))[0, -1].astype(mx.float32)
    gap = mx.abs(logits[rivals[0]] - logits[rivals[1]]) / mx.abs(logits).max()
    return cast(float, gap.item())
