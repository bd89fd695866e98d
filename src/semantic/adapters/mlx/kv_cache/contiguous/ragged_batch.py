"""A batch of sequences of different lengths, without padding and without copies.

Takes the place of mlx-lm's padded batch caches inside an unmodified `BatchGenerator`: joining,
leaving and extracting are list operations. Knows sequences and their order; not blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx

Mask = mx.array | str | None


class Row(Protocol):
    """One sequence's cache of one layer, as a batch uses it."""

    @property
    def offset(self) -> int:
        """Position of the sequence's next token."""
        ...

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The arrays to evaluate."""
        ...

    @property
    def nbytes(self) -> int: ...

    def append(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Add tokens, (1, kv_heads, n, head_dim) each; returns all that they may attend to."""
        ...

    def mask_for(self, n: int) -> Mask:
        """Mask for the next `n` tokens over what `append` will return for them."""
        ...

    def size(self) -> int:
        """Tokens held."""
        ...

    def empty(self) -> bool: ...


class RowKeys(NamedTuple):
    """What one row's queries may attend to; nothing for a row that has no queries now."""

    k: mx.array | None
    v: mx.array | None
    mask: Mask


_NO_KEYS = RowKeys(None, None, None)


@dataclass(frozen=True, slots=True)
class RaggedKeys:
    """What a model gets for keys and values: a handle that only our attention can read.

    `rows[i]` holds the keys, values and mask of row i, of which the first `lengths[i]` queries
    are real. All rows share `v_head_dim`.
    """

    rows: tuple[RowKeys, ...]
    lengths: tuple[int, ...]
    v_head_dim: int


class _Positions:
    """The positions of a batch as an array, made once per step and not once per layer."""

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._array = mx.array([], dtype=mx.int32)

    def __call__(self, offsets: tuple[int, ...]) -> mx.array:
        if offsets != self._key:
            self._key = offsets
            self._array = mx.array(offsets, dtype=mx.int32)
        return self._array


_positions = _Positions()


class RaggedBatch:
    """One layer's caches of the sequences in a batch; mlx-lm's batch cache interface."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self._left: list[int] | None = None  # real tokens left per row, while right-padded

    def __deepcopy__(self, memo: dict[int, object]) -> RaggedBatch:
        """mlx-lm copies a batch to split it; the rows themselves are shared, each used once."""
        return RaggedBatch(list(self.rows))

    @property
    def offset(self) -> mx.array:
        """Position of the next token of each row, (batch,) int32."""
        return _positions(tuple(row.offset for row in self.rows))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RaggedKeys, RaggedKeys]:
        """Append row i of `keys` and `values`, (batch, kv_heads, n, head_dim), to sequence i."""
        n = keys.shape[2]
        lengths = self._take(n)
        rows = tuple(
            _append(row, k, v, length)
            for row, k, v, length in zip(
                self.rows, _rows_of(keys), _rows_of(values), lengths, strict=True
            )
        )
        handle = RaggedKeys(rows, lengths, values.shape[3])
        return handle, handle

    def _take(self, n: int) -> tuple[int, ...]:
        """How many of the next `n` columns are real, per row."""
        if self._left is None:
            return (n,) * len(self.rows)
        taken = tuple(min(n, left) for left in self._left)
        self._left = [left - used for left, used in zip(self._left, taken, strict=True)]
        return taken

    def make_mask(self, *_: object, **__: object) -> None:
        """No mask: nothing is padded, and each row's own mask travels in the handle."""

    def prepare(
        self,
        *,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,  # noqa: ARG002
        left_padding: Sequence[int] | None = None,
    ) -> None:
        """The next tokens are padded on the right; `lengths` are real."""
        if left_padding is not None and any(left_padding):
            raise ValueError("rows of different lengths need no left padding")
        self._left = list(lengths) if lengths is not None else None

    def finalize(self) -> None:
        """No more padded tokens."""
        self._left = None

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep only these rows."""
        self.rows = [self.rows[i] for i in batch_indices]

    def extend(self, other: RaggedBatch) -> None:
        """Add the rows of `other`."""
        self.rows = [*self.rows, *other.rows]

    def extract(self, idx: int) -> Row:
        """Row `idx`, as it is."""
        return self.rows[idx]

    @property
    def state(self) -> list[tuple[mx.array, mx.array]]:
        """The arrays to evaluate."""
        return [row.state for row in self.rows]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    def size(self) -> int:
        """Tokens of the longest row."""
        return max((row.size() for row in self.rows), default=0)

    def empty(self) -> bool:
        return all(row.empty() for row in self.rows)


def _rows_of(x: mx.array) -> list[mx.array]:
    """The rows of a batch, each (1, ...)."""
    return list(mx.split(x, x.shape[0])) if x.shape[0] > 1 else [x]


def _append(row: Row, k: mx.array, v: mx.array, length: int) -> RowKeys:
    """Append the first `length` tokens of `k` and `v`."""
    if not length:
        return _NO_KEYS
    if length < k.shape[2]:
        k, v = k[..., :length, :], v[..., :length, :]
    mask = row.mask_for(length)
    return RowKeys(*row.append(k, v), mask)
