"""The caches of a batch's rows and the model's step over them, layer by layer.

Rows are computed together but where their states differ in shape: one that joins without a state
that it will have is apart for a step, since to some models no state is not zeros. Knows how caches
are merged; not sampling.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from semantic.adapters.mlx.kv_cache.forms import LayerCache
from semantic.adapters.mlx.kv_cache.merged import (
    BatchLayer,
    merge,
    pad,
    state_shapes,
    states,
    take_out,
)


class _Group(NamedTuple):
    """Rows that are computed together: how many, and their caches, layer by layer."""

    n_rows: int
    layers: list[BatchLayer]


class BatchRows:
    """Rows of caches. The first of a batch come first; those that join follow."""

    def __init__(self, model: Module) -> None:
        self.model = model
        self._groups: list[_Group] = []

    @property
    def layers(self) -> list[BatchLayer]:
        """The caches of the rows that are computed together, layer by layer; may be replaced."""
        return self._groups[0].layers if self._groups else []

    @property
    def states(self) -> list[mx.array]:
        """Arrays of states: to evaluate with a step, whose logits do not depend on all of them."""
        return states(self.layers)

    def join(self, sequences: Sequence[Sequence[LayerCache]]) -> None:
        """Add sequences after all others, in order."""
        for _, run in itertools.groupby(sequences, state_shapes):
            members = list(run)
            layers = [merge(layer) for layer in zip(*members, strict=True)]
            self._groups.append(_Group(len(members), layers))
        self._join_groups()

    def leave(self, at: int) -> list[LayerCache]:
        """Remove row number `at`; returns its caches."""
        number = 0
        while at >= self._groups[number].n_rows:
            at -= self._groups[number].n_rows
            number += 1
        n_rows, layers = self._groups[number]
        caches = [take_out(layer, at) for layer in layers]
        if n_rows == 1:
            del self._groups[number]
        else:
            keep = [i for i in range(n_rows) if i != at]
            for layer in layers:
                layer.filter(keep)
            self._groups[number] = _Group(n_rows - 1, layers)
        return cast(list[LayerCache], caches)

    def logits(self, inputs: mx.array) -> mx.array:
        """The logits after one more token of each row, (rows, vocab)."""
        if len(self._groups) == 1:
            return self._group_logits(inputs, self._groups[0].layers)
        found: list[mx.array] = []
        at = 0
        for n_rows, layers in self._groups:
            found.append(self._group_logits(inputs[at : at + n_rows], layers))
            at += n_rows
        self._join_groups()
        return mx.concatenate(found)

    def _join_groups(self) -> None:
        """Make neighbours one group where their states have the same shapes."""
        joined: list[_Group] = []
        for group in self._groups:
            if joined and state_shapes(joined[-1].layers) == state_shapes(group.layers):
                first = joined.pop()
                for mine, more in zip(first.layers, group.layers, strict=True):
                    mine.extend(more)
                joined.append(_Group(first.n_rows + group.n_rows, first.layers))
            else:
                joined.append(group)
        self._groups = joined

    def _group_logits(self, inputs: mx.array, layers: Sequence[BatchLayer]) -> mx.array:
        """The same of rows that are computed together, without the logits of padding rows."""
        n = inputs.shape[0]
        n_rows = max(layer.n_rows for layer in layers)
        for layer in layers:
            pad(layer, n_rows)
        if n_rows > n:
            inputs = mx.pad(inputs, (0, n_rows - n))
        logits = cast(mx.array, self.model(inputs[:, None], cache=layers))[:, -1, :]
        return logits[:n] if n_rows > n else logits
