"""The arrays of one layer's cache of one sequence, and ranges of their tokens.

Consecutive tokens are adjacent; appending writes in place. Knows no positions, windows or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape


class KVBuffer:
    """Keys (1, kv_heads, capacity, k_head_dim) and values (1, kv_heads, capacity, v_head_dim).

    MLX writes in place only while nothing else refers to the array: hold a part of a buffer as a
    `BufferRange`, never as a view. `capacity` is in tokens.
    """

    __slots__ = ("capacity", "k", "v")

    def __init__(self, k: mx.array, v: mx.array) -> None:
        self.k = k
        self.v = v
        self.capacity = k.shape[2]  # an attribute: every layer of every step reads it

    @classmethod
    def empty(cls, shape: LayerShape, capacity: int) -> KVBuffer:
        """Return zeros for `capacity` tokens."""
        return cls(
            mx.zeros((1, shape.kv_heads, capacity, shape.k_head_dim), shape.dtype),
            mx.zeros((1, shape.kv_heads, capacity, shape.v_head_dim), shape.dtype),
        )

    @classmethod
    def gather(cls, ranges: Sequence[BufferRange], capacity: int) -> KVBuffer:
        """Copy `ranges` into one buffer of `capacity` tokens, in one pass: neighbours in one
        piece."""
        pieces = join_neighbours(ranges)
        return cls(
            _concatenate([p.buffer.k[..., p.start : p.stop, :] for p in pieces], capacity),
            _concatenate([p.buffer.v[..., p.start : p.stop, :] for p in pieces], capacity),
        )

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def resize(self, kept: range, capacity: int) -> None:
        """Move tokens `kept` to the front of new arrays of `capacity` tokens."""
        moved = KVBuffer.gather([BufferRange(self, kept.start, kept.stop)], capacity)
        self.k, self.v, self.capacity = moved.k, moved.v, capacity

    def write(self, at: int, stop: int, k: mx.array, v: mx.array) -> None:
        """Write `k` and `v` to tokens `at` to `stop`, which must lie within the capacity."""
        self.k[..., at:stop, :] = k
        self.v[..., at:stop, :] = v

    def read(self, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Return views of the keys and values of tokens `start` to `stop`, for immediate use."""
        if start == 0 and stop == self.capacity:
            return self.k, self.v
        return self.k[..., start:stop, :], self.v[..., start:stop, :]


class LentBuffer(KVBuffer):
    """A placeholder for a buffer whose tokens are in an array of several sequences."""

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
        """Bytes reserved for the sequence, wherever its tokens are."""
        return self.capacity * self._token_bytes

    def resize(self, kept: range, capacity: int) -> None:  # noqa: ARG002
        """Record the capacity; there are no tokens to move."""
        self.capacity = capacity


@dataclass(frozen=True, slots=True)
class BufferRange:
    """Tokens `start` to `stop` of a buffer, not copied, as a block holds them."""

    buffer: KVBuffer
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens in the range."""
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
        # `concatenate` returns a single piece as it is: a view that would keep the source alive.
        whole = pieces[0]
        pieces = [whole[..., :1, :], whole[..., 1:, :]]
    return mx.concatenate(pieces, axis=2)
