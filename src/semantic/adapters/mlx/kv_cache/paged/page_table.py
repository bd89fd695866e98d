"""Page tables of one sequence, one per kind of layers, and what a preempted one's blocks hold.

Knows for how many tokens there are pages; not which tokens they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from semantic.adapters.mlx.arrays import on_device
from semantic.adapters.mlx.kv_cache.paged.page_pool import PagePool, PageRef
from semantic.domain.value_objects import BLOCK_TOKENS


class PageTable:
    """A sequence's pages of one kind: block i is in page i, or i modulo the ring's size."""

    __slots__ = ("_array", "_moves", "pool", "refs")

    def __init__(self, pool: PagePool, refs: Sequence[PageRef] = ()) -> None:
        self.pool = pool
        self.refs = list(refs)
        self._array: mx.array | None = None
        self._moves = pool.moves

    @property
    def pages(self) -> list[int]:
        """Indices of its pages in the pool."""
        return [ref.index for ref in self.refs]

    def array(self) -> mx.array:
        """`pages` as an int32 array for kernels; there must be one at least."""
        if self._array is None or self._moves != self.pool.moves:
            self._array, self._moves = on_device(self.pages), self.pool.moves
        return self._array

    def pages_for(self, n_tokens: int) -> int:
        """Number of pages of a sequence of `n_tokens`."""
        needed = -(-n_tokens // BLOCK_TOKENS)
        ring = self.pool.kind.ring
        return needed if ring is None else min(needed, ring)

    def has_capacity(self, n_tokens: int) -> bool:
        """Whether there are pages for a sequence of `n_tokens`."""
        return len(self.refs) >= self.pages_for(n_tokens)

    def reserve(self, n_tokens: int) -> None:
        """Allocate the pages that a sequence of `n_tokens` still lacks."""
        if not self.has_capacity(n_tokens):
            while not self.has_capacity(n_tokens):
                self.refs.append(self.pool.take())
            self._array = None


class PagedSequence:
    """One sequence's page tables, one per kind; the caches of all its layers share it.

    `padding` is the number of tokens at the end of the chunk being computed that are not its own.
    """

    __slots__ = ("__weakref__", "padding", "tables")

    def __init__(self, tables: Sequence[PageTable]) -> None:
        self.tables = tuple(tables)
        self.padding = 0

    def reserve(self, n_tokens: int) -> None:
        """Allocate pages for `n_tokens` in every kind."""
        for table in self.tables:
            table.reserve(n_tokens)


class PagedBlock(NamedTuple):
    """What a block of a preempted sequence holds: page `refs[at]` of a page table.

    The blocks of all layers of the kind hold the same object. `first` to `stop` are the positions
    that all of the table's pages hold together; `nbytes` are the bytes of one layer in one page.
    """

    refs: tuple[PageRef, ...]
    at: int
    first: int
    stop: int
    nbytes: int
