"""A sequence's pages as the bytes of stored blocks, and back.

The bodies are those of caches in buffers: what one wrote the other reads.
A column goes to the device and comes back in one piece. Knows layers and their pages; neither
stores nor which sequence is decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import mlx.core as mx

from semantic.adapters.mlx.arrays import ordered_bytes_of
from semantic.adapters.mlx.kv_cache.block_layout import (
    assign_parts,
    blocks_in,
    describe,
    window_edge,
    window_start,
)
from semantic.adapters.mlx.kv_cache.checkpoint import (
    ArrayForm,
    StoredArray,
    Tree,
    read_checkpoint,
    write_checkpoint,
)
from semantic.adapters.mlx.kv_cache.paged.cache import PagedCache
from semantic.adapters.mlx.kv_cache.paged.host_pages import Column, StagedRing, send
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.split_kv import cut_at_blocks
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.adapters.mlx.kv_cache.staging import Landing, require_block, require_bodies
from semantic.domain.block_hash import Part
from semantic.domain.errors import BackendError
from semantic.domain.stored import BlockLayout
from semantic.domain.value_objects import BLOCK_TOKENS, ModelCacheSpec

Columns = dict[int, Column]
"""Of one kind of layers, by block."""


class PagedBodies:
    """Turns the pages of one model's sequences into bodies and back."""

    def __init__(
        self, spec: ModelCacheSpec, shapes: Sequence[LayerShape], layers: PagedLayers
    ) -> None:
        self._spec = spec
        self._shapes = shapes
        self._layers = layers
        self._parts = assign_parts(spec, layers.ragged)
        stored = {*self._parts.full, *self._parts.window}
        self._others = [i for i in range(spec.n_layers) if i not in stored]
        described = [(i, f"window {spec.layers[i].window}") for i in self._others]
        self.layout: BlockLayout = describe(self._parts, shapes, described)

    def export_block(
        self, caches: Sequence[PagedCache], length: int, part: Part, start: int, stop: int
    ) -> bytes:
        """See `BatchBackend.export_block`."""
        require_block(length, part, start, stop)
        reader = _Reader(caches)
        return b"".join(reader.layer(i, range(start, stop)) for i in self._parts.of(part))

    def export_checkpoint(self, caches: Sequence[PagedCache], length: int) -> bytes:
        """See `BatchBackend.export_checkpoint`."""
        reader = _Reader(caches)
        trees: list[Tree] = []
        for i, tokens in self._pieces(length):
            form = self._form(i, len(tokens))
            raw = reader.layer(i, tokens)
            trees.append(
                (StoredArray(form, [raw[: form.nbytes]]), StoredArray(form, [raw[form.nbytes :]]))
            )
        return write_checkpoint(self.layout.name, length, trees)

    def loading(
        self,
        caches: Sequence[PagedCache],
        landing: Landing[Columns],
        part: Part,
        start: int,
        stop: int,
    ) -> list[list[memoryview]]:
        """See `BatchBackend.loading`; the memory belongs to `landing` until `loaded`."""
        require_bodies(part, start, stop)
        layers = self._parts.of(part)
        if part is Part.FULL:
            self._check_full(caches, landing, start, stop)
            columns, landing.full_stop = landing.full, stop
        else:
            landing.require_no_window()
            columns = landing.window
            landing.window_start, landing.window_stop = start, stop
        first = start // BLOCK_TOKENS
        for i in layers:
            of_kind = columns.setdefault(caches[i].layer.kind, {})
            if not of_kind:
                kind = caches[i].chain.pages.kind
                for block in range(first, first + blocks_in(start, stop)):
                    of_kind[block] = Column(kind)
        return [
            [
                view
                for i in layers
                for view in columns[caches[i].layer.kind][block].heads(caches[i].layer.number)
            ]
            for block in range(first, first + blocks_in(start, stop))
        ]

    def loaded(
        self,
        caches: Sequence[PagedCache],
        landing: Landing[Columns],
        length: int,
        checkpoint: bytes | None,
    ) -> list[PagedCache]:
        """The caches after `length` tokens, as `BatchBackend.loaded` says."""
        landing.require_loaded(length, checkpoint, self.layout)
        rings: dict[int, StagedRing] = {}
        if checkpoint is not None:
            rings = self._rings(caches, landing, length, checkpoint)
        chains = caches[0].sequence.chains
        sent: list[mx.array] = []
        for kind, columns in landing.full.items():
            needed = {at: one for at, one in columns.items() if at * BLOCK_TOKENS < length}
            sent += send(chains[kind], self._layers.attention[kind], needed)
        for kind, ring in rings.items():
            chains[kind].reserve(length)
            sent += send(chains[kind], self._layers.attention[kind], ring.columns)
        mx.eval(sent)
        for i in self._parts.full:
            caches[i].offset = length
        if checkpoint is not None:
            for i, tokens in self._pieces(length):
                caches[i].offset, caches[i].first = length, tokens.start
        return list(caches)

    # Inside

    def _pieces(self, length: int) -> Iterator[tuple[int, range]]:
        """What a checkpoint holds of which layers."""
        for i in self._parts.window:
            yield i, window_edge(length, self._parts.window_tokens or 1)
        for i in self._others:
            window = self._spec.layers[i].window or 1
            yield i, range(window_start(length, window), length)

    def _form(self, layer: int, n_tokens: int) -> ArrayForm:
        shape = self._shapes[layer]
        return ArrayForm(shape.dtype, (1, shape.kv_heads, n_tokens, shape.k_head_dim))

    def _check_full(
        self, caches: Sequence[PagedCache], landing: Landing[Columns], start: int, stop: int
    ) -> None:
        landing.require_next(start, self.layout)
        for i in self._parts.full:
            if not caches[i].chain.has_room(stop):
                room = len(caches[i].chain.leases) * BLOCK_TOKENS
                raise BackendError(f"there is room for {room} tokens, not for {stop}")

    def _rings(
        self,
        caches: Sequence[PagedCache],
        landing: Landing[Columns],
        length: int,
        checkpoint: bytes,
    ) -> dict[int, StagedRing]:
        """The rings of all windows after `length` tokens.

        A block's column may hold the window's beginning as well, behind it: so blocks come first.
        """
        pieces = list(self._pieces(length))
        expected: list[Tree] = [
            (self._form(i, len(tokens)), self._form(i, len(tokens))) for i, tokens in pieces
        ]
        trees = read_checkpoint(checkpoint, self.layout.name, length, expected)
        rings: dict[int, StagedRing] = {}
        for i, tokens in pieces:
            layer = caches[i].layer
            if layer.kind in rings:
                continue
            ring = rings[layer.kind] = StagedRing(caches[i].chain.pages.kind)
            if i in self._parts.window and tokens.stop < length:
                self._put_blocks(ring, landing, layer.kind, range(tokens.stop, length))
        for (i, tokens), tree in zip(pieces, trees, strict=True):
            keys, values = cast(tuple[StoredArray, StoredArray], tree)
            layer = caches[i].layer
            rings[layer.kind].put(layer.number, tokens, b"".join(keys.data), b"".join(values.data))
        return rings

    def _put_blocks(
        self, ring: StagedRing, landing: Landing[Columns], kind: int, tokens: range
    ) -> None:
        landing.require_window(tokens)
        for piece in cut_at_blocks(tokens.start, tokens.stop):
            block = piece.start // BLOCK_TOKENS
            ring.put_block(block, landing.window[kind][block], piece.stop - block * BLOCK_TOKENS)


class _Reader:
    """Brings tokens of a kind's layers to the host, all layers at once."""

    def __init__(self, caches: Sequence[PagedCache]) -> None:
        self._caches = caches
        self._read: dict[tuple[int, range], memoryview] = {}

    def layer(self, i: int, tokens: range) -> memoryview:
        """Keys, then values, (kv_heads, n, head_dim) each, of a layer.

        Raises BackendError when the layer does not hold those tokens (any more).
        """
        cache = self._caches[i]
        held = cache.held
        if not held.start <= tokens.start <= tokens.stop <= held.stop:
            raise BackendError(
                f"layer {i} holds tokens {held.start} to {held.stop}, "
                f"not {tokens.start} to {tokens.stop}"
            )
        if not tokens:
            return memoryview(b"")
        key = cache.layer.kind, tokens
        if key not in self._read:
            self._read[key] = _tokens_of(cache, tokens)
        raw = self._read[key]
        size = len(raw) // len(cache.chain.pages.kind.layers)
        return raw[cache.layer.number * size : (cache.layer.number + 1) * size]


def _tokens_of(cache: PagedCache, tokens: range) -> memoryview:
    """All layers' keys and values of some tokens, (layers, 2, kv_heads, n, head_dim)."""
    chain = cache.chain
    pieces = []
    for piece in cut_at_blocks(tokens.start, tokens.stop):
        block, slot = divmod(piece.start, BLOCK_TOKENS)
        column = chain.leases[chain.pages.kind.turn(block)].index
        pieces.append(chain.pages.data[column][:, :, :, slot : slot + len(piece)])
    return ordered_bytes_of(pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=3))
