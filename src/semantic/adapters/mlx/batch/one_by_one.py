"""Decode batch whose sequences are computed one after the other, each with its own caches.

For models that mlx-lm can only compute alone: a step of so many sequences is as many forward
passes. Every sequence gets a token in each step, so that no stream waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from semantic.adapters.mlx.batch.decode_batch import Agree, ContinuousBatch
from semantic.adapters.mlx.batch.rows import BatchRows
from semantic.adapters.mlx.kv_cache.forms import LayerCache


class OneByOne(ContinuousBatch):
    """Implements `DecodeBatch` for any caches."""

    def __init__(self, model: Module, agree: Agree | None = None) -> None:
        super().__init__(model, agree=agree)
        self._caches = _RowsApart(model)


class _RowsApart(BatchRows):
    """Rows that are never computed together."""

    def __init__(self, model: Module) -> None:
        super().__init__(model)
        self._sequences: list[list[LayerCache]] = []

    def join(self, sequences: Sequence[Sequence[LayerCache]]) -> None:
        """See `BatchRows.join`."""
        self._sequences += map(list, sequences)

    def leave(self, at: int) -> list[LayerCache]:
        """See `BatchRows.leave`."""
        return self._sequences.pop(at)

    def logits(self, inputs: mx.array) -> mx.array:
        """See `BatchRows.logits`."""
        tokens = mx.split(inputs[:, None], inputs.shape[0])
        return mx.concatenate(
            [
                cast(mx.array, self.model(token, cache=caches))[:, -1, :]
                for token, caches in zip(tokens, self._sequences, strict=True)
            ]
        )
