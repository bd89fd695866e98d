"""A batch of our own that decodes padded, with mlx-lm's batch cache, while that is faster.

Whoever joins or leaves finds every sequence in a cache of its own; once a batch has been calm for
a few steps, its rows are copied into one array per layer. While they are copied, one layer is there
twice; between switches none is, so a padded batch takes what it has room for and its padding. Knows
no devices: when to pad is told by whoever makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import BatchKVCache

from semantic.adapters.mlx.batch.decode_batch import ContinuousBatch, Emitted, NewSequence
from semantic.adapters.mlx.kv_cache.contiguous.buffer import BufferRange, KVBuffer
from semantic.adapters.mlx.kv_cache.contiguous.cache import FullCache
from semantic.adapters.mlx.kv_cache.contiguous.ragged_batch import Mask, RaggedBatch
from semantic.adapters.mlx.kv_cache.forms import LayerCache
from semantic.domain.value_objects import SequenceId, whole_blocks

Pads = Callable[[Sequence[int]], bool]
"""Whether sequences with room for that many tokens each should decode padded."""

STABLE_STEPS = 4
"""Steps without a join or a leave before rows are copied: sequences come and go in swarms."""

_State = tuple[mx.array, mx.array, mx.array, mx.array, int]
"""Of a BatchKVCache: keys and values, each row's next position and padding, columns in use."""


class LentBuffer(KVBuffer):
    """In place of a buffer whose tokens are in a padded batch: how large it has to be again."""

    __slots__ = ("_token_bytes",)

    def __init__(self, buffer: KVBuffer) -> None:
        (_, heads, _, k_dim), v_dim = buffer.k.shape, buffer.v.shape[3]
        super().__init__(
            mx.zeros((1, heads, 0, k_dim), buffer.k.dtype),
            mx.zeros((1, heads, 0, v_dim), buffer.v.dtype),
        )
        self.capacity = buffer.capacity
        self._token_bytes = buffer.nbytes // buffer.capacity

    @property
    def nbytes(self) -> int:
        """What is reserved for the sequence, wherever its tokens are."""
        return self.capacity * self._token_bytes

    def resize(self, kept: range, capacity: int) -> None:  # noqa: ARG002
        """Only the number: nothing is here that could move."""
        self.capacity = capacity


class PaddedLayer:
    """One layer of a padded batch, as a model calls it; it has the tokens that `rows` lent it."""

    def __init__(self, rows: Sequence[FullCache]) -> None:
        """Copies all rows, and takes them from their buffers."""
        lengths = [row.offset for row in rows]
        longest = max(lengths)
        room = max(row.buffer.capacity for row in rows)
        keys = _padded([row.buffer.k for row in rows], lengths, room)
        values = _padded([row.buffer.v for row in rows], lengths, room)
        mx.eval(keys, values)
        self._rows = list(rows)
        self._paddings = [longest - length for length in lengths]
        self._batch = BatchKVCache(self._paddings)
        offsets = mx.array(lengths)
        self._set_state((keys, values, offsets, mx.array(self._paddings), longest))
        for row in rows:
            row.buffer = LentBuffer(row.buffer)

    def given_back(self) -> RaggedBatch:
        """Copy all rows back to buffers of their own, as large as was reserved meanwhile."""
        keys, values, _, _, stop = self._state()
        buffers = []
        for i, (row, padding) in enumerate(zip(self._rows, self._paddings, strict=True)):
            mine = BufferRange(KVBuffer(keys[i : i + 1], values[i : i + 1]), padding, stop)
            room = max(row.buffer.capacity, whole_blocks(stop - padding))
            buffers.append(KVBuffer.gather([mine], room))
        mx.eval([(buffer.k, buffer.v) for buffer in buffers])
        for row, padding, buffer in zip(self._rows, self._paddings, buffers, strict=True):
            row.buffer, row.offset = buffer, stop - padding
        return RaggedBatch(list(self._rows))

    # What a model calls

    @property
    def offset(self) -> mx.array:
        """Position of the next token of each row, (batch,)."""
        return self._batch.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add a token to each row; all rows' keys and values, padding included."""
        return cast(tuple[mx.array, mx.array], self._batch.update_and_fetch(keys, values))

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

    `pads` is asked before every step of a calm batch that is not padded.
    """

    def __init__(self, model: Module, pads: Pads, calm: int = STABLE_STEPS) -> None:
        super().__init__(model)
        self._pads = pads
        self._calm = calm
        self._undisturbed = 0  # steps since somebody joined or left

    def join(self, joining: Sequence[NewSequence]) -> None:
        """See `DecodeBatch.join`."""
        self._unpad()
        super().join(joining)

    def leave(self, sequence: SequenceId) -> list[LayerCache]:
        """See `DecodeBatch.leave`."""
        self._unpad()
        return super().leave(sequence)

    def step(self) -> list[Emitted]:
        """See `DecodeBatch.step`."""
        if self._undisturbed >= self._calm and not self.padded and self._pads(self._rooms()):
            self._pad()
        self._undisturbed += 1
        return super().step()

    @property
    def padded(self) -> bool:
        """Whether the next step is computed over padded rows."""
        return any(isinstance(layer, PaddedLayer) for layer in self._layers)

    @property
    def _layers(self) -> list[RaggedBatch | PaddedLayer]:
        return cast(list[RaggedBatch | PaddedLayer], self._caches)

    # Layer by layer, so that no more than one is there twice; each alone is in a sound form.

    def _pad(self) -> None:
        layers = self._layers
        for number, layer in enumerate(layers):
            if isinstance(layer, RaggedBatch):
                layers[number] = PaddedLayer(_full_caches(layer))

    def _unpad(self) -> None:
        self._undisturbed = 0
        layers = self._layers
        for number, layer in enumerate(layers):
            if isinstance(layer, PaddedLayer):
                layers[number] = layer.given_back()

    def _rooms(self) -> list[int]:
        """Tokens that each sequence has room for, the same in every layer, while not padded."""
        first = next((layer for layer in self._layers if isinstance(layer, RaggedBatch)), None)
        return [row.buffer.capacity for row in _full_caches(first)] if first else []


def _full_caches(layer: RaggedBatch) -> list[FullCache]:
    return cast(list[FullCache], layer.rows)


def _padded(rows: Sequence[mx.array], lengths: Sequence[int], room: int) -> mx.array:
    """(batch, kv_heads, room, head_dim): the first tokens of each row, padded on the left."""
    _, heads, _, dim = rows[0].shape
    padded = mx.zeros((len(rows), heads, room, dim), rows[0].dtype)
    stop = max(lengths)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if length:
            padded[i : i + 1, :, stop - length : stop] = row[..., :length, :]
    return padded
