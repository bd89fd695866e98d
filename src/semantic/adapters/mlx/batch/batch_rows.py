"""The caches of a decode batch's rows, and the model's next step over them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from semantic.adapters.mlx.arrays import Late, async_eval
from semantic.adapters.mlx.kv_cache.contiguous.cache import RaggedBatch
from semantic.adapters.mlx.kv_cache.forms import LayerCache
from semantic.adapters.mlx.kv_cache.merged import BatchLayer, merge, pad, state_shapes, states
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import LateMetadata
from semantic.adapters.mlx.kv_cache.paged.cache import PagedBatch
from semantic.domain.value_objects import Lane


class _Group(NamedTuple):
    n_rows: int
    layers: list[BatchLayer]


class _Prepared(NamedTuple):
    """A pass over tokens that come later."""

    inputs: Late
    metadata: LateMetadata
    layers: list[PagedBatch]
    logits: mx.array


class BatchRows:
    """The caches of a batch's rows. `logits` computes the model's next step over them."""

    def __init__(self, model: Module, lane: Lane | None = None) -> None:
        """In a `lane`, attention computes each row apart. If the lane splits steps, a step has at
        most its rows."""
        self.model = model
        self._by_row = lane is not None
        self._lane = Lane() if lane is None else lane
        self._groups: list[_Group] = []
        self._drafted: list[PagedBatch] = []  # the pass that `keep` ends
        self._prepared: _Prepared | None = None

    @property
    def layers(self) -> list[BatchLayer]:
        """The batch's cache in each layer. Callers may replace the caches."""
        return self._groups[0].layers if self._groups else []

    @property
    def states(self) -> list[mx.array]:
        """The arrays of all recurrent states after a step. Callers must evaluate them."""
        return states(self.layers)

    def join(self, sequences: Sequence[Sequence[LayerCache]]) -> None:
        """Append `sequences` to the batch, with one row per sequence."""
        self._prepared = None
        most = self._lane.most_per_step or len(sequences)
        runs = [list(run) for _, run in itertools.groupby(sequences, state_shapes)]
        for members in (run[i : i + most] for run in runs for i in range(0, len(run), most)):
            layers = [merge(layer) for layer in zip(*members, strict=True)]
            for layer in layers:
                if self._by_row and isinstance(layer, RaggedBatch):
                    layer.as_rows()
            self._groups.append(_Group(len(members), layers))
        self._join_groups()

    def leave(self, at: int, n_unread: int = 0) -> list[LayerCache]:
        """Remove row number `at` and return its caches, without their last `n_unread` tokens."""
        number, self._prepared = 0, None
        while at >= self._groups[number].n_rows:
            at -= self._groups[number].n_rows
            number += 1
        n_rows, layers = self._groups[number]
        caches = [
            layer.extract(at, n_unread) if isinstance(layer, PagedBatch) else layer.extract(at)
            for layer in layers
        ]
        if n_rows == 1:
            del self._groups[number]
        else:
            keep = [i for i in range(n_rows) if i != at]
            for layer in layers:
                layer.filter(keep)
            self._groups[number] = _Group(n_rows - 1, layers)
        return cast(list[LayerCache], caches)

    def logits(self, inputs: mx.array) -> mx.array:
        """Append one token of `inputs` to each row. Return the step's logits, (rows, vocab)."""
        self._prepared = None
        if len(self._groups) == 1:
            return self._group_logits(inputs, self._groups[0].layers)
        found: list[mx.array] = []
        at = 0
        for n_rows, layers in self._groups:
            found.append(self._group_logits(inputs[at : at + n_rows], layers))
            at += n_rows
        self._join_groups()
        return mx.concatenate(found)

    def drafted_logits(self, tokens: Sequence[int], counts: Sequence[int]) -> mx.array:
        """Append `counts[i]` of `tokens` to row i, all in pages. Return the logits after each
        token, (tokens, vocab). Call `keep` before any other method but `prepare`."""
        ((_, layers),) = self._groups
        paged = [cast(PagedBatch, layer) for layer in layers]
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.metadata.fill(real := paged[0].metadata_of(counts)):
            prepared.inputs.write(tokens)
            async_eval(prepared.inputs.array)
            for layer in prepared.layers:
                layer.fill(real)
            self._drafted = prepared.layers
            return prepared.logits[: len(tokens)]
        self._drafted = [layer.drafted(counts) for layer in paged]
        return self._group_logits(mx.array([*tokens], mx.uint32), self._drafted)

    def prepare(self) -> None:
        """Build the pass after that of `drafted_logits`, for as many tokens. The device need not
        wait for it later. Call this while `drafted_logits` computes."""
        if not self._drafted or not all(layer.can_follow for layer in self._drafted):
            return
        metadata = self._drafted[0].late_metadata()
        layers = [layer.following(metadata) for layer in self._drafted]
        inputs = Late(metadata.n_rows, mx.uint32)
        self._prepared = _Prepared(
            inputs, metadata, layers, self._group_logits(inputs.array, layers)
        )

    def keep(self, counts: Sequence[int]) -> None:
        """Keep only the first `counts[i]` tokens that `drafted_logits` appended to row i."""
        for layer, drafted in zip(self.layers, self._drafted, strict=True):
            cast(PagedBatch, layer).keep(drafted, counts)
        self._drafted = []

    def _join_groups(self) -> None:
        joined: list[_Group] = []
        for group in self._groups:
            n_rows = group.n_rows + (joined[-1].n_rows if joined else 0)
            fits = joined and n_rows <= (self._lane.most_per_step or n_rows)
            if fits and state_shapes(joined[-1].layers) == state_shapes(group.layers):
                first = joined.pop()
                for mine, more in zip(first.layers, group.layers, strict=True):
                    mine.extend(more)
                joined.append(_Group(first.n_rows + group.n_rows, first.layers))
            else:
                joined.append(group)
        self._groups = joined

    def _group_logits(self, inputs: mx.array, layers: Sequence[BatchLayer]) -> mx.array:
        n = inputs.shape[0]
        n_rows = max(layer.n_rows for layer in layers)
        for layer in layers:
            pad(layer, n_rows)
        if n_rows > n:
            inputs = mx.pad(inputs, (0, n_rows - n))
        logits = cast(mx.array, self.model(inputs[:, None], cache=layers))[:, -1, :]
        return logits[:n] if n_rows > n else logits
