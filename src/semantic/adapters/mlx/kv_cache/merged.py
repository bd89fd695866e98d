"""A layer's caches of several sequences as one layer of a batch, by the kind of cache.

Knows the kinds, ours and mlx-lm's; neither models nor requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache.contiguous.cache import FullCache, Mask, RaggedBatch
from semantic.adapters.mlx.kv_cache.contiguous.slots import SlottedBatch
from semantic.adapters.mlx.kv_cache.contiguous.state_batch import StateBatch


class BatchLayer(Protocol):
    """One layer of a batch; see `RaggedBatch`, `PagedBatch`, `StateBatch`."""

    @property
    def n_rows(self) -> int: ...

    @property
    def state(self) -> object: ...

    @property
    def nbytes(self) -> int: ...

    def extend(self, other: Self) -> None: ...

    def filter(self, batch_indices: Sequence[int]) -> None: ...

    def extract(self, idx: int) -> object: ...


class _Merges(Protocol):
    def merge(self, caches: Sequence[object]) -> BatchLayer: ...


def merge(caches: Sequence[object]) -> BatchLayer:
    """One layer's caches, one per sequence, as a layer of a batch."""
    first = caches[0]
    if isinstance(first, ArraysCache):
        return cast(BatchLayer, StateBatch(cast("Sequence[ArraysCache]", caches)))
    if isinstance(first, FullCache) and on_cpu():
        return cast(BatchLayer, SlottedBatch(cast("list[FullCache]", list(caches))))
    if isinstance(first, RotatingKVCache):
        rows = [MlxLmRow(cast(_KeyValues, one)) for one in caches]
        return cast(BatchLayer, RaggedBatch(rows))
    return cast(_Merges, first).merge(caches)


def take_out(layer: BatchLayer, idx: int) -> object:
    """The cache of row `idx`, as it was before it was merged."""
    found = layer.extract(idx)
    return found.cache if isinstance(found, MlxLmRow) else found


def pad(layer: BatchLayer, n_rows: int) -> None:
    """Let padding follow the rows of states, so that all layers of a step have `n_rows` rows."""
    if isinstance(layer, StateBatch):
        layer.pad_to(n_rows)


def states(layers: Sequence[BatchLayer]) -> list[mx.array]:
    """The arrays of all states, which no logits of their own step depend on."""
    found: list[mx.array] = []
    for layer in layers:
        if isinstance(layer, StateBatch):
            found += layer.arrays
    return found


StateShapes = tuple[tuple[int, ...] | None, ...]


def state_shapes(caches: Sequence[object]) -> StateShapes:
    """Shapes of a sequence's states, or of all sequences' of a batch, without the rows.

    None where nothing was computed yet: to some models no state is not zeros. Sequences whose
    shapes differ cannot share a step.
    """
    found: list[tuple[int, ...] | None] = []
    for cache in caches:
        if isinstance(cache, ArraysCache):
            found += [None if one is None else one.shape[1:] for one in _arrays(cache)]
    return tuple(found)


def _arrays(cache: ArraysCache) -> list[mx.array | None]:
    if isinstance(cache, StateBatch):
        return cache.example
    return cast("list[mx.array | None]", cache.cache)


class _KeyValues(Protocol):
    """mlx-lm's RotatingKVCache."""

    offset: int
    state: object
    nbytes: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]: ...

    def make_mask(self, n: int, *, return_array: bool, window_size: int | None) -> Mask: ...

    def size(self) -> int: ...

    def empty(self) -> bool: ...


class MlxLmRow:
    """mlx-lm's window that keeps its first tokens as a row of a `RaggedBatch`."""

    def __init__(self, cache: _KeyValues) -> None:
        self.cache = cache

    @property
    def offset(self) -> int:
        """Position of the next token."""
        return self.cache.offset

    def append(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Append a token, (1, kv_heads, 1, head_dim) each; returns all that it may attend to."""
        return self.cache.update_and_fetch(k, v)

    def mask_for(self, n: int) -> Mask:
        return self.cache.make_mask(n, return_array=False, window_size=None)

    @property
    def state(self) -> object:
        """The arrays to evaluate."""
        return self.cache.state

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    def size(self) -> int:
        """Tokens held."""
        return self.cache.size()

    def empty(self) -> bool:
        return self.cache.empty()
