"""Decode batch that pads its rows once they are stable, for GPUs where caches have no pages.

Joins and leaves work on sequences in caches of their own. After a few steps without any, the batch
copies the rows into one array of mlx-lm's batch cache, layer by layer: one layer exists twice
meanwhile, none afterwards. A padded batch takes its rows' capacity and the padding, so capacities
must not differ much. Also chooses a model's decode batch. Knows devices and forms of caches, but
not which requests decode.
"""

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
from semantic.domain.value_objects import (
    LayerKind,
    ModelCacheSpec,
    SequenceId,
    whole_blocks,
)
from semantic.ports.generation import at_once

Pads = Callable[[Sequence[int]], bool]
"""Decides whether sequences of these capacities (tokens each) decode padded."""

STABLE_STEPS = 4
"""Steps without a join or leave before the batch copies rows: joins and leaves are bursty."""


class PaddedLayer(BatchKVCache):
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
        super().__init__(self._paddings)
        self.state = keys, values, mx.array(lengths), mx.array(self._paddings), longest
        for row in rows:
            row.buffer = LentBuffer(row.buffer)

    def given_back(self) -> RaggedBatch[FullCache]:
        """Copy all rows back to their own buffers, with the capacity reserved meanwhile."""
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
        """Rows of a step; none pads."""
        return len(self._rows)


class PaddedBatch(ContinuousBatch):
    """A `DecodeBatch` for sequences whose caches are all `FullCache`s.
    While ragged, it calls `pads` before each step that follows `stable_steps` undisturbed steps."""

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
        """True if the next step computes padded rows."""
        return any(isinstance(layer, PaddedLayer) for layer in self._layers)

    @property
    def _layers(self) -> list[RaggedBatch[FullCache] | PaddedLayer]:
        layers: object = self._caches.layers
        return cast("list[RaggedBatch[FullCache] | PaddedLayer]", layers)

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
        """Return each sequence's capacity in tokens, equal in all layers, while not padded."""
        first = next((layer for layer in self._layers if isinstance(layer, RaggedBatch)), None)
        return [row.buffer.capacity for row in first.rows] if first else []


def _padded(rows: Sequence[mx.array], lengths: Sequence[int], capacity: int) -> mx.array:
    """Return (batch, kv_heads, capacity, head_dim): each row's first tokens, padded on the left."""
    _, heads, _, dim = rows[0].shape
    padded = mx.zeros((len(rows), heads, capacity, dim), rows[0].dtype)
    stop = max(lengths)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if length:
            padded[i : i + 1, :, stop - length : stop] = row[..., :length, :]
    return padded


_MAX_PADDING_RATIO = 1.5
"""Most memory of a padded batch, as a multiple of its sequences' capacity: a pool's budget counts
capacity without padding, and attention computes the padding too."""


def even(capacities: Sequence[int]) -> bool:
    """Return whether several sequences of these capacities (tokens each) need little padding."""
    padded = len(capacities) * max(capacities, default=0)
    return len(capacities) > 1 and padded <= _MAX_PADDING_RATIO * sum(capacities)


PadsFor = Callable[[Module], Pads | None]
"""Returns which batches of a model decode padded; None if none does."""


def pads_here(model: Module) -> Pads | None:
    """Return `even` on a GPU, where `benchmarks.gpu_padded` takes at most nine tenths of the time
    of ragged rows, and less with each row; None on a CPU, where padding gains nothing."""
    return None if on_cpu() or not padding_works(model) else even


def padding_works(model: Module) -> bool:
    """Return whether a batch computes the right logits with mlx-lm's own padded caches. Also tests
    beyond windows, chunks and budgets of sparse attention: there padding may move a choice."""
    probe = LogitsProbe(model)
    with probe.narrowed() as narrow:
        if narrow is not None and at_once(narrow.computing()) and not narrow.accepts_padding():
            return False
    return probe.accepts_padding()


def can_pad(spec: ModelCacheSpec, layers: CacheLayers) -> bool:
    """Return whether all layers keep every token, in contiguous caches of ours."""
    if not isinstance(layers, ContiguousLayers) or not all(layers.ragged):
        return False
    return all(layer.kind is LayerKind.FULL for layer in spec.layers)


def new_batch(
    model: Module,
    layers: CacheLayers,
    pads: Pads | None,
    agree: Agree | None = None,
) -> DecodeBatch:
    """Return an empty batch for sequences with the caches of `layers`.
    Raises UnsupportedModelError if ranks cannot `agree` on its tokens."""
    if not layers.together:
        return OneByOne(model, agree)
    if not all(layers.ragged):
        if agree is not None:
            raise UnsupportedModelError(
                "batches of this model need mlx-lm's own caches: start it on one device"
            )
        return GeneratorBatch(model)
    return ContinuousBatch(model, agree=agree) if pads is None else PaddedBatch(model, pads)
