"""Pages in host memory: written token by token while blocks are read, then uploaded whole.

Knows where a token's bytes are in a page; neither stores nor devices.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from semantic.adapters.mlx.arrays import Bytes, array_from
from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention
from semantic.adapters.mlx.kv_cache.paged.page_pool import PageKind
from semantic.adapters.mlx.kv_cache.paged.page_table import PageTable
from semantic.adapters.mlx.kv_cache.paged.split_kv import cut_at_blocks
from semantic.domain.value_objects import BLOCK_TOKENS

KEYS, VALUES = 0, 1


def token_bytes(kind: PageKind) -> tuple[int, int]:
    """Bytes of one head's key of a token, and of its value."""
    shape = kind.shape
    return shape.k_head_dim * shape.dtype.size, shape.v_head_dim * shape.dtype.size


class HostPage:
    """The bytes of one page."""

    def __init__(self, kind: PageKind) -> None:
        self._heads = kind.shape.kv_heads
        self._token_bytes = token_bytes(kind)
        self._layer_bytes = kind.page_bytes // len(kind.layers)
        self._view = memoryview(bytearray(kind.page_bytes))

    def raw(self) -> memoryview:
        """All bytes."""
        return self._view

    def head(self, layer: int, which: int, head: int) -> memoryview:
        """The bytes of 256 tokens of one head; `which` is KEYS or VALUES."""
        size = BLOCK_TOKENS * self._token_bytes[which]
        first = layer * self._layer_bytes
        if which == VALUES:
            first += self._heads * BLOCK_TOKENS * self._token_bytes[KEYS]
        at = first + head * size
        return self._view[at : at + size]

    def heads(self, layer: int) -> Iterator[memoryview]:
        """`head` of each head of a layer's keys, then of its values."""
        for which in (KEYS, VALUES):
            for head in range(self._heads):
                yield self.head(layer, which, head)

    def put(self, layer: int, which: int, slot: int, tokens: memoryview) -> None:
        """Write tokens of all heads, (kv_heads, n, head_dim), from `slot` on."""
        per_head = len(tokens) // self._heads
        at = slot * self._token_bytes[which]
        for head in range(self._heads):
            data = tokens[head * per_head : (head + 1) * per_head]
            self.head(layer, which, head)[at : at + per_head] = data


class HostRing:
    """The pages of a ring, by index in the page table."""

    def __init__(self, kind: PageKind) -> None:
        self._kind = kind
        self.pages: dict[int, HostPage] = {}

    def put(self, layer: int, tokens: range, keys: Bytes, values: Bytes) -> None:
        """Write the keys and values, (kv_heads, n, head_dim), of positions `tokens`."""
        shape = self._kind.shape
        for piece in cut_at_blocks(tokens.start, tokens.stop):
            page = self._page(piece.start // BLOCK_TOKENS)
            for which, raw in ((KEYS, memoryview(keys)), (VALUES, memoryview(values))):
                of_token = token_bytes(self._kind)[which]
                per_head = len(tokens) * of_token
                first = (piece.start - tokens.start) * of_token
                size = len(piece) * of_token
                starts = range(first, shape.kv_heads * per_head, per_head)
                cut = memoryview(b"".join(raw[at : at + size] for at in starts))
                page.put(layer, which, piece.start % BLOCK_TOKENS, cut)

    def put_block(self, block: int, staged: HostPage, n_tokens: int) -> None:
        """Write the first `n_tokens` of a block, of all layers."""
        page = self._page(block)
        for layer in range(len(self._kind.layers)):
            for to, data in zip(page.heads(layer), staged.heads(layer), strict=True):
                size = len(to) // BLOCK_TOKENS * n_tokens
                to[:size] = data[:size]

    def _page(self, block: int) -> HostPage:
        at = self._kind.turn(block)
        if at not in self.pages:
            self.pages[at] = HostPage(self._kind)
        return self.pages[at]


def upload(
    table: PageTable, attention: PagedAttention, pages: dict[int, HostPage]
) -> Iterator[mx.array]:
    """Copy host pages to the pages of a table, by index; yields the arrays to evaluate."""
    kind = table.pool.kind
    for at, page in pages.items():
        data = array_from(page.raw(), kind.shape.dtype, (1, *kind.page_shape))
        yield attention.store(table.pool, [table.refs[at].index], data)
