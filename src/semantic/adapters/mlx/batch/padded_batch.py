"""Decode batch that pads its rows, with mlx-lm's batch cache, while that is faster.

Joins and leaves operate on sequences in caches of their own. After a few steps without any, the
rows are copied into one array per layer, layer by layer: one layer exists twice meanwhile, none
afterwards. A padded batch takes its rows' capacity and the padding. Knows no devices: the caller
decides when padding pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import BatchKVCache

from semantic.adapters.mlx.batch.decode_batch import ContinuousBatch, NewSequence
from semantic.adapters.mlx.kv_cache.contiguous.buffer import BufferRange, KVBuffer, LentBuffer
from semantic.adapters.mlx.kv_cache.contiguous.cache import FullCache, Mask, RaggedBatch
from semantic.adapters.mlx.kv_cache.forms import LayerCache
from semantic.domain.value_objects import SequenceId, whole_blocks

Pads = Callable[[Sequence[int]], bool]
"""Whether sequences of these capacities (tokens each) should decode padded."""

STABLE_STEPS = 4
"""Steps without a join or leave before rows are copied: joins and leaves are bursty."""

_State = tuple[mx.array, mx.array, mx.array, mx.array, int]
"""Of a BatchKVCache: keys, values, each row's next position and padding, length in use."""


class PaddedLayer:
    """One layer of a padded batch, as a model calls it; holds the tokens of `rows` meanwhile."""

    def __init__(self, rows: Sequence[FullCache]) -> None:
        """Copy all rows and replace their buffers with `LentBuffer`s."""
        lengths = [row.offset for row in rows]
        longest = max(lengths)
        capacity = max(row.buffer.capacity for row in rows)
        keys = _padded([row.buffer.k for row in rows], lengths, capacity)
        values = _padded([row.buffer.v for row in rows], lengths, capacity)
        mx.eval(keys, values)
        self._rows = list(rows)
        self._paddings = [longest - length for length in lengths]
        self._batch = BatchKVCache(self._paddings)
        offsets = mx.array(lengths)
        self._set_state((keys, values, offsets, mx.array(self._paddings), longest))
        for row in rows:
            row.buffer = LentBuffer(row.buffer)

    def given_back(self) -> RaggedBatch[FullCache]:
        """Copy all rows back to buffers of their own, of the capacity reserved meanwhile."""
        keys, values, _, _, stop = self._state()
        buffers = []
        for i, (row, padding) in enumerate(zip(self._rows, self._paddings, strict=True)):
            mine = BufferRange(KVBuffer(keys[i : i + 1], values[i : i + 1]), padding, stop)
            capacity = max(row.buffer.capacity, whole_blocks(stop - padding))
            buffers.append(KVBuffer.gather([mine], capacity))
        mx.eval([(buffer.k, buffer.v) for buffer in buffers])
        for row, padding, buffer in zip(self._rows, self._paddings, buffers, strict=True):
            row.buffer, row.offset = buffer, stop - padding
        return RaggedBatch(list(self._rows))

    # What a batch and a model call

    @property
    def n_rows(self) -> int:
        """Rows of a step: none is padding."""
        return len(self._rows)

    @property
    def offset(self) -> mx.array:
        """Position of the next token of each row, (batch,)."""
        return self._batch.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a token to each row; returns all rows' keys and values, padding included."""
        return cast(tuple[mx.array, mx.array], self._batch.update_and_fetch(keys, values))

    @property
    def keys(self) -> mx.array:
        """All rows' keys: models make other computations depend on them, or them on others."""
        return cast(mx.array, self._batch.keys)

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        setattr(self._batch, "keys", keys)  # noqa: B010  mlx-lm's is None at first

    @property
    def values(self) -> mx.array:
        """All rows' values; see `keys`."""
        return cast(mx.array, self._batch.values)

    @values.setter
    def values(self, values: mx.array) -> None:
        setattr(self._batch, "values", values)  # noqa: B010  mlx-lm's is None at first

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """A mask that hides the padding."""
        mask = self._batch.make_mask(N, return_array=return_array, window_size=window_size)
        return cast(mx.array, mask)

    def _state(self) -> _State:
        return cast(_State, self._batch.state)

    def _set_state(self, state: _State) -> None:
        self._batch.state = state


class PaddedBatch(ContinuousBatch):
    """Implements `DecodeBatch` for sequences all of whose caches are `FullCache`s.

    `pads` is called before every step that follows `stable_steps` steps without a join or leave,
    until the batch is padded.
    """

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
        """Whether the next step is computed over padded rows."""
        return any(isinstance(layer, PaddedLayer) for layer in self._layers)

    @property
    def _layers(self) -> list[RaggedBatch[FullCache] | PaddedLayer]:
        return cast(list[RaggedBatch[FullCache] | PaddedLayer], self._caches.layers)

    # Layer by layer: at most one exists twice, and after an error each layer is valid by itself.

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
        """Each sequence's capacity in tokens, equal in all layers, while not padded."""
        first = next((layer for layer in self._layers if isinstance(layer, RaggedBatch)), None)
        return [row.buffer.capacity for row in first.rows] if first else []


def _padded(rows: Sequence[mx.array], lengths: Sequence[int], capacity: int) -> mx.array:
    """(batch, kv_heads, capacity, head_dim): the first tokens of each row, padded on the left."""
    _, heads, _, dim = rows[0].shape
    padded = mx.zeros((len(rows), heads, capacity, dim), rows[0].dtype)
    stop = max(lengths)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if length:
            padded[i : i + 1, :, stop - length : stop] = row[..., :length, :]
    return padded
