"""One layer's contiguous cache, for one sequence and for a ragged batch.

`RaggedBatch` replaces mlx-lm's padded batch caches. Sequences join and leave it without copies.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar, cast

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.contiguous.ragged_array import RaggedArray, rows_of
from semantic.adapters.mlx.kv_cache.eight_bits import pack, unpack
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.value_objects import whole_blocks


class KVBuffer:
    """One layer's keys and values of a sequence, each (1, kv_heads, capacity, head_dim).

    MLX writes to an array in place only while no other object refers to the array. To keep some
    tokens of a buffer, use a `BufferRange`, never a view. Packed heads are uint8.
    """

    __slots__ = ("capacity", "k", "v")

    def __init__(self, k: mx.array, v: mx.array) -> None:
        self.k = k
        self.v = v
        self.capacity = k.shape[2]  # not a property: every layer of every step reads it

    @classmethod
    def empty(cls, shape: LayerShape, capacity: int) -> KVBuffer:
        """Return a buffer of zeros for `capacity` tokens."""
        return cls(
            mx.zeros((1, shape.kv_heads, capacity, shape.k_head_dim), shape.dtype),
            mx.zeros((1, shape.kv_heads, capacity, shape.v_head_dim), shape.dtype),
        )

    @classmethod
    def gather(cls, ranges: Sequence[BufferRange], capacity: int) -> KVBuffer:
        """Return a new buffer of `capacity` tokens with copies of the tokens in `ranges`."""
        pieces = join_neighbours(ranges)
        return cls(
            _concatenate([p.buffer.k[..., p.start : p.stop, :] for p in pieces], capacity),
            _concatenate([p.buffer.v[..., p.start : p.stop, :] for p in pieces], capacity),
        )

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def resize(self, kept: range, capacity: int) -> None:
        """Move the tokens in `kept` to the front of new arrays for `capacity` tokens."""
        moved = KVBuffer.gather([BufferRange(self, kept.start, kept.stop)], capacity)
        self.k, self.v, self.capacity = moved.k, moved.v, capacity

    def write(self, at: int, stop: int, k: mx.array, v: mx.array) -> None:
        """Write `k` and `v` as tokens `at` to `stop`, which must not exceed the capacity."""
        self.k[..., at:stop, :] = k
        self.v[..., at:stop, :] = v

    def read(self, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Return views of keys and values of tokens `start` to `stop`. Do not keep the views."""
        if start == 0 and stop == self.capacity:
            return self.k, self.v
        return self.k[..., start:stop, :], self.v[..., start:stop, :]


class LentBuffer(KVBuffer):
    """Stands in for a buffer whose tokens are in an array that several sequences share."""

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
        """The number of bytes that the sequence has reserved."""
        return self.capacity * self._token_bytes

    def resize(self, kept: range, capacity: int) -> None:  # noqa: ARG002
        """Record the new capacity."""
        self.capacity = capacity


@dataclass(frozen=True, slots=True)
class BufferRange:
    """Refers to tokens `start` to `stop` of a buffer without copying them."""

    buffer: KVBuffer
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes // self.buffer.capacity * (self.stop - self.start)


def join_neighbours(ranges: Sequence[BufferRange]) -> list[BufferRange]:
    """Return the same tokens in as few ranges as possible."""
    joined: list[BufferRange] = []
    for piece in ranges:
        if joined and joined[-1].buffer is piece.buffer and joined[-1].stop == piece.start:
            piece = BufferRange(piece.buffer, joined.pop().start, piece.stop)  # noqa: PLW2901
        joined.append(piece)
    return joined


def _concatenate(pieces: list[mx.array], capacity: int) -> mx.array:
    missing = capacity - sum(piece.shape[2] for piece in pieces)
    if missing:
        _, heads, _, dim = pieces[0].shape
        pieces = [*pieces, mx.zeros((1, heads, missing, dim), pieces[0].dtype)]
    if len(pieces) == 1:
        # `concatenate` returns a single piece unchanged: a view that would keep the source alive.
        whole = pieces[0]
        pieces = [whole[..., :1, :], whole[..., 1:, :]]
    return mx.concatenate(pieces, axis=2)


Mask = mx.array | str | None
"""A mask for mlx-lm's attention: an array of booleans, "causal", or None for no mask."""


def causal_mask(n: int, before: int, window: int | None = None) -> mx.array:
    """Return a causal mask, (n, before + n). With a window, a query sees only keys in it."""
    queries = mx.arange(before, before + n)[:, None]
    keys = mx.arange(before + n)[None]
    mask = queries >= keys
    return mask if window is None else mask & (queries < keys + window)


def mask_over(n: int, before: int, window: int | None, *, as_array: bool = False) -> Mask:
    """Return the mask for `n` tokens that also attend to `before` earlier tokens."""
    if n == 1:
        return None
    if window is not None and before + n > window:
        return causal_mask(n, before, window)
    return causal_mask(n, before) if as_array else "causal"


class SequenceCache(ABC):
    """One layer's cache of a sequence. `offset` is the position of the next token."""

    window: int | None = None

    def __init__(self, buffer: KVBuffer, offset: int) -> None:
        self.buffer = buffer
        self.offset = offset
        self._dtype = buffer.k.dtype  # of the last tokens, before they become bytes

    def _as_held(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._dtype = keys.dtype
        packs = self.buffer.k.dtype == mx.uint8
        return (pack(keys), pack(values)) if packs else (keys, values)

    def _seen_of(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if keys.dtype != mx.uint8:
            return keys, values
        return unpack(keys, self._dtype), unpack(values, self._dtype)

    @abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append tokens, (1, kv_heads, n, head_dim). Return all tokens that they attend to."""

    @abstractmethod
    def reserve(self, capacity: int) -> None:
        """Grow the buffer to hold `capacity` tokens of the sequence."""

    @abstractmethod
    def trim(self, length: int) -> None:
        """Drop the tokens from position `length` on."""

    @property
    @abstractmethod
    def held(self) -> range:
        """The positions of the tokens that the cache holds."""

    def ranges(self, size: int) -> list[BufferRange]:
        """Return the tokens that the cache holds, in ranges of at most `size` tokens."""
        n = len(self.held)
        return [BufferRange(self.buffer, i, min(i + size, n)) for i in range(0, n, size)]

    @abstractmethod
    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the last result of `update_and_fetch`. Layers that share a cache call this."""

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,  # noqa: ARG002
    ) -> Mask:
        """Return the mask for the next `N` tokens."""
        before = len(self.held) if self.window is None else min(len(self.held), self.window - 1)
        return mask_over(N, before, self.window, as_array=return_array)

    @classmethod
    def merge(cls, caches: Sequence[SequenceCache]) -> RaggedBatch[SequenceCache]:
        """Return a batch of these sequences without copying anything."""
        return RaggedBatch(list(caches))

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The cache's arrays, for `mx.eval`."""
        return self.buffer.k, self.buffer.v

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes


class FullCache(SequenceCache):
    """A cache of every token of the sequence. Token i is at index i of the buffer."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        stop = self.offset + keys.shape[2]
        if stop > self.buffer.capacity:
            self.reserve(stop)
        self.buffer.write(self.offset, stop, *self._as_held(keys, values))
        self.offset = stop
        return self._seen_of(*self.buffer.read(0, stop))

    def reserve(self, capacity: int) -> None:
        if capacity > self.buffer.capacity:
            self.buffer.resize(range(self.offset), whole_blocks(capacity))

    def trim(self, length: int) -> None:
        self.offset = min(self.offset, length)

    @property
    def held(self) -> range:
        return range(self.offset)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self._seen_of(*self.buffer.read(0, self.offset))

    @property
    def keys(self) -> mx.array:
        """The buffer's keys. Some models replace them to order MLX's computations."""
        return self.buffer.k

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self.buffer.k = keys

    @property
    def values(self) -> mx.array:
        """The buffer's values."""
        return self.buffer.v

    @values.setter
    def values(self, values: mx.array) -> None:
        self.buffer.v = values


class WindowCache(SequenceCache):
    """A sliding-window layer's cache. It holds at least the sequence's last `window` tokens."""

    window: int

    def __init__(
        self, buffer: KVBuffer, offset: int, window: int, most: int, held: int = 0
    ) -> None:
        """`most` is the buffer's maximum capacity. It must exceed `window`."""
        super().__init__(buffer, offset)
        self.window = window
        self._most = most
        self._held = held
        self._seen: tuple[mx.array, mx.array] | None = None  # last result, until evaluation

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._seen = None  # before the write, which would copy an array in use elsewhere
        keys, values = self._as_held(keys, values)
        n = keys.shape[2]
        self.reserve(self._held + n)
        first = max(0, self._held - (self.window - 1))  # the oldest token that is still seen
        if self._held + n <= self.buffer.capacity:
            self.buffer.write(self._held, self._held + n, keys, values)
            self._held += n
            seen = self.buffer.read(first, self._held)
        elif n == 1:
            self.buffer.resize(range(self._held - self.window, self._held), self.buffer.capacity)
            self.buffer.write(self.window, self.window + 1, keys, values)
            self._held = self.window + 1
            seen = self.buffer.read(1, self._held)
        else:
            seen = self._append_long(first, keys, values)
        self.offset += n
        self._seen = self._seen_of(*seen)
        return self._seen

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        if self._seen is None:
            raise ValueError("no tokens appended since the cache's evaluation")
        return self._seen

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The cache's arrays, for `mx.eval`. Discards the last result of `update_and_fetch`."""
        self._seen = None
        return super().state

    def _append_long(self, first: int, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Append more tokens than the buffer holds. All attend to all, but only the last stay."""
        old_k, old_v = self.buffer.read(first, self._held)
        seen = KVBuffer(mx.concatenate([old_k, k], axis=2), mx.concatenate([old_v, v], axis=2))
        total = seen.capacity
        self._held = min(self.window, total)
        last = BufferRange(seen, total - self._held, total)
        kept = KVBuffer.gather([last], self.buffer.capacity)
        self.buffer.k, self.buffer.v = kept.k, kept.v
        return seen.k, seen.v

    def reserve(self, capacity: int) -> None:
        """See `SequenceCache.reserve`. The buffer never exceeds its maximum capacity."""
        target = min(whole_blocks(capacity), self._most)
        if target > self.buffer.capacity:
            self.buffer.resize(range(self._held), target)

    def trim(self, length: int) -> None:
        dropped = max(0, self.offset - length)
        self._held -= dropped
        self.offset -= dropped

    @property
    def held(self) -> range:
        return range(self.offset - self._held, self.offset)


class RaggedKeys(RaggedArray):
    """The keys of a batch. `masks[i]` hides some of row i's keys from the row's queries."""

    masks: tuple[Mask, ...]

    def each(self, change: Callable[[mx.array], mx.array], dtype: mx.Dtype) -> RaggedKeys:
        """See `RaggedArray.each`. Keeps the masks."""
        changed = RaggedKeys(list(map(change, self.rows)), dtype)
        changed.masks = self.masks
        return changed


@functools.lru_cache(maxsize=1)
def _positions(offsets: tuple[int, ...]) -> mx.array:
    return mx.array(offsets, dtype=mx.int32)


class BatchRow(Protocol):
    """A cache that can be a row of a batch: a `SequenceCache`, or mlx-lm's own cache."""

    offset: int

    @property
    def state(self) -> object: ...
    @property
    def nbytes(self) -> int: ...
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]: ...
    def make_mask(self, N: int) -> Mask: ...


Row = TypeVar("Row", bound=BatchRow)


class RaggedBatch(Generic[Row]):
    """One layer's caches of the sequences in a batch, with mlx-lm's batch cache interface."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self._fetched: tuple[RaggedKeys, RaggedArray] | None = None
        self.chosen_from: RaggedBatch[Row] | None = None  # the batch whose tokens these keys select

    def __deepcopy__(self, memo: dict[int, object]) -> RaggedBatch[Row]:
        """Copy the batch but share its rows. mlx-lm copies a batch in order to split it."""
        return RaggedBatch(list(self.rows))

    @property
    def n_rows(self) -> int:
        """The number of rows in a step."""
        return len(self.rows)

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token, (batch,) int32."""
        return _positions(tuple(row.offset for row in self.rows))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RaggedKeys, RaggedArray]:
        """Append row i of both arrays, (batch, kv_heads, n, head_dim), to sequence i."""
        self._fetched = None  # before the write, which would copy an array in use elsewhere
        masks = tuple(row.make_mask(keys.shape[2]) for row in self.rows)
        rows = [
            row.update_and_fetch(k, v)
            for row, k, v in zip(self.rows, rows_of(keys), rows_of(values), strict=True)
        ]
        held = RaggedKeys([k for k, _ in rows], keys.dtype)
        held.masks = masks
        self._fetched = held, RaggedArray([v for _, v in rows], values.dtype)
        return self._fetched

    def apart(self) -> Self:
        """Move each row's tokens into a separate buffer, and return this batch."""
        return self

    def as_rows(self) -> Self:
        """Like `apart`, but the rows keep separate buffers from now on."""
        return self

    def keys_and_values(self) -> tuple[RaggedKeys, RaggedArray]:
        """Return the last result of `update_and_fetch`. Layers that share a cache call this."""
        if self._fetched is None:
            raise ValueError("no tokens appended since the batch's rows changed")
        return self._fetched

    @property
    def keys(self) -> RaggedArray:
        """The keys in each row's buffer."""
        rows = [cast(FullCache, row).keys for row in self.as_rows().rows]
        return RaggedArray(rows, rows[0].dtype)

    @keys.setter
    def keys(self, keys: RaggedArray) -> None:
        for row, mine in zip(self.as_rows().rows, keys.rows, strict=True):
            cast(FullCache, row).keys = mine

    @property
    def values(self) -> RaggedArray:
        """The values in each row's buffer."""
        rows = [cast(FullCache, row).values for row in self.as_rows().rows]
        return RaggedArray(rows, rows[0].dtype)

    def make_mask(self, *_: object, **__: object) -> None:
        """Return None, because rows have no padding. `RaggedKeys` has each row's own mask."""

    def filter(self, batch_indices: Sequence[int]) -> None:
        self.rows, self._fetched = [self.rows[i] for i in batch_indices], None

    def extend(self, other: RaggedBatch[Row]) -> None:
        self.rows, self._fetched = [*self.rows, *other.apart().rows], None

    def extract(self, idx: int) -> Row:
        return self.rows[idx]

    @property
    def state(self) -> list[object]:
        """The batch's arrays, for `mx.eval`."""
        return [row.state for row in self.rows]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)
