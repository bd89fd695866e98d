"""An array whose rows have different lengths, which models compute with as with any other.

A model gets it as keys or values of a batch. What it does with them before its attention, such as
the scores of MLA's rope keys, is done row by row; functions of `mx` see an array without elements
and fail. Knows the operations that mlx-lm's models apply to keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self, cast

import mlx.core as mx

_NONE: dict[mx.Dtype, mx.array] = {}
"""Per type an array of no elements, in a shape that no model's array broadcasts with."""


class RaggedArray(mx.array):
    """Row i is `rows[i]`, (1, heads, tokens, dim); None for a row without tokens in this call.

    A subclass of MLX's array, since its operators accept nothing else. Python asks the reflected
    operator of a subclass first.
    """

    rows: tuple[mx.array | None, ...]

    def __new__(cls, rows: Sequence[mx.array | None], dtype: mx.Dtype) -> Self:  # noqa: ARG004
        """`dtype` is that of the rows."""
        return cast(Callable[[type], Self], mx.array.__new__)(cls)

    def __init__(self, rows: Sequence[mx.array | None], dtype: mx.Dtype) -> None:
        super().__init__(_nothing(dtype))
        self.rows = tuple(rows)

    def _each(self, change: Callable[[mx.array], mx.array], dtype: mx.Dtype) -> RaggedArray:
        return RaggedArray([None if row is None else change(row) for row in self.rows], dtype)

    def swapaxes(self, axis1: int, axis2: int, stream: object = None) -> RaggedArray:  # noqa: ARG002
        """Row by row; axis 0 is the rows."""
        return self._each(lambda row: row.swapaxes(axis1, axis2), self.dtype)

    def astype(self, dtype: mx.Dtype, stream: object = None) -> RaggedArray:  # noqa: ARG002
        """Row by row."""
        return self._each(lambda row: row.astype(dtype), dtype)

    def __rmatmul__(self, left: mx.array) -> RaggedArray:
        """Row i of `left`, (batch, ...), times row i."""
        return RaggedArray(
            [
                None if right is None else _product(mine, right)
                for mine, right in zip(rows_of(left), self.rows, strict=True)
            ],
            self.dtype,
        )


def _product(left: mx.array, right: mx.array) -> mx.array:
    """`left @ right`; a token's heads are one product if they share the right side, (1, 1, ...)."""
    _, heads, n, width = left.shape
    if n > 1 or right.shape[1] > 1:
        return left @ right
    return (left.reshape(1, 1, heads, width) @ right).reshape(1, heads, 1, right.shape[3])


def rows_of(x: mx.array) -> list[mx.array]:
    """The rows of a batch, each (1, ...)."""
    return list(mx.split(x, x.shape[0])) if x.shape[0] > 1 else [x]


def _nothing(dtype: mx.Dtype) -> mx.array:
    found = _NONE.get(dtype)
    if found is None:
        found = _NONE[dtype] = mx.zeros((0, 7, 0, 11, 0, 13), dtype)
    return found
