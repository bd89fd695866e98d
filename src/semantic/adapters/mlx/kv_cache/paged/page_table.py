"""The columns of one sequence, kind by kind, and what a block of a preempted one holds.

Knows how many tokens there is room for; not which are there, nor what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from semantic.adapters.mlx.arrays import on_device
from semantic.adapters.mlx.kv_cache.paged.page_pool import Lease, Pages
from semantic.domain.value_objects import BLOCK_TOKENS


class Chain:
    """A sequence's columns of one kind: block i in column i, or in turn where there is a window."""

    __slots__ = ("_array", "leases", "pages")

    def __init__(self, pages: Pages, leases: Sequence[Lease] = ()) -> None:
        self.pages = pages
        self.leases = list(leases)
        self._array: mx.array | None = None

    @property
    def columns(self) -> list[int]:
        """Where its columns are."""
        return [lease.index for lease in self.leases]

    def array(self) -> mx.array:
        """The same for a kernel, int32; there is one at least."""
        if self._array is None:
            self._array = on_device(self.columns)
        return self._array

    def columns_for(self, n_tokens: int) -> int:
        """Columns that a sequence of `n_tokens` has."""
        needed = -(-n_tokens // BLOCK_TOKENS)
        ring = self.pages.kind.ring
        return needed if ring is None else min(needed, ring)

    def has_room(self, n_tokens: int) -> bool:
        """Whether a sequence of `n_tokens` has a column for each."""
        return len(self.leases) >= self.columns_for(n_tokens)

    def reserve(self, n_tokens: int) -> None:
        """Have a column for each of `n_tokens`."""
        if not self.has_room(n_tokens):
            while not self.has_room(n_tokens):
                self.leases.append(self.pages.take())
            self._array = None


class PagedSequence:
    """One sequence's chains, one per kind; the caches of all its layers share it."""

    __slots__ = ("__weakref__", "chains")

    def __init__(self, chains: Sequence[Chain]) -> None:
        self.chains = tuple(chains)

    def reserve(self, n_tokens: int) -> None:
        """Have room for `n_tokens` in every layer."""
        for chain in self.chains:
            chain.reserve(n_tokens)


class Page(NamedTuple):
    """What a block holds: a column, `leases[at]`, of a kind whose columns may be used in turn.

    The blocks of all layers of the kind hold the same one. `first` to `stop` are the positions
    that the columns hold altogether, `nbytes` the bytes of one layer's share of a column.
    """

    leases: tuple[Lease, ...]
    at: int
    first: int
    stop: int
    nbytes: int
