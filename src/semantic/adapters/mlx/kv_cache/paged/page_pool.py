"""The pages of one kind of layers: one array of columns, and who uses which.

A column holds 256 tokens of all layers of the kind. It is free when the last lease on it is
dropped, whoever drops it. Knows no sequences and no budget.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.paged.kinds import PageKind

_FEWEST = 4
"""Columns to begin with where nobody said how many there will be."""


@dataclass(slots=True)
class _Column:
    """`index` is its place in the array, `users` how many leases there are on it."""

    index: int
    users: int = 0


class Lease:
    """One user's hold on a column, until it is dropped."""

    __slots__ = ("_column", "_pages")

    def __init__(self, pages: Pages, column: _Column) -> None:
        self._pages = pages
        self._column = column
        column.users += 1

    def __del__(self) -> None:
        self._pages.give_back(self._column)

    @property
    def index(self) -> int:
        """The column's place in the array."""
        return self._column.index

    @property
    def is_shared(self) -> bool:
        """Whether somebody else uses the column as well: then nobody may write to it."""
        return self._column.users > 1

    def of(self, pages: Pages) -> bool:
        """Whether the column is one of `pages`."""
        return self._pages is pages


class Pages:
    """Columns of one kind, (columns, layers, 2, kv_heads, 256, head_dim).

    Any thread may drop a lease; all else is for the thread that computes.
    """

    def __init__(self, kind: PageKind) -> None:
        self.kind = kind
        self._data: mx.array | None = None
        self._free: list[int] = []
        self._enough: int | None = None
        self._lock = threading.RLock()  # a lease may be dropped while one is taken

    @property
    def data(self) -> mx.array:
        """The array. Kernels write to it where it is; it is another one when there are more."""
        if self._data is None:
            self.grow(_FEWEST)
        if self._data is None:
            raise AssertionError("pages without an array")
        return self._data

    @data.setter
    def data(self, data: mx.array) -> None:
        self._data = data

    @property
    def n_columns(self) -> int:
        """Columns there are."""
        return 0 if self._data is None else self._data.shape[0]

    @property
    def n_used(self) -> int:
        """Columns that somebody uses."""
        return self.n_columns - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return self.n_columns * self.kind.column_bytes

    def take(self) -> Lease:
        """A column that nobody uses; makes more where there is none."""
        if not self._free:
            self.grow(self._next_size())
        with self._lock:
            return Lease(self, _Column(self._free.pop()))

    def share(self, lease: Lease) -> Lease:
        """Another user's hold on the same column."""
        with self._lock:
            return Lease(self, lease._column)  # noqa: SLF001  # a friend

    def give_back(self, column: _Column) -> None:
        """One user less; for leases only."""
        with self._lock:
            column.users -= 1
            if not column.users:
                self._free.append(column.index)

    def expect(self, n_columns: int) -> None:
        """Stop at `n_columns` when there come to be more, unless even that is not enough."""
        self._enough = n_columns

    def abandon(self) -> None:
        """Let go of the array: nobody will ask for a column again."""
        self._data = None
        with self._lock:
            self._free.clear()

    def grow(self, n_columns: int) -> None:
        """Have `n_columns` at least. Copies those there are, so it is for the beginning."""
        more = n_columns - self.n_columns
        if more <= 0:
            return
        added = mx.zeros((more, *self.kind.column_shape), self.kind.shape.dtype)
        grown = added if self._data is None else mx.concatenate([self._data, added])
        mx.eval(grown)
        first = self.n_columns
        self._data = grown
        with self._lock:
            # The lowest is the next to be taken. In place: a lease that is dropped just now, in
            # the same thread, adds to the same list.
            self._free[:0] = range(n_columns - 1, first - 1, -1)

    def _next_size(self) -> int:
        size = max(_FEWEST, 2 * self.n_columns)
        if self._enough is not None and self.n_columns < self._enough:
            return min(size, self._enough)
        return size
