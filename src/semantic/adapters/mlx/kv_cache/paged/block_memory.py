"""A `BlockMemory` over paged caches. It copies stored blocks to and from whole pages.

If a block body equals one page, the device's copy engine copies it. Otherwise this module first
collects block bodies in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import mlx.core as mx

from semantic.adapters.mlx.arrays import Bytes, array_from, ordered_bytes_of
from semantic.adapters.mlx.kv_cache.checkpoint import StoredArray
from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import cut_at_blocks
from semantic.adapters.mlx.kv_cache.paged.cache import PagedCache
from semantic.adapters.mlx.kv_cache.paged.layers import first_paged
from semantic.adapters.mlx.kv_cache.paged.page_pool import Loan, PageKind, PageTable
from semantic.adapters.mlx.kv_cache.staging import InPlace, Piece, Staging, blocks_in, require_held
from semantic.adapters.mlx.transfers import ArrivingBody, Room, Rows, Transfers
from semantic.domain.block_hash import Part
from semantic.domain.errors import BackendError
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.generation import BodyTarget

KEYS, VALUES = 0, 1


def token_bytes(kind: PageKind) -> tuple[int, int]:
    """Return the sizes, in bytes, of one token's key and value in one head."""
    shape = kind.shape
    return shape.k_head_dim * shape.dtype.size, shape.v_head_dim * shape.dtype.size


class HostPage:
    """The bytes of one page, in host memory."""

    def __init__(self, kind: PageKind) -> None:
        self._heads = kind.shape.kv_heads
        self._token_bytes = token_bytes(kind)
        self._layer_bytes = kind.page_bytes // len(kind.layers)
        self.data = memoryview(bytearray(kind.page_bytes))

    def head(self, layer: int, which: int, head: int) -> memoryview:
        """Return the bytes of one head's 256 tokens in a layer. `which` is KEYS or VALUES."""
        size = BLOCK_TOKENS * self._token_bytes[which]
        first = layer * self._layer_bytes
        if which == VALUES:
            first += self._heads * BLOCK_TOKENS * self._token_bytes[KEYS]
        at = first + head * size
        return self.data[at : at + size]

    def heads(self, layer: int) -> Iterator[memoryview]:
        """Yield the bytes of each head of a layer's keys, then of its values."""
        for which in (KEYS, VALUES):
            for head in range(self._heads):
                yield self.head(layer, which, head)


class HostRing:
    """Host pages of a ring, by their index in the page table."""

    def __init__(self, kind: PageKind) -> None:
        self._kind = kind
        self.pages: dict[int, HostPage] = {}

    def put(self, layer: int, tokens: range, keys: Bytes, values: Bytes) -> None:
        """Write the keys and values, (kv_heads, n, head_dim), of the positions in `tokens`."""
        for piece in cut_at_blocks(tokens.start, tokens.stop):
            page = self._page(piece.start // BLOCK_TOKENS)
            for which, raw in ((KEYS, memoryview(keys)), (VALUES, memoryview(values))):
                of_token = token_bytes(self._kind)[which]
                size, slot = len(piece) * of_token, piece.start % BLOCK_TOKENS * of_token
                for head in range(self._kind.shape.kv_heads):
                    at = (head * len(tokens) + piece.start - tokens.start) * of_token
                    page.head(layer, which, head)[slot : slot + size] = raw[at : at + size]

    def put_block(self, block: int, staged: HostPage, n_tokens: int) -> None:
        """Copy the first `n_tokens` tokens of `staged` to block number `block`, in all layers."""
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
    """Copy `pages[i]` to page i of `table`, for each i; yield the arrays to evaluate."""
    kind = table.pool.kind
    for at, page in pages.items():
        data = array_from(page.data, kind.shape.dtype, (1, *kind.page_shape))
        yield attention.store(table.pool, [table.refs[at].index], data)


def page_rows(kind: PageKind, n_tokens: int) -> Sequence[Rows]:
    """Return `Rows` that copy the first `n_tokens` tokens of each layer and head in a page."""
    if n_tokens == BLOCK_TOKENS:
        return [Rows(1, kind.page_bytes, kind.page_bytes)]
    heads, n_layers = kind.shape.kv_heads, len(kind.layers)
    keys, values = token_bytes(kind)
    if keys == values:  # the same rows as below, in one copy
        return [Rows(n_layers * 2 * heads, n_tokens * keys, BLOCK_TOKENS * keys)]
    rows: list[Rows] = []
    at = 0
    for width in (keys, values) * n_layers:
        rows.append(Rows(heads, n_tokens * width, BLOCK_TOKENS * width, at))
        at += heads * BLOCK_TOKENS * width
    return rows


class PageTarget:
    """A `BodyTarget` that writes a block body to one page."""

    def __init__(self, transfers: Transfers, page: Loan, kind: PageKind) -> None:
        self._transfers = transfers
        self._page = page
        self._kind = kind
        self._memory: memoryview | None = None

    def put(self, body: bytes | memoryview) -> None:
        self._send(body, len(body) * BLOCK_TOKENS // self._kind.page_bytes)
        self.close()

    def open(self) -> list[memoryview]:
        try:
            self._memory = self._transfers.memory.take(self._kind.page_bytes)
        except MemoryError as error:
            raise BackendError(str(error)) from error
        return [self._memory]

    def close(self, n_tokens: int = 0) -> None:
        memory, self._memory = self._memory, None
        try:
            if memory is not None and n_tokens:
                self._send(memory, n_tokens)
        finally:
            self._page.end()

    def _send(self, data: bytes | memoryview, n_tokens: int) -> None:
        rows = page_rows(self._kind, n_tokens)
        if sum(one.nbytes for one in rows) > len(data):
            raise BackendError(f"a body of {len(data)} bytes does not hold {n_tokens} tokens")
        try:
            self._transfers.send(data, self._page, rows)
        except RuntimeError as error:
            raise BackendError(str(error)) from error


HostPages = dict[int, HostPage]
"""Host pages of one kind of layers, by block number."""


class PagedMemory:
    """A `BlockMemory` for caches in pages; `attention[i]` writes the pages of kind i."""

    def __init__(self, attention: Sequence[PagedAttention], transfers: Transfers | None) -> None:
        """`transfers` use the device's copy engine, if there is one."""
        self._attention = attention
        self._transfers = transfers

    def deferred(
        self, caches: Sequence[PagedCache], layers: Sequence[int], tokens: range, room: Room | None
    ) -> ArrivingBody | None:
        """See `BlockMemory.deferred`. Returns None for window layers: their pages may change."""
        if self._transfers is None or not _is_one_page(caches, layers):
            return None
        cache = caches[layers[0]]
        require_held(layers[0], cache.held, tokens)
        mx.eval([caches[i].state for i in layers])  # makes sure that the tokens are in the pages
        table = cache.table
        page = table.refs[tokens.start // BLOCK_TOKENS]
        rows = page_rows(table.pool.kind, len(tokens))
        return self._transfers.fetch(table.pool.lend(page), rows, room)

    def reader(self, caches: Sequence[PagedCache]) -> _Reader:
        return _Reader(caches)

    def stage(
        self,
        caches: Sequence[PagedCache],
        staging: Staging[HostPages],
        layers: Sequence[int],
        part: Part,
        tokens: range,
    ) -> list[BodyTarget]:
        if part is Part.FULL:
            for i in layers:
                if not caches[i].table.has_capacity(tokens.stop):
                    capacity = len(caches[i].table.refs) * BLOCK_TOKENS
                    raise BackendError(
                        f"cannot load {tokens.stop} tokens into pages for {capacity}"
                    )
        by_kind = staging.full if part is Part.FULL else staging.window
        first = tokens.start // BLOCK_TOKENS
        blocks = range(first, first + blocks_in(tokens))
        if self._transfers is not None and _is_one_page(caches, layers):
            table = caches[layers[0]].table
            lent = [table.pool.lend(table.refs[block]) for block in blocks]
            return [PageTarget(self._transfers, page, table.pool.kind) for page in lent]
        for i in layers:
            number, kind = caches[i].layer.kind, caches[i].table.pool.kind
            if number not in by_kind:
                by_kind[number] = {block: HostPage(kind) for block in blocks}
        return [
            InPlace(
                [
                    view
                    for i in layers
                    for view in by_kind[caches[i].layer.kind][block].heads(caches[i].layer.number)
                ]
            )
            for block in blocks
        ]

    def restore(
        self,
        caches: Sequence[PagedCache],
        staging: Staging[HostPages],
        length: int,
        pieces: Sequence[Piece],
    ) -> list[PagedCache]:
        rings = _rings(caches, staging, length, pieces)
        tables = first_paged(caches).sequence.tables
        evaluated: list[mx.array] = []
        for kind, pages in staging.full.items():
            needed = {at: page for at, page in pages.items() if at * BLOCK_TOKENS < length}
            evaluated += upload(tables[kind], self._attention[kind], needed)
        for kind, ring in rings.items():
            tables[kind].reserve(length)
            evaluated += upload(tables[kind], self._attention[kind], ring.pages)
        mx.eval(evaluated)
        firsts = {piece.layer: piece.tokens.start for piece in pieces}
        for i, cache in enumerate(caches):
            if isinstance(cache, PagedCache):
                cache.offset = length
                cache.first = firsts.get(i, cache.first)
        return list(caches)


def _is_one_page(caches: Sequence[PagedCache], layers: Sequence[int]) -> bool:
    if not layers:
        return False
    kind = caches[layers[0]].table.pool.kind
    return kind.ring is None and tuple(layers) == kind.layers


def _rings(
    caches: Sequence[PagedCache], staging: Staging[HostPages], length: int, pieces: Sequence[Piece]
) -> dict[int, HostRing]:
    """Return the ring of each kind that has a window, after `length` tokens."""
    rings: dict[int, HostRing] = {}
    for i, tokens, _ in pieces:
        if (kind := caches[i].layer.kind) in rings:
            continue
        ring = rings[kind] = HostRing(caches[i].table.pool.kind)
        if tokens.stop < length:
            staging.require_window(range(tokens.stop, length))
            for part in cut_at_blocks(tokens.stop, length):
                block = part.start // BLOCK_TOKENS
                n_tokens = part.stop - block * BLOCK_TOKENS
                ring.put_block(block, staging.window[kind][block], n_tokens)
    for i, tokens, tree in pieces:  # last, so that a page keeps the checkpoint's tokens
        keys, values = cast(tuple[StoredArray, StoredArray], tree)
        layer = caches[i].layer
        data = b"".join(keys.data), b"".join(values.data)
        rings[layer.kind].put(layer.number, tokens, *data)
    return rings


class _Reader:
    def __init__(self, caches: Sequence[PagedCache]) -> None:
        self._caches = caches
        self._read: dict[tuple[int, range], tuple[memoryview, memoryview]] = {}

    def __call__(self, layer: int, tokens: range) -> tuple[list[memoryview], list[memoryview]]:
        cache = self._caches[layer]
        held = cache.held
        require_held(layer, held, tokens)
        if not tokens:
            return [], []
        key = cache.layer.kind, tokens
        if key not in self._read:
            self._read[key] = _tokens_of(cache, tokens)
        n_layers, number = len(cache.table.pool.kind.layers), cache.layer.number
        keys, values = (
            [raw[number * len(raw) // n_layers : (number + 1) * len(raw) // n_layers]]
            for raw in self._read[key]
        )
        return keys, values


def _tokens_of(cache: PagedCache, tokens: range) -> tuple[memoryview, memoryview]:
    """Return the keys and values of `tokens`, each (layers, kv_heads, n, head_dim)."""
    table = cache.table
    kind = table.pool.kind
    pieces: tuple[list[mx.array], list[mx.array]] = ([], [])
    for piece in cut_at_blocks(tokens.start, tokens.stop):
        block, slot = divmod(piece.start, BLOCK_TOKENS)
        page = table.pool.data[table.refs[kind.turn(block)].index]
        for mine, heads in zip(pieces, kind.keys_and_values(page), strict=True):
            mine.append(heads[:, :, slot : slot + len(piece)])
    keys, values = (
        ordered_bytes_of(mine[0] if len(mine) == 1 else mx.concatenate(mine, axis=2))
        for mine in pieces
    )
    return keys, values
