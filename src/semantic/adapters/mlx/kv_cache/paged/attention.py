"""What computes over pages: the contract, and an implementation in MLX's own operations.

The kernels (`kernels.py`) are the fast one. This one works on every device and copies what it
reads: it is what the kernels are compared with, and what runs the tests where there are none.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.paged.batch_metadata import Lineup
from semantic.adapters.mlx.kv_cache.paged.page_pool import Pages
from semantic.adapters.mlx.kv_cache.paged.page_table import Chain
from semantic.adapters.mlx.kv_cache.paged.split_kv import RowPages, cut_at_blocks
from semantic.domain.value_objects import BLOCK_TOKENS


class Appended(NamedTuple):
    """Keys and values that a chunk attends to, and what to evaluate for it to be in the pages."""

    k: mx.array
    v: mx.array
    done: mx.array


class Place(NamedTuple):
    """Which layer of which step is computed: the kind's number, and the layer's in its kind."""

    lineup: Lineup
    step: int
    kind: int
    layer: int

    @property
    def pages(self) -> Pages:
        """Where the layer's tokens are."""
        return self.lineup.sequences[0].chains[self.kind].pages


class PagedAttention(Protocol):
    """Computes over the pages of one kind of layers. `layer` is a layer's number in its kind."""

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        place: Place,
        scale: float,
        sinks: mx.array | None,
        after: mx.array | None,
    ) -> mx.array:
        """One new token per sequence: put into its page, and its attention.

        `q` is (rows, heads, 1, head_dim), `k` and `v` (rows, kv_heads, 1, head_dim); the result
        is like `q`. `after` is the result of the step before, whose tokens are to be seen.
        """
        ...

    def append(
        self,
        k: mx.array,
        v: mx.array,
        chain: Chain,
        at: int,
        gather_from: int,
        layer: int,
        after: mx.array | None,
    ) -> Appended:
        """Put a chunk, (1, kv_heads, n, head_dim), at position `at`; gather from an earlier one.

        `after` is the `done` of the chunk before.
        """
        ...

    def store(self, pages: Pages, columns: list[int], data: mx.array) -> mx.array:
        """Put whole columns, (n, layers, 2, kv_heads, 256, head_dim), where `columns` says.

        Returns what to evaluate.
        """
        ...

    def copy(self, pages: Pages, columns: list[int], to: list[int]) -> mx.array:
        """Copy whole columns to others; returns what to evaluate."""
        ...


class PortableAttention:
    """Implements `PagedAttention` in MLX's operations."""

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        place: Place,
        scale: float,
        sinks: mx.array | None,
        after: mx.array | None,  # noqa: ARG002  # the pages themselves say what was before
    ) -> mx.array:
        """See `PagedAttention.attend`."""
        results = []
        pages, layer = place.pages, place.layer
        rows = place.lineup.rows(place.kind, place.step)
        # All of them first: MLX writes in place only while nobody is to read what was before.
        for i, row in enumerate(rows):
            _write(pages, row, layer, row.position, k[i], v[i])
        for i, row in enumerate(rows):
            keys, values = _read(pages, row, layer, row.first, row.position + 1)
            results.append(
                mx.fast.scaled_dot_product_attention(
                    q[i : i + 1], keys, values, scale=scale, sinks=sinks
                )
            )
        return mx.concatenate(results)

    def append(
        self,
        k: mx.array,
        v: mx.array,
        chain: Chain,
        at: int,
        gather_from: int,
        layer: int,
        after: mx.array | None,  # noqa: ARG002  # see `attend`
    ) -> Appended:
        """See `PagedAttention.append`."""
        pages, n = chain.pages, k.shape[2]
        kind = pages.kind
        row = RowPages(at, chain.columns, kind.window, kind.ring)
        old_k, old_v = _read(pages, row, layer, min(gather_from, at), at)
        if at > gather_from:
            mx.eval(old_k, old_v)  # before others take their place
        first = kind.first_kept(at, at + n)
        _write(pages, row, layer, first, k[0][:, first - at :], v[0][:, first - at :])
        if at <= gather_from:
            return Appended(k, v, pages.data)
        all_k, all_v = mx.concatenate([old_k, k], axis=2), mx.concatenate([old_v, v], axis=2)
        return Appended(all_k, all_v, pages.data)

    def store(self, pages: Pages, columns: list[int], data: mx.array) -> mx.array:
        """See `PagedAttention.store`."""
        for column, one in zip(columns, data, strict=True):
            pages.data[column] = one
        return pages.data

    def copy(self, pages: Pages, columns: list[int], to: list[int]) -> mx.array:
        """See `PagedAttention.copy`."""
        return self.store(pages, to, mx.take(pages.data, mx.array(columns), axis=0))


def _write(pages: Pages, row: RowPages, layer: int, at: int, k: mx.array, v: mx.array) -> None:
    """Put tokens, (kv_heads, n, head_dim), at position `at`."""
    for piece in cut_at_blocks(at, at + k.shape[1]):
        column = row.column(piece.start // BLOCK_TOKENS)
        slot = piece.start % BLOCK_TOKENS
        for which, tokens in enumerate((k, v)):
            cut = tokens[:, piece.start - at : piece.stop - at]
            pages.data[column, layer, which, :, slot : slot + len(piece)] = cut


def _read(
    pages: Pages, row: RowPages, layer: int, first: int, stop: int
) -> tuple[mx.array, mx.array]:
    """Keys and values of positions `first` to `stop`, (1, kv_heads, n, head_dim) each."""
    shape = pages.kind.shape
    if first >= stop:
        nothing = mx.zeros((1, shape.kv_heads, 0, shape.k_head_dim), shape.dtype)
        return nothing, nothing
    pieces = [
        pages.data[
            row.column(piece.start // BLOCK_TOKENS),
            layer,
            :,
            :,
            piece.start % BLOCK_TOKENS : (piece.stop - 1) % BLOCK_TOKENS + 1,
        ]
        for piece in cut_at_blocks(first, stop)
    ]
    both = mx.concatenate(pieces, axis=2)
    return both[0][None], both[1][None]
