"""An array with rows of different lengths, which models use like any other array.

Functions of `mx` fail on it, except those in `ROW_BY_ROW`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Self, cast

import mlx.core as mx


class RaggedArray(mx.array):
    """An array whose row i is `rows[i]`, (1, heads, tokens, dim).

    A subclass of MLX's array, because MLX's operators accept only arrays.
    """

    rows: tuple[mx.array, ...]

    def __new__(cls, rows: Sequence[mx.array], dtype: mx.Dtype) -> Self:  # noqa: ARG004
        return cast(Callable[[type], Self], mx.array.__new__)(cls)

    def __init__(self, rows: Sequence[mx.array], dtype: mx.Dtype) -> None:
        super().__init__(nothing_of(dtype))
        self.rows = tuple(rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape. If the rows' lengths differ, an array (batch,) of them replaces the length."""
        sizes = zip(*(row.shape[1:] for row in self.rows), strict=True)
        merged = [one[0] if len(set(one)) == 1 else mx.array(one, mx.int32) for one in sizes]
        return cast(tuple[int, ...], (len(self.rows), *merged))

    def each(self, change: Callable[[mx.array], mx.array], dtype: mx.Dtype) -> RaggedArray:
        return RaggedArray(list(map(change, self.rows)), dtype)

    def swapaxes(self, axis1: int, axis2: int, stream: object = None) -> RaggedArray:  # noqa: ARG002
        """Swap axes in each row."""
        return self.each(lambda row: row.swapaxes(axis1, axis2), self.dtype)

    def astype(self, dtype: mx.Dtype, stream: object = None) -> RaggedArray:  # noqa: ARG002
        """Convert row by row."""
        return self.each(lambda row: row.astype(dtype), dtype)

    def __mul__(self, factor: object) -> RaggedArray:
        return self.each(lambda row: row * cast(float, factor), self.dtype)

    __imul__ = __mul__  # MLX's operator would scale an array without elements

    def __truediv__(self, divisor: object) -> RaggedArray:
        return self.each(lambda row: row / cast(float, divisor), self.dtype)

    def __matmul__(self, right: mx.array) -> mx.array:
        """Multiply row by row, and return a plain array."""
        if not isinstance(right, RaggedArray):
            return NotImplemented
        return mx.concatenate([product(*pair) for pair in zip(self.rows, right.rows, strict=True)])

    def __rmatmul__(self, left: mx.array) -> RaggedArray:
        """Multiply row i of `left`, (batch, ...), by row i of this array."""
        pairs = zip(rows_of(left), self.rows, strict=True)
        return RaggedArray([product(*pair) for pair in pairs], self.dtype)


def product(left: mx.array, right: mx.array) -> mx.array:
    """Return `left @ right`. `right` may have one head for all heads of `left`."""
    if left.shape[-2] > 1 or right.shape[-3] > 1:
        return left @ right
    return mx.expand_dims(left.squeeze(-2) @ right.squeeze(-3), -2)


def rows_of(x: mx.array) -> list[mx.array]:
    """Return the rows of a batch as separate arrays, (1, ...)."""
    return list(mx.split(x, x.shape[0])) if x.shape[0] > 1 else [x]


@functools.cache
def nothing_of(dtype: mx.Dtype) -> mx.array:
    """Return an array without elements."""
    return mx.zeros((0, 7, 0, 11, 0, 13), dtype)  # broadcasts with no array of a model


def _row_by_row(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(function)
    def of_rows(x: mx.array, *others: object, **named: object) -> mx.array:
        if isinstance(x, RaggedArray):
            return x.each(lambda row: function(row, *others, **named), x.dtype)
        return function(x, *others, **named)

    return of_rows


def _depends(x: mx.array, dependencies: Sequence[mx.array]) -> mx.array:
    """Like `mx.depends`, but row by row."""
    if not isinstance(x, RaggedArray):
        return cast(mx.array, mx.depends(x, dependencies))
    others = zip(*(cast(RaggedArray, one).rows for one in dependencies), strict=True)
    rows = [mx.depends(row, list(its)) for row, its in zip(x.rows, others, strict=True)]
    return RaggedArray(rows, x.dtype)


ROW_BY_ROW: Final[Mapping[str, Callable[..., mx.array]]] = {
    "depends": _depends,
    **{
        name: _row_by_row(cast(Callable[..., mx.array], getattr(mx, name)))
        for name in ("expand_dims", "softmax", "tanh", "tile")
    },
}
"""Replacements for the functions of `mx` that models apply to keys, values and scores."""
