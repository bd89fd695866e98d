"""Columns in the host's memory, on their way to the pages: written token by token, sent in one.

Knows where a token's bytes lie in a column; neither stores nor devices.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from semantic.adapters.mlx.arrays import Bytes, array_from
from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention
from semantic.adapters.mlx.kv_cache.paged.kinds import PageKind
from semantic.adapters.mlx.kv_cache.paged.page_table import Chain
from semantic.adapters.mlx.kv_cache.paged.split_kv import cut_at_blocks
from semantic.domain.value_objects import BLOCK_TOKENS

KEYS, VALUES = 0, 1


class Column:
    """One column's bytes."""

    def __init__(self, kind: PageKind) -> None:
        _, _, self._heads, _, dim = kind.column_shape
        self._token_bytes = dim * kind.shape.dtype.size
        self._view = memoryview(bytearray(kind.column_bytes))

    def raw(self) -> memoryview:
        """All of it."""
        return self._view

    def head(self, layer: int, which: int, head: int) -> memoryview:
        """The bytes of 256 tokens of one head; `which` is KEYS or VALUES."""
        size = BLOCK_TOKENS * self._token_bytes
        at = ((layer * 2 + which) * self._heads + head) * size
        return self._view[at : at + size]

    def heads(self, layer: int) -> Iterator[memoryview]:
        """The same of a layer's keys, head by head, then of its values."""
        for which in (KEYS, VALUES):
            for head in range(self._heads):
                yield self.head(layer, which, head)

    def put(self, layer: int, which: int, slot: int, tokens: memoryview) -> None:
        """Write tokens of all heads, (kv_heads, n, head_dim), at `slot`."""
        per_head = len(tokens) // self._heads
        at = slot * self._token_bytes
        for head in range(self._heads):
            data = tokens[head * per_head : (head + 1) * per_head]
            self.head(layer, which, head)[at : at + per_head] = data


class StagedRing:
    """The columns of a ring, filled from the host."""

    def __init__(self, kind: PageKind) -> None:
        self._kind = kind
        self.columns: dict[int, Column] = {}

    def put(self, layer: int, tokens: range, keys: Bytes, values: Bytes) -> None:
        """Write the keys and values, (kv_heads, n, head_dim), of positions `tokens`."""
        shape = self._kind.shape
        token_bytes = shape.k_head_dim * shape.dtype.size
        for piece in cut_at_blocks(tokens.start, tokens.stop):
            column = self._column(piece.start // BLOCK_TOKENS)
            for which, raw in ((KEYS, memoryview(keys)), (VALUES, memoryview(values))):
                per_head = len(tokens) * token_bytes
                first = (piece.start - tokens.start) * token_bytes
                size = len(piece) * token_bytes
                starts = range(first, shape.kv_heads * per_head, per_head)
                cut = memoryview(b"".join(raw[at : at + size] for at in starts))
                column.put(layer, which, piece.start % BLOCK_TOKENS, cut)

    def put_block(self, block: int, landed: Column, n_tokens: int) -> None:
        """Write the first `n_tokens` of a block, of all layers."""
        column = self._column(block)
        shape = self._kind.shape
        size = n_tokens * shape.k_head_dim * shape.dtype.size
        for layer in range(len(self._kind.layers)):
            for to, data in zip(column.heads(layer), landed.heads(layer), strict=True):
                to[:size] = data[:size]

    def _column(self, block: int) -> Column:
        at = self._kind.turn(block)
        if at not in self.columns:
            self.columns[at] = Column(self._kind)
        return self.columns[at]


def send(chain: Chain, attention: PagedAttention, columns: dict[int, Column]) -> Iterator[mx.array]:
    """Put columns where they belong in a chain, each in one piece; gives what to evaluate."""
    kind = chain.pages.kind
    for at, column in columns.items():
        data = array_from(column.raw(), kind.shape.dtype, (1, *kind.column_shape))
        yield attention.store(chain.pages, [chain.leases[at].index], data)
