"""Attention over pages: the protocol, and a slow implementation in MLX's own operations.

The kernels must agree with this implementation.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import mlx.core as mx

from semantic.adapters.mlx.arrays import Heads, plain
from semantic.adapters.mlx.kv_cache.eight_bits import held_in, numbers_of, seen_as
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import (
    BatchMetadata,
    RowPages,
    cut_at_blocks,
)
from semantic.adapters.mlx.kv_cache.paged.page_pool import PagePool, PageTable
from semantic.domain.value_objects import BLOCK_TOKENS


class DecodeStep(NamedTuple):
    """One layer of a decode step: one new token per row of a batch. Rows of a sequence see each
    other's tokens.

    If `rope` is given, keys are latents and values are their rope keys. The attention is then a
    weighted sum of latents.
    """

    q: mx.array | Heads  # (rows, heads, 1, head_dim)
    k: mx.array | Heads  # (rows, kv_heads, 1, head_dim)
    v: mx.array | Heads
    metadata: BatchMetadata
    number: int  # of this step, among the steps of `metadata`
    kind: int
    layer: int  # its number within the kind
    scale: float
    sinks: mx.array | None
    after: mx.array | None  # the result of the previous step, whose tokens must be visible
    rope: mx.array | None = None  # (rows, heads, 1, v_head_dim), adds its product to the scores
    together: bool = False  # rows of one sequence may get other bits than in steps of their own

    @property
    def pool(self) -> PagePool:
        """The pool that contains the layer's pages."""
        return self.metadata.sequences[0].tables[self.kind].pool


class PrefillChunk(NamedTuple):
    """One layer's keys and values of a prefill chunk, (1, kv_heads, n, head_dim).

    The chunk begins at position `at` and attends to positions from `gather_from` on.
    """

    k: mx.array
    v: mx.array
    table: PageTable
    at: int
    gather_from: int
    layer: int  # its number within the kind
    after: mx.array | None  # `done` of the previous chunk
    padding: int = 0  # tokens at the end that are not written to pages


class Appended(NamedTuple):
    """The keys and values to which a chunk attends. Evaluating `done` writes the chunk to pages."""

    k: mx.array
    v: mx.array
    done: mx.array


class PagedAttention(Protocol):
    """Attention over the pages of one kind of layers."""

    reads_plans: bool
    """True if `attend` reads rows only from `BatchMetadata.plan` and `positions`."""

    def attend(self, step: DecodeStep) -> mx.array:
        """Write each new token to its page. Return the attention, (rows, heads, 1, width). `width`
        is the width of the values or of the latents."""

    def append(self, chunk: PrefillChunk) -> Appended:
        """Write a chunk to its pages, and gather the keys and values to which it attends."""

    def store(self, pool: PagePool, pages: list[int], data: mx.array) -> mx.array:
        """Write `data`, (n, *PageKind.page_shape), to `pages`, once the result is evaluated."""

    def copy(self, pool: PagePool, pages: list[int], to: list[int]) -> mx.array:
        """Copy page `pages[i]` to page `to[i]`, for each i, once the result is evaluated."""


class PortableAttention:
    """A `PagedAttention` in MLX's operations."""

    reads_plans = False

    def attend(self, step: DecodeStep) -> mx.array:
        """See `PagedAttention.attend`. Ignores `after`: MLX itself orders these writes."""
        results = []
        q, k, v = plain(step.q), plain(step.k), plain(step.v)
        pool, layer = step.pool, step.layer
        k, v = (held_in(pool.kind.shape.dtype, one) for one in (k, v))
        rows = step.metadata.rows(step.kind, step.number)
        # Write everything first: MLX writes in place only while no pending read needs the old
        # array.
        for i, row in enumerate(rows):
            _write(pool, row, layer, row.position, k[i], v[i])
        for i, row in enumerate(rows):
            keys, values = _read(pool, row, layer, row.first, row.position + 1)
            scores = None
            if step.rope is not None:
                scores = step.rope[i : i + 1] @ values.swapaxes(-1, -2)
                values = keys
            results.append(
                mx.fast.scaled_dot_product_attention(
                    q[i : i + 1], keys, values, scale=step.scale, mask=scores, sinks=step.sinks
                )
            )
        n_padding = q.shape[0] - len(rows)
        if n_padding:
            results.append(mx.zeros((n_padding, *results[0].shape[1:]), q.dtype))
        return mx.concatenate(results)

    def append(self, chunk: PrefillChunk) -> Appended:
        k, v, table, at, gather_from, layer, _, padding = chunk
        pool, n = table.pool, k.shape[2] - padding
        kind = pool.kind
        held_k, held_v = (held_in(kind.shape.dtype, one) for one in (k, v))
        k, v = seen_as(k.dtype, held_k), seen_as(v.dtype, held_v)
        row = RowPages(at, table.pages, kind.window, kind.ring)
        old_k, old_v = _read(pool, row, layer, min(gather_from, at), at)
        if at > gather_from:
            mx.eval(old_k, old_v)  # before the ring overwrites these tokens
        first = kind.first_kept(at, at + n)
        real = slice(first - at, n)
        _write(pool, row, layer, first, held_k[0][:, real], held_v[0][:, real])
        if at <= gather_from:
            return Appended(k, v, pool.data)
        all_k, all_v = mx.concatenate([old_k, k], axis=2), mx.concatenate([old_v, v], axis=2)
        return Appended(all_k, all_v, pool.data)

    def store(self, pool: PagePool, pages: list[int], data: mx.array) -> mx.array:
        for page, one in zip(pages, data, strict=True):
            pool.data[page] = one
        return pool.data

    def copy(self, pool: PagePool, pages: list[int], to: list[int]) -> mx.array:
        return self.store(pool, to, mx.take(pool.data, mx.array(pages), axis=0))


def _write(pool: PagePool, row: RowPages, layer: int, at: int, k: mx.array, v: mx.array) -> None:
    """Write tokens, (kv_heads, n, head_dim), from position `at` on, as the pool holds them."""
    for piece in cut_at_blocks(at, at + k.shape[1]):
        page = row.page(piece.start // BLOCK_TOKENS)
        slot = piece.start % BLOCK_TOKENS
        first = 0
        for tokens, size in zip((k, v), pool.kind.head_sizes, strict=True):
            width = tokens.shape[2]
            for head in tokens[:, piece.start - at : piece.stop - at]:
                start = first + slot * width
                pool.data[page, layer, start : start + head.size] = head.reshape(-1)
                first += size


def _read(
    pool: PagePool, row: RowPages, layer: int, first: int, stop: int
) -> tuple[mx.array, mx.array]:
    """Return keys and values of positions `first` to `stop`, each (1, kv_heads, n, head_dim)."""
    shape = pool.kind.shape
    pieces: tuple[list[mx.array], list[mx.array]] = (
        [mx.zeros((shape.kv_heads, 0, shape.k_head_dim), shape.dtype)],
        [mx.zeros((shape.kv_heads, 0, shape.v_head_dim), shape.dtype)],
    )
    for piece in cut_at_blocks(first, stop):
        tokens = slice(piece.start % BLOCK_TOKENS, (piece.stop - 1) % BLOCK_TOKENS + 1)
        page = pool.data[row.page(piece.start // BLOCK_TOKENS), layer]
        for mine, heads in zip(pieces, pool.kind.keys_and_values(page), strict=True):
            mine.append(heads[:, tokens])
    dtype = numbers_of(shape).dtype
    keys, values = (seen_as(dtype, mx.concatenate(mine, axis=1)[None]) for mine in pieces)
    return keys, values
