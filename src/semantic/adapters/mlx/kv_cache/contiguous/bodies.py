"""A sequence's caches as the bytes of stored blocks, and back.

Exports blocks and checkpoints, and lets bodies be written right where the caches keep their
tokens. Knows layers and their arrays; neither stores nor which sequence is decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from semantic.adapters.mlx.arrays import bytes_of, ordered_bytes_of
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
from semantic.adapters.mlx.kv_cache.contiguous.buffer import BufferRange, KVBuffer
from semantic.adapters.mlx.kv_cache.contiguous.cache import SequenceCache
from semantic.adapters.mlx.kv_cache.contiguous.layers import (
    ContiguousCache,
    LayerCaches,
    OwnCache,
    cache_of,
)
from semantic.adapters.mlx.kv_cache.contiguous.mlx_lm_state import (
    class_name,
    expected_state,
    read_state,
    write_state,
)
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape, trace
from semantic.adapters.mlx.kv_cache.staging import Landing, require_block, require_bodies
from semantic.domain.block_hash import Part
from semantic.domain.errors import BackendError
from semantic.domain.stored import BlockLayout
from semantic.domain.value_objects import BLOCK_TOKENS, ModelCacheSpec, whole_blocks


class _OwnFull(Protocol):
    """mlx-lm's KVCache."""

    keys: mx.array | None
    values: mx.array | None
    offset: int


class Bodies:
    """Turns the caches of one model's sequences into bodies and back."""

    def __init__(
        self,
        model: Module,
        spec: ModelCacheSpec,
        shapes: Sequence[LayerShape | None],
        layers: LayerCaches,
    ) -> None:
        self._spec = spec
        self._shapes = shapes
        self._layers = layers
        self._ragged = layers.ragged
        self._parts = assign_parts(spec, layers.ragged)
        stored = {*self._parts.full, *self._parts.window}
        self._others = [i for i in range(spec.n_layers) if i not in stored]
        self._expected: dict[int, Tree] = {}
        own = [i for i in self._others if not self._ragged[i]]
        if own:
            # Only shapes are taken over; the arrays are dropped without being computed.
            caches = cast(list[OwnCache], trace(model, 1))
            self._expected = {i: expected_state(caches[i]) for i in own}
            self._names = {i: class_name(caches[i]) for i in own}
        else:
            self._names = {}
        described = [
            (i, self._names.get(i, f"window {spec.layers[i].window}")) for i in self._others
        ]
        self.layout: BlockLayout = describe(self._parts, shapes, described)

    def export_block(
        self, caches: Sequence[ContiguousCache], length: int, part: Part, start: int, stop: int
    ) -> bytes:
        """See `BatchBackend.export_block`."""
        require_block(length, part, start, stop)
        segments: list[memoryview] = []
        for layer in self._parts.of(part):
            segments += self._segments(caches[layer], layer, start, stop)
        return b"".join(segments)

    def export_checkpoint(self, caches: Sequence[ContiguousCache], length: int) -> bytes:
        """See `BatchBackend.export_checkpoint`."""
        trees: list[Tree] = []
        for layer, tokens in self._pieces(length):
            if tokens is None:
                trees.append(write_state(cast(OwnCache, caches[layer])))
                continue
            data = list(self._segments(caches[layer], layer, tokens.start, tokens.stop))
            heads = self._shape(layer).kv_heads
            keys, values = self._piece_forms(layer, len(tokens))
            trees.append((StoredArray(keys, data[:heads]), StoredArray(values, data[heads:])))
        return write_checkpoint(self.layout.name, length, trees)

    def loading(
        self,
        caches: Sequence[ContiguousCache],
        landing: Landing[KVBuffer],
        part: Part,
        start: int,
        stop: int,
    ) -> list[list[memoryview]]:
        """See `BatchBackend.loading`; the memory belongs to `landing` until `loaded`."""
        require_bodies(part, start, stop)
        if part is Part.WINDOW:
            buffers = self._beside(landing, start, stop)
            first = 0
        else:
            buffers = self._in_place(caches, landing, start, stop)
            first = start
        mx.eval([(buffer.k, buffer.v) for buffer in buffers.values()])
        raw = [(bytes_of(a), a.shape[1], a.shape[2]) for b in buffers.values() for a in (b.k, b.v)]
        return [
            [view for array in raw for view in _head_views(*array, at, at + BLOCK_TOKENS)]
            for at in range(first, first + blocks_in(start, stop) * BLOCK_TOKENS, BLOCK_TOKENS)
        ]

    def loaded(
        self,
        caches: Sequence[ContiguousCache],
        landing: Landing[KVBuffer],
        length: int,
        checkpoint: bytes | None,
    ) -> list[ContiguousCache]:
        """The caches after `length` tokens, as `BatchBackend.loaded` says."""
        landing.require_loaded(length, checkpoint, self.layout)
        made = {}
        if checkpoint is not None:
            made = self._from_checkpoint(caches, landing, length, checkpoint)
            mx.eval([cache.state for cache in made.values()])
        for layer, buffer in landing.full.items():
            _set_full(caches[layer], buffer, length)
        return [made.get(i, cache) for i, cache in enumerate(caches)]

    # Export

    def _shape(self, layer: int) -> LayerShape:
        shape = self._shapes[layer]
        if shape is None:
            raise AssertionError(f"layer {layer} has no keys and values")
        return shape

    def _segments(
        self, cache: ContiguousCache, layer: int, start: int, stop: int
    ) -> Iterator[memoryview]:
        """The bytes of tokens `start` to `stop`: keys, then values, head by head."""
        buffer, held = _tokens_of(cache)
        if not held.start <= start <= stop <= held.stop:
            raise BackendError(
                f"layer {layer} holds tokens {held.start} to {held.stop}, not {start} to {stop}"
            )
        if start == stop:
            return
        for array, form in zip((buffer.k, buffer.v), self._piece_forms(layer, 1), strict=True):
            if (array.dtype, array.shape[1], array.shape[3]) != (
                form.dtype,
                form.shape[1],
                form.shape[3],
            ):
                raise BackendError(f"layer {layer} holds {array.dtype} of shape {array.shape}")
            raw = ordered_bytes_of(array)
            first = held.start
            yield from _head_views(raw, array.shape[1], array.shape[2], start - first, stop - first)

    def _pieces(self, length: int) -> Iterator[tuple[int, range | None]]:
        """What a checkpoint holds of which layers: these tokens, or the whole state."""
        for layer in self._parts.window:
            yield layer, window_edge(length, self._parts.window_tokens or 1)
        for layer in self._others:
            window = self._spec.layers[layer].window
            if self._ragged[layer] and window is not None:
                yield layer, range(window_start(length, window), length)
            else:
                yield layer, None

    def _piece_forms(self, layer: int, n_tokens: int) -> tuple[ArrayForm, ArrayForm]:
        shape = self._shape(layer)
        return (
            ArrayForm(shape.dtype, (1, shape.kv_heads, n_tokens, shape.k_head_dim)),
            ArrayForm(shape.dtype, (1, shape.kv_heads, n_tokens, shape.v_head_dim)),
        )

    # Load

    def _in_place(
        self, caches: Sequence[ContiguousCache], landing: Landing[KVBuffer], start: int, stop: int
    ) -> dict[int, KVBuffer]:
        """The arrays where FULL tokens `start` to `stop` will stay."""
        landing.require_next(start, self.layout)
        buffers: dict[int, KVBuffer] = {}
        for layer in self._parts.full:
            cache = caches[layer]
            if not isinstance(cache, SequenceCache):
                buffers[layer] = self._grown(cast(_OwnFull, cache), layer, stop)
            elif cache.buffer.capacity >= whole_blocks(stop):
                buffers[layer] = cache.buffer
            else:
                room = cache.buffer.capacity
                raise BackendError(f"there is room for {room} tokens, not for {stop}")
        landing.full, landing.full_stop = buffers, stop
        return buffers

    def _grown(self, cache: _OwnFull, layer: int, stop: int) -> KVBuffer:
        """A copy of what mlx-lm's own cache holds, with room for `stop` tokens."""
        if cache.keys is None or cache.values is None or not cache.offset:
            return KVBuffer.empty(self._shape(layer), whole_blocks(stop))
        held = BufferRange(KVBuffer(cache.keys, cache.values), 0, cache.offset)
        return KVBuffer.gather([held], whole_blocks(stop))

    def _beside(self, landing: Landing[KVBuffer], start: int, stop: int) -> dict[int, KVBuffer]:
        landing.require_no_window()
        room = blocks_in(start, stop) * BLOCK_TOKENS
        landing.window = {
            layer: KVBuffer.empty(self._shape(layer), room) for layer in self._parts.window
        }
        landing.window_start, landing.window_stop = start, stop
        return landing.window

    def _from_checkpoint(
        self,
        caches: Sequence[ContiguousCache],
        landing: Landing[KVBuffer],
        length: int,
        checkpoint: bytes,
    ) -> dict[int, ContiguousCache]:
        """The caches of the layers that FULL bodies do not hold."""
        pieces = list(self._pieces(length))
        expected: list[Tree] = [
            self._expected[layer] if tokens is None else self._piece_forms(layer, len(tokens))
            for layer, tokens in pieces
        ]
        trees = read_checkpoint(checkpoint, self.layout.name, length, expected)
        return {
            layer: read_state(tree, form, length)
            if tokens is None
            else self._window(caches[layer], layer, landing, tree, tokens, length)
            for (layer, tokens), tree, form in zip(pieces, trees, expected, strict=True)
        }

    def _window(
        self,
        old: ContiguousCache,
        layer: int,
        landing: Landing[KVBuffer],
        tree: Tree,
        tokens: range,
        length: int,
    ) -> SequenceCache:
        """A window's cache of `tokens` out of the checkpoint and what landed behind them."""
        keys, values = cast(tuple[StoredArray, StoredArray], tree)
        pieces = [BufferRange(KVBuffer(keys.load(), values.load()), 0, len(tokens))]
        if tokens.stop < length:
            landing.require_window(range(tokens.stop, length))
            at = landing.window_start
            pieces.append(BufferRange(landing.window[layer], tokens.stop - at, length - at))
        held = sum(piece.stop - piece.start for piece in pieces)
        room = max(cast(SequenceCache, old).buffer.capacity, whole_blocks(held))
        kept = [piece for piece in pieces if piece.stop > piece.start]
        buffer = KVBuffer.gather(kept, room) if kept else KVBuffer.empty(self._shape(layer), room)
        return cache_of(self._spec.layers[layer], buffer, offset=length, held=held)


def _tokens_of(cache: ContiguousCache) -> tuple[KVBuffer, range]:
    """The arrays of a cache and the positions that lie in them from the front."""
    if isinstance(cache, SequenceCache):
        return cache.buffer, cache.held
    own = cast(_OwnFull, cache)
    if own.keys is None or own.values is None:
        raise BackendError("the sequence is empty")
    return KVBuffer(own.keys, own.values), range(own.offset)


def _head_views(
    raw: memoryview, heads: int, capacity: int, start: int, stop: int
) -> Iterator[memoryview]:
    """Of each head of an array (1, heads, capacity, dim) the bytes of tokens `start` to `stop`."""
    per_head = len(raw) // heads
    per_token = per_head // capacity
    for head in range(heads):
        at = head * per_head
        yield raw[at + start * per_token : at + stop * per_token]


def _set_full(cache: ContiguousCache, buffer: KVBuffer, length: int) -> None:
    if isinstance(cache, SequenceCache):
        cache.offset = length
    else:
        own = cast(_OwnFull, cache)
        own.keys, own.values, own.offset = buffer.k, buffer.v, length
