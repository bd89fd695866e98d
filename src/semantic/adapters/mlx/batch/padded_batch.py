"""A decode batch that pads its rows. It serves GPUs without paged caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import BatchKVCache

from semantic.adapters.mlx.batch.decode_batch import (
    Agree,
    ContinuousBatch,
    DecodeBatch,
    NewSequence,
)
from semantic.adapters.mlx.batch.draft_costs import StepSeconds
from semantic.adapters.mlx.batch.generator_batch import GeneratorBatch, OneByOne
from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache.contiguous.cache import (
    BufferRange,
    FullCache,
    KVBuffer,
    LentBuffer,
    RaggedBatch,
)
from semantic.adapters.mlx.kv_cache.contiguous.layers import ContiguousLayers
from semantic.adapters.mlx.kv_cache.forms import CacheLayers, LayerCache
from semantic.adapters.mlx.kv_cache.probe import LogitsProbe
from semantic.domain.errors import UnsupportedModelError
from semantic.domain.value_objects import Lane, LayerKind, ModelCacheSpec, SequenceId, whole_blocks
from semantic.ports.generation import at_once

Pads = Callable[[Sequence[int]], bool]
"""Takes the capacities of a batch's sequences, in tokens. Returns whether to pad the batch."""

STABLE_STEPS = 4
"""The number of steps without a join or leave after which a batch pads its rows."""


class PaddedLayer(BatchKVCache):
    """One layer's cache of a padded batch. It holds the tokens of `rows`."""

    def __init__(self, rows: Sequence[FullCache]) -> None:
        """Copy the tokens of `rows`, and replace the rows' buffers with `LentBuffer`s."""
        lengths = [row.offset for row in rows]
        longest = max(lengths)
        capacity = max(row.buffer.capacity for row in rows)
        keys = _padded([row.buffer.k for row in rows], lengths, capacity)
        values = _padded([row.buffer.v for row in rows], lengths, capacity)
        mx.eval(keys, values)
        self._rows = list(rows)
        self._paddings = [longest - length for length in lengths]
        super().__init__(self._paddings)
        self.state = keys, values, mx.array(lengths), mx.array(self._paddings), longest
        for row in rows:
            row.buffer = LentBuffer(row.buffer)

    def given_back(self) -> RaggedBatch[FullCache]:
        """Copy each row into its own buffer, and return the rows as a ragged batch."""
        keys, values, _, _, stop = cast(
            tuple[mx.array, mx.array, mx.array, mx.array, int], self.state
        )
        buffers = []
        for i, (row, padding) in enumerate(zip(self._rows, self._paddings, strict=True)):
            mine = BufferRange(KVBuffer(keys[i : i + 1], values[i : i + 1]), padding, stop)
            capacity = max(row.buffer.capacity, whole_blocks(stop - padding))
            buffers.append(KVBuffer.gather([mine], capacity))
        mx.eval([(buffer.k, buffer.v) for buffer in buffers])
        for row, padding, buffer in zip(self._rows, self._paddings, buffers, strict=True):
            row.buffer, row.offset = buffer, stop - padding
        return RaggedBatch(list(self._rows))

    @property
    def n_rows(self) -> int:
        """The number of rows in a step."""
        return len(self._rows)


class PaddedBatch(ContinuousBatch):
    """A `DecodeBatch` that pads its rows after `stable_steps` steps without joins or leaves. All
    caches must be `FullCache`s."""

    def __init__(self, model: Module, pads: Pads, stable_steps: int = STABLE_STEPS) -> None:
        super().__init__(model)
        self._pads = pads
        self._stable_steps = stable_steps
        self._undisturbed = 0  # steps since the last join or leave

    def join(self, joining: Sequence[NewSequence]) -> None:
        self._unpad()
        super().join(joining)
        for layer in self._layers:
            if isinstance(layer, RaggedBatch):
                layer.as_rows()

    def leave(self, sequence: SequenceId) -> list[LayerCache]:
        self.settle()
        self._unpad()
        return super().leave(sequence)

    def _launch(self, inputs: mx.array) -> None:
        if (
            self._undisturbed >= self._stable_steps
            and not self.padded
            and self._pads(self._capacities())
        ):
            self._pad()
        self._undisturbed += 1
        super()._launch(inputs)

    @property
    def padded(self) -> bool:
        """True if the rows are padded now."""
        return any(isinstance(layer, PaddedLayer) for layer in self._layers)

    @property
    def _layers(self) -> list[RaggedBatch[FullCache] | PaddedLayer]:
        layers: object = self._caches.layers
        return cast("list[RaggedBatch[FullCache] | PaddedLayer]", layers)

    # Work layer by layer: at most one layer exists twice, and an error leaves every layer valid.

    def _pad(self) -> None:
        layers = self._layers
        for number, layer in enumerate(layers):
            if isinstance(layer, RaggedBatch):
                layers[number] = PaddedLayer(layer.rows)

    def _unpad(self) -> None:
        self._undisturbed = 0
        layers = self._layers
        for number, layer in enumerate(layers):
            if isinstance(layer, PaddedLayer):
                layers[number] = layer.given_back()

    def _capacities(self) -> list[int]:
        first = next((layer for layer in self._layers if isinstance(layer, RaggedBatch)), None)
        return [row.buffer.capacity for row in first.rows] if first else []


def _padded(rows: Sequence[mx.array], lengths: Sequence[int], capacity: int) -> mx.array:
    """Pad each row on the left. Return an array, (batch, kv_heads, capacity, head_dim)."""
    _, heads, _, dim = rows[0].shape
    padded = mx.zeros((len(rows), heads, capacity, dim), rows[0].dtype)
    stop = max(lengths)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if length:
            padded[i : i + 1, :, stop - length : stop] = row[..., :length, :]
    return padded


_MAX_PADDING_RATIO = 1.5
"""The maximum capacity of a padded batch, relative to the sum of its sequences' capacities."""


def even(capacities: Sequence[int]) -> bool:
    """Return whether sequences of `capacities` tokens need little padding in one batch."""
    padded = len(capacities) * max(capacities, default=0)
    return len(capacities) > 1 and padded <= _MAX_PADDING_RATIO * sum(capacities)


PadsFor = Callable[[Module], Pads | None]
"""Returns a model's function `Pads`; None if batches of the model have no padding."""


def pads_here(model: Module) -> Pads | None:
    """Return the rule for padding, `even`. Return None if this device should not pad this model.

    In `benchmarks.gpu_padded`, padded rows take at most 90 % of the time of ragged rows.
    """
    return None if on_cpu() or not padding_works(model) else even


def padding_works(model: Module) -> bool:
    """Return whether a batch in mlx-lm's own padded caches has the right logits."""
    probe = LogitsProbe(model)
    with probe.narrowed() as narrow:
        if narrow is not None and at_once(narrow.computing()) and not narrow.accepts_padding():
            return False
    return probe.accepts_padding()


def can_pad(spec: ModelCacheSpec, layers: CacheLayers) -> bool:
    """Return whether all layers keep every token in our contiguous caches."""
    if not isinstance(layers, ContiguousLayers) or not all(layers.ragged):
        return False
    return all(layer.kind is LayerKind.FULL for layer in spec.layers)


def new_batch(
    model: Module,
    layers: CacheLayers,
    pads: Pads | None,
    agree: Agree | None = None,
    lane: Lane | None = None,
    seconds: StepSeconds | None = None,
) -> DecodeBatch:
    """Return an empty batch for sequences with caches from `layers`. Raises UnsupportedModelError
    if this batch does not support `agree`."""
    if not layers.together:
        return OneByOne(model, agree)
    if not all(layers.ragged):
        if agree is not None:
            raise UnsupportedModelError(
                "cannot batch this model on several ranks: start it on one device"
            )
        return GeneratorBatch(model)
    if pads is not None:
        return PaddedBatch(model, pads)
    return ContinuousBatch(model, lane=lane, agree=agree, seconds=seconds)
