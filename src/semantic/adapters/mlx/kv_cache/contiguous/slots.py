"""Keeps the rows of a ragged batch in slots of shared arrays, for decoding on a CPU.

Attention over rows that share an array is one operation. Supports full attention only.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self
from weakref import WeakValueDictionary

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.contiguous.cache import (
    BufferRange,
    FullCache,
    KVBuffer,
    LentBuffer,
    RaggedBatch,
    RaggedKeys,
)
from semantic.adapters.mlx.kv_cache.contiguous.ragged_array import RaggedArray, product
from semantic.adapters.mlx.kv_cache.eight_bits import pack, unpack
from semantic.domain.value_objects import whole_blocks

LARGEST_ROW = 1 << 20
"""The maximum size of a row in a slot, in bytes per layer. Larger rows keep separate buffers."""

MOST_PADDING = 1.5
"""The largest ratio of an array's capacity to its rows' capacities."""

MOST_UNSEEN = 512 << 10
"""The maximum padding of a row, in bytes per layer."""

_ROOM = 64
"""The number of tokens by which a row can grow before its array must be copied."""

_WAITING = 8
"""If more than 1 in this many rows has no slot, all rows move to new arrays."""


class Division:
    """Divides the rows of a batch into parts. The rows of a part compute together."""

    def __init__(self, parts: Sequence[Sequence[int | None]]) -> None:
        self._ends = list(itertools.accumulate(map(len, parts)))[:-1]
        taken = list(itertools.chain.from_iterable(parts))
        self.places = {row: place for place, row in enumerate(taken) if row is not None}
        n_rows = len(self.places)
        in_order = taken == list(range(n_rows))
        self._taken = None if in_order else mx.array([row or 0 for row in taken])
        self._back = None if in_order else mx.array([self.places[i] for i in range(n_rows)])

    def split(self, x: mx.array) -> list[mx.array]:
        """Split an array of the batch, (rows, ...), into one array per part."""
        if self._taken is not None:
            x = x[self._taken]
        return list(mx.split(x, self._ends)) if self._ends else [x]

    def join(self, parts: Sequence[mx.array]) -> mx.array:
        """Join the parts' results into one array, in the order of the batch."""
        x = parts[0] if len(parts) == 1 else mx.concatenate(list(parts))
        return x if self._back is None else x[self._back]


class Parts(NamedTuple):
    """One array, (slots, heads, ...), and one mask or None for each part of a batch."""

    arrays: Sequence[mx.array]
    axis: int
    division: Division
    masks: Sequence[mx.array | None]
    lengths: Sequence[int]

    def changed(self, change: Callable[[mx.array], mx.array], axis: int) -> Parts:
        """Return parts with `change` applied to each array."""
        return self._replace(arrays=list(map(change, self.arrays)), axis=axis)

    def rows(self) -> tuple[mx.array, ...]:
        """Return each row's own tokens, without padding and without copying."""
        slots = [part[i : i + 1] for part in self.arrays for i in range(part.shape[0])]
        found = (slots[self.division.places[i]] for i in range(len(self.lengths)))
        return tuple(
            one[:, :, :n] if self.axis == _TOKENS else one[..., :n]
            for one, n in zip(found, self.lengths, strict=True)
        )


_TOKENS = 2
"""The axis of tokens in keys and values."""


class SlottedArray(RaggedKeys):
    """Keys, values or scores of rows in slots."""

    def __new__(cls, parts: Parts, dtype: mx.Dtype, on_rows: Callable[[], None]) -> Self:  # noqa: ARG004
        return super().__new__(cls, (), dtype)

    def __init__(self, parts: Parts, dtype: mx.Dtype, on_rows: Callable[[], None]) -> None:
        self.parts: Parts | None = parts
        self._on_rows = on_rows
        super().__init__((), dtype)
        n_rows = len(parts.lengths)
        self.masks = (None,) * n_rows

    if not TYPE_CHECKING:  # `rows` is an attribute of the base class

        @property
        def rows(self) -> tuple[mx.array, ...]:
            if self.parts is not None:
                self._on_rows()
                self._rows, self.parts = self.parts.rows(), None
            return self._rows

        @rows.setter
        def rows(self, rows: tuple[mx.array, ...]) -> None:
            self._rows = rows
            if rows:
                self.parts = None

    def swapaxes(self, axis1: int, axis2: int, stream: object = None) -> RaggedArray:
        if self.parts is None or {axis1 % 4, axis2 % 4} != {_TOKENS, 3}:
            return super().swapaxes(axis1, axis2, stream)
        parts = self.parts.changed(lambda part: part.swapaxes(axis1, axis2), 5 - self.parts.axis)
        return SlottedArray(parts, self.dtype, self._on_rows)

    def __rmatmul__(self, left: mx.array) -> RaggedArray:
        if self.parts is None or self.parts.axis == _TOKENS:
            return super().__rmatmul__(left)
        lefts = iter(self.parts.division.split(left))
        parts = self.parts.changed(lambda part: product(next(lefts), part), 3)
        return SlottedArray(parts, self.dtype, self._on_rows)


class Slots:
    """Keys and values of several sequences, (slots, kv_heads, capacity, head_dim). `rows[i]` is the
    row in slot i; None if the slot is free."""

    def __init__(self, rows: Sequence[FullCache], buffers: Sequence[KVBuffer]) -> None:
        """Copy the tokens of `rows` from `buffers`."""
        self.rows: list[FullCache | None] = list(rows)
        self.capacity = _capacity(rows)
        (_, heads, _, k_dim), v_dim = buffers[0].k.shape, buffers[0].v.shape[3]
        shape = (len(rows), heads, self.capacity)
        self.k = mx.zeros((*shape, k_dim), buffers[0].k.dtype)
        self.v = mx.zeros((*shape, v_dim), buffers[0].v.dtype)
        for slot, buffer in enumerate(buffers):
            self._write(slot, buffer)
        self._room = self.capacity - max(row.offset for row in rows)
        self._step: _Step | None = None  # kept alive for the other layers
        mx.eval(self.k, self.v)

    @property
    def padded(self) -> bool:
        """True if the array has more padding than `MOST_PADDING` allows."""
        reserved = sum(_reserved(row) for row in self.rows if row is not None)
        return len(self.rows) * self.capacity > MOST_PADDING * reserved

    @property
    def full(self) -> bool:
        """True if a row may lack space for its next token."""
        return self._room <= 0

    def accepts(self, row: FullCache) -> bool:
        """Return whether a free slot suits `row`."""
        if None not in self.rows:
            return False
        longest = self.capacity - self._room
        apart = abs(longest - row.offset) * _token_bytes(row)
        return _needed(row) <= self.capacity and apart <= MOST_UNSEEN

    def put(self, row: FullCache) -> None:
        slot = self.rows.index(None)
        self._write(slot, row.buffer)
        self.rows[slot] = row
        self._room = min(self._room, self.capacity - row.offset)
        row.buffer = LentBuffer(row.buffer)

    def take(self, row: FullCache) -> None:
        """Move the tokens of `row` to a separate buffer, and free its slot."""
        slot = self.rows.index(row)
        tokens = BufferRange(self.view(slot), 0, row.offset)
        row.buffer = KVBuffer.gather([tokens], max(row.buffer.capacity, whole_blocks(row.offset)))
        mx.eval(row.buffer.k, row.buffer.v)  # while pending, a write would copy all
        self.k[slot] = 0  # becomes the next row's padding
        self.v[slot] = 0
        self.rows[slot] = None

    def view(self, slot: int) -> KVBuffer:
        """Return the tokens of a slot without copying them."""
        one = slice(slot, slot + 1)
        return KVBuffer(self.k[one], self.v[one])

    def append(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array, mx.array | None]:
        """Append one token to each slot. Return the keys and values to attend to, and a mask."""
        step = _steps(tuple(0 if row is None else row.offset for row in self.rows), k.dtype)
        dtype, packed = k.dtype, self.k.dtype == mx.uint8
        if packed:
            k, v = pack(k), pack(v)
        self._step = step
        self.k = mx.put_along_axis(self.k, step.at, k, axis=2)
        self.v = mx.put_along_axis(self.v, step.at, v, axis=2)
        self._room -= 1
        for row in self.rows:
            if row is not None:
                row.offset += 1
        k, v = self.k[..., : step.longest, :], self.v[..., : step.longest, :]
        return (unpack(k, dtype), unpack(v, dtype), step.mask) if packed else (k, v, step.mask)

    def _write(self, slot: int, buffer: KVBuffer) -> None:
        n = min(buffer.capacity, self.capacity)
        self.k[slot : slot + 1, :, :n] = buffer.k[..., :n, :]
        self.v[slot : slot + 1, :, :n] = buffer.v[..., :n, :]


class SlottedBatch(RaggedBatch[FullCache]):
    """A ragged batch whose rows share arrays.

    Once a model reads single rows, `by_row` becomes True and rows keep separate buffers.
    """

    def __init__(self, rows: list[FullCache]) -> None:
        super().__init__(rows)
        self.shared: list[Slots] = []
        self._alone: list[FullCache] = []
        self._division: Division | None = None  # None after rows have come or gone
        self.by_row = False
        self._offset: mx.array | None = None  # None after a step

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RaggedKeys, RaggedArray]:
        self._fetched = self._offset = None  # first, as writes copy arrays in use
        if self.by_row or keys.shape[2] > 1:
            self.apart()
            return super().update_and_fetch(keys, values)
        division = self._arranged()
        ks, vs, n = division.split(keys), division.split(values), len(self.shared)
        found = [one.append(*kv) for one, *kv in zip(self.shared, ks, vs, strict=False)]
        if self._alone:
            alone = zip(self._alone, ks[n:], vs[n:], strict=True)
            found += [(*row.update_and_fetch(k, v), None) for row, k, v in alone]
        lengths = [row.offset for row in self.rows]
        masks = [mask for _, _, mask in found]
        parts = Parts([k for k, _, _ in found], _TOKENS, division, masks, lengths)
        held = SlottedArray(parts, keys.dtype, self._compute_by_row)
        parts = parts._replace(arrays=[v for _, v, _ in found])
        read = SlottedArray(parts, values.dtype, self._compute_by_row)
        self._fetched = held, read
        return self._fetched

    def _compute_by_row(self) -> None:
        self.by_row = True

    @property
    def offset(self) -> mx.array:
        """See `RaggedBatch.offset`."""
        if self._offset is None:
            self._offset = super().offset
        return self._offset

    def apart(self) -> Self:
        for slots in self.shared:
            for row in slots.rows:
                if row is not None:
                    slots.take(row)
        self.shared, self._division = [], None
        return self

    def as_rows(self) -> Self:
        self.by_row = True
        return self.apart()

    def filter(self, batch_indices: Sequence[int]) -> None:
        kept = set(batch_indices)
        for i, row in enumerate(self.rows):
            if i not in kept:
                self._release(row)
        super().filter(batch_indices)
        self._division = self._offset = None

    def extend(self, other: RaggedBatch[FullCache]) -> None:
        if isinstance(other, SlottedBatch):
            self.shared += other.shared
            other.shared = []
            self.by_row |= other.by_row
        super().extend(other)
        self._division = self._offset = None

    def extract(self, idx: int) -> FullCache:
        """Return row `idx` with its tokens."""
        self._release(self.rows[idx])
        return self.rows[idx]

    @property
    def state(self) -> list[object]:
        return [*super().state, *((slots.k, slots.v) for slots in self.shared)]

    def _release(self, row: FullCache) -> None:
        for slots in self.shared:
            if row in slots.rows:
                slots.take(row)
                self._division = self._offset = None

    def _arranged(self) -> Division:
        if self._division is None or any(slots.full for slots in self.shared):
            self._arrange()
            numbers = {id(row): i for i, row in enumerate(self.rows)}
            taken = {id(row) for slots in self.shared for row in slots.rows}
            self._alone = [row for row in self.rows if id(row) not in taken]
            parts = [[numbers.get(id(row)) for row in slots.rows] for slots in self.shared]
            self._division = Division([*parts, *([numbers[id(row)]] for row in self._alone)])
        return self._division

    def _arrange(self) -> None:
        for row in _without_slot(self.rows):
            free = next((slots for slots in self.shared if slots.accepts(row)), None)
            if free is not None:
                free.put(row)
        groups = _groups(self.rows)
        grouped = [row for group in groups for row in group]
        waiting = _without_slot(grouped)
        if len(waiting) * _WAITING > len(grouped) or any(
            slots.full or slots.padded for slots in self.shared
        ):
            self._move(groups)

    def _move(self, groups: Sequence[Sequence[FullCache]]) -> None:
        """Put the rows of each group into a new array, and all other rows into separate buffers."""
        views = {
            id(row): slots.view(slot)
            for slots in self.shared
            for slot, row in enumerate(slots.rows)
            if row is not None
        }
        shared = [
            Slots(group, [views.get(id(row), row.buffer) for row in group]) for group in groups
        ]
        grouped = {id(row) for group in groups for row in group}
        for slots in self.shared:
            for row in slots.rows:
                if row is not None and id(row) not in grouped:
                    slots.take(row)
        for row in itertools.chain.from_iterable(groups):
            if not isinstance(row.buffer, LentBuffer):
                row.buffer = LentBuffer(row.buffer)
        self.shared = shared


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Step:
    at: mx.array
    mask: mx.array | None
    longest: int


class _Steps(threading.local):
    """Shares a step's arrays between all layers. Each thread of MLX needs its own arrays."""

    def __init__(self) -> None:
        self._made: WeakValueDictionary[tuple[tuple[int, ...], mx.Dtype], _Step] = (
            WeakValueDictionary()
        )

    def __call__(self, offsets: tuple[int, ...], dtype: mx.Dtype) -> _Step:
        found = self._made.get((offsets, dtype))
        if found is None:
            found = self._made[offsets, dtype] = _step(offsets, dtype)
        return found


_steps = _Steps()


def _step(offsets: tuple[int, ...], dtype: mx.Dtype) -> _Step:
    at = mx.array(offsets, dtype=mx.int32).reshape(-1, 1, 1, 1)
    longest = max(offsets) + 1
    if min(offsets) + 1 == longest:
        return _Step(at, None, longest)
    unseen = mx.array(-mx.inf, dtype)
    return _Step(at, mx.where(mx.arange(longest) <= at, mx.array(0, dtype), unseen), longest)


def _groups(rows: Sequence[FullCache]) -> list[list[FullCache]]:
    """Group rows of similar length and capacity, which can share an array."""
    groups: list[list[FullCache]] = []
    for row in sorted(filter(_small, rows), key=lambda row: row.offset, reverse=True):
        if groups and _fits(row, groups[-1]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [group for group in groups if len(group) > 1]


def _fits(row: FullCache, group: Sequence[FullCache]) -> bool:
    longest = group[0].offset
    if (longest - row.offset) * _token_bytes(row) > MOST_UNSEEN:
        return False
    return _capacity([*group, row]) >= _needed(group[0])


def _capacity(rows: Sequence[FullCache]) -> int:
    reserved = [_reserved(row) for row in rows]
    return min(max(reserved), int(MOST_PADDING * sum(reserved) / len(reserved)))


def _needed(row: FullCache) -> int:
    """Return how many tokens a slot needs to make copying `row` into it worthwhile."""
    return min(row.offset + _ROOM, _reserved(row))


def _reserved(row: FullCache) -> int:
    return max(row.buffer.capacity, whole_blocks(row.offset + 1))


def _without_slot(rows: Sequence[FullCache]) -> list[FullCache]:
    return [row for row in rows if _small(row) and not isinstance(row.buffer, LentBuffer)]


def _small(row: FullCache) -> bool:
    return row.buffer.nbytes <= LARGEST_ROW


def _token_bytes(row: FullCache) -> int:
    return row.buffer.nbytes // row.buffer.capacity
