"""Merges several sequences' caches of one layer into one layer of a batch.

The merged states of a recurrent layer are arrays. Row i of each belongs to sequence i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache.contiguous.cache import BatchRow, FullCache, RaggedBatch
from semantic.adapters.mlx.kv_cache.contiguous.slots import SlottedBatch


@dataclass(frozen=True, slots=True)
class _Lent:
    """Replaces an array in a sequence's cache while a batch holds it."""

    nbytes: int


class _Row(Protocol):
    cache: list[mx.array | _Lent | None]


class StateBatch(ArraysCache):
    """A recurrent layer's states of all sequences in a batch. Models use it like ArraysCache.

    Either all sequences have a state or none has one.
    """

    cache: list[mx.array | None]  # type: ignore[assignment]  # entries may be None

    def __init__(self, rows: Sequence[ArraysCache]) -> None:
        super().__init__(len(rows[0].cache))
        self._rows: list[_Row] = []
        self._kept: list[int] = []  # rows of the arrays that are still in the batch
        self._joining: list[list[mx.array | None]] = []
        self._padding = 0
        self._settled = True
        given = cast("Sequence[_Row]", rows)
        self._join(given, [cast("list[mx.array | None]", row.cache) for row in given])

    @property
    def n_rows(self) -> int:
        """The number of rows without padding rows."""
        return len(self._rows)

    def pad_to(self, n_rows: int) -> None:
        """Append padding rows, so that a step has `n_rows` rows."""
        padding = n_rows - len(self._rows)
        self._settled &= padding == self._padding
        self._padding = padding

    def take(self, counts: Sequence[int]) -> None:
        """Set each row's number of tokens in the next pass. A row's later tokens are padding."""
        self.lengths = mx.array([*counts, *[0] * self._padding], mx.int32)  # type: ignore[assignment]

    def filter(self, batch_indices: Sequence[int]) -> None:
        self._settle(padding=0)
        self._kept = list(batch_indices)
        self._rows = [self._rows[i] for i in batch_indices]
        self._settled = False

    def extend(self, other: StateBatch) -> None:
        """Append the rows of `other`, which is unusable afterwards."""
        other._settle(padding=0)
        self._join(other._rows, [other.cache])

    def extract(self, idx: int) -> ArraysCache:
        """Return row `idx` in its original cache, with separate memory."""
        self._settle(padding=self._padding)
        row = self._rows[idx]
        at = mx.array([idx])
        row.cache = [None if part is None else part[at] for part in self.cache]
        return cast(ArraysCache, row)

    def end(self) -> None:
        """Put each row's state back into its sequence's cache, in separate memory."""
        for idx in range(len(self._rows)):
            self.extract(idx)

    @property
    def example(self) -> list[mx.array | None]:
        """The states of at least one row."""
        return self._joining[-1] if self._joining else self.cache

    # Called by models

    def __getitem__(self, idx: int) -> mx.array | None:
        self._settle(padding=self._padding)
        return self.cache[idx]

    def __setitem__(self, idx: int, value: mx.array) -> None:
        self.cache[idx] = value
        if self._rows[0].cache[idx] is None:
            for row in self._rows:
                row.cache[idx] = _Lent(value.nbytes // value.shape[0])

    def make_mask(self, N: int, *_: object, **__: object) -> mx.array | None:
        """Return a mask, (rows, N), that is True for tokens; None if no token is padding."""
        return cast("mx.array | None", super().make_mask(N))

    # Inside

    def _join(self, rows: Sequence[_Row], arrays: Sequence[list[mx.array | None]]) -> None:
        self._joining += arrays
        for row in rows:
            row.cache = [None if one is None else _Lent(one.nbytes) for one in row.cache]
        self._rows += rows
        self._settled = False

    def _settle(self, padding: int) -> None:
        """Gather the rows of the next step, followed by `padding` rows."""
        if self._settled and padding == self._padding:
            return
        self.cache = [
            _gathered(part, self._kept, [joining[i] for joining in self._joining], padding)
            for i, part in enumerate(self.cache)
        ]
        self._joining = []
        self._kept = list(range(len(self._rows)))
        self._padding, self._settled = padding, True


def _gathered(
    part: mx.array | None, kept: Sequence[int], joining: Sequence[mx.array | None], padding: int
) -> mx.array | None:
    """Return rows `kept` of `part`, then `joining`, then zeros."""
    pieces: list[mx.array | None] = []
    if kept:
        pieces += [part] if part is None else [part[i:j] for i, j in _ranges(kept)]
    pieces += joining
    found = [piece for piece in pieces if piece is not None]
    if not found:
        return None
    if len(found) != len(pieces):
        raise ValueError("cannot join a sequence without a state to sequences with a state")
    if padding:
        found.append(mx.zeros((padding, *found[0].shape[1:]), found[0].dtype))
    return found[0] if len(found) == 1 else mx.concatenate(found)


def _ranges(indices: Sequence[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for i in indices:
        if ranges and ranges[-1][1] == i:
            ranges[-1] = (ranges[-1][0], i + 1)
        else:
            ranges.append((i, i + 1))
    return ranges


class BatchLayer(Protocol):
    """One layer's cache of a batch."""

    @property
    def n_rows(self) -> int: ...

    @property
    def state(self) -> object: ...

    def extend(self, other: Self) -> None: ...

    def filter(self, batch_indices: Sequence[int]) -> None: ...

    def extract(self, idx: int) -> object: ...


class _Merges(Protocol):
    def merge(self, caches: Sequence[object]) -> BatchLayer: ...


def merge(caches: Sequence[object]) -> BatchLayer:
    """Merge one layer's caches into a layer of a batch. Each cache becomes a row."""
    first = caches[0]
    if isinstance(first, ArraysCache):
        return cast(BatchLayer, StateBatch(cast("Sequence[ArraysCache]", caches)))
    if isinstance(first, FullCache) and on_cpu():
        return cast(BatchLayer, SlottedBatch(cast("list[FullCache]", list(caches))))
    if isinstance(first, RotatingKVCache):
        return cast(BatchLayer, RaggedBatch(cast("list[BatchRow]", list(caches))))
    return merge_theirs(caches)


def merge_theirs(caches: Sequence[object]) -> BatchLayer:
    """Merge caches by calling `merge` of their class."""
    return cast(_Merges, caches[0]).merge(caches)


def pad(layer: BatchLayer, n_rows: int) -> None:
    """Append padding rows to a layer with states, so that it has `n_rows` rows."""
    if isinstance(layer, StateBatch):
        layer.pad_to(n_rows)


def states(layers: Sequence[BatchLayer]) -> list[mx.array]:
    """Return the arrays of all states in `layers`."""
    found: list[mx.array] = []
    for layer in layers:
        if isinstance(layer, StateBatch):
            found += [part for part in layer.cache if part is not None]
    return found


StateShapes = tuple[tuple[int, ...] | None, ...]


def state_shapes(caches: Sequence[object]) -> StateShapes:
    """Return the shapes of the states without the axis of rows. Sequences with different shapes
    cannot share a step."""
    found: list[tuple[int, ...] | None] = []
    for cache in caches:
        if isinstance(cache, ArraysCache):
            mine = cache.example if isinstance(cache, StateBatch) else cache.cache
            arrays = cast("list[mx.array | None]", mine)
            found += [None if one is None else one.shape[1:] for one in arrays]
    return tuple(found)
