"""A `BlockMemory` over contiguous caches. It reads and writes block bodies in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import mlx.core as mx

from semantic.adapters.mlx.arrays import bytes_of, ordered_bytes_of
from semantic.adapters.mlx.device import on_cuda
from semantic.adapters.mlx.kv_cache.checkpoint import StoredArray
from semantic.adapters.mlx.kv_cache.contiguous.cache import BufferRange, KVBuffer, SequenceCache
from semantic.adapters.mlx.kv_cache.contiguous.layers import ContiguousCache, cache_of
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.adapters.mlx.kv_cache.staging import (
    InPlace,
    Piece,
    Staging,
    blocks_in,
    require_held,
    require_shape,
)
from semantic.adapters.mlx.transfers import ArrivingBody, Room, Rows, Transfers
from semantic.domain.block_hash import Part
from semantic.domain.errors import BackendError
from semantic.domain.value_objects import BLOCK_TOKENS, ModelCacheSpec, whole_blocks
from semantic.ports.generation import BodyTarget


class MlxLmKVCache(Protocol):
    """The part of mlx-lm's KVCache that this module uses."""

    keys: mx.array | None
    values: mx.array | None
    offset: int


class ContiguousMemory:
    """A `BlockMemory` for caches in separate arrays."""

    def __init__(
        self, spec: ModelCacheSpec, shapes: Sequence[LayerShape | None], transfers: Transfers | None
    ) -> None:
        """`transfers` use the device's copy engine, if there is one."""
        self._spec = spec
        self._shapes = shapes
        self._transfers = transfers

    # Export

    def deferred(
        self,
        caches: Sequence[ContiguousCache],
        layers: Sequence[int],
        tokens: range,
        room: Room | None,
    ) -> ArrivingBody | None:
        """See `BlockMemory.deferred`. Copies arrays first: the next token overwrites them."""
        if self._transfers is None or not layers:
            return None
        pieces: list[mx.array] = []
        for layer in layers:
            buffer, start = self.reader(caches).held(layer, tokens)
            pieces += buffer.read(start, start + len(tokens))
        body = mx.concatenate([piece.reshape(-1).view(mx.uint8) for piece in pieces])
        place = _Copied(body, self._transfers.driver.address(body))
        return self._transfers.fetch(place, [Rows(1, body.nbytes, body.nbytes)], room)

    def reader(self, caches: Sequence[ContiguousCache]) -> _Reader:
        return _Reader(caches, self._shapes)

    # Load

    def stage(
        self,
        caches: Sequence[ContiguousCache],
        staging: Staging[KVBuffer],
        layers: Sequence[int],
        part: Part,
        tokens: range,
    ) -> list[BodyTarget]:
        n_tokens = blocks_in(tokens) * BLOCK_TOKENS
        if part is Part.WINDOW:
            staging.window = {
                i: KVBuffer.empty(require_shape(self._shapes, i), n_tokens) for i in layers
            }
            buffers, first = staging.window, 0
        else:
            staging.full = {i: self._in_place(caches[i], i, tokens.stop) for i in layers}
            buffers, first = staging.full, tokens.start
        mx.eval([(buffer.k, buffer.v) for buffer in buffers.values()])
        raw = [(bytes_of(a), a.shape[1], a.shape[2]) for b in buffers.values() for a in (b.k, b.v)]
        return [
            InPlace([view for array in raw for view in _head_views(*array, at, at + BLOCK_TOKENS)])
            for at in range(first, first + n_tokens, BLOCK_TOKENS)
        ]

    def restore(
        self,
        caches: Sequence[ContiguousCache],
        staging: Staging[KVBuffer],
        length: int,
        pieces: Sequence[Piece],
    ) -> list[ContiguousCache]:
        made = {
            piece.layer: self._window(caches[piece.layer], piece, staging, length)
            for piece in pieces
        }
        if made:
            mx.eval([cache.state for cache in made.values()])
        for layer, buffer in staging.full.items():
            cache = caches[layer]
            if isinstance(cache, SequenceCache):
                cache.offset = length
            else:
                theirs = cast(MlxLmKVCache, cache)
                theirs.keys, theirs.values, theirs.offset = buffer.k, buffer.v, length
        return [made.get(i, cache) for i, cache in enumerate(caches)]

    def _in_place(self, cache: ContiguousCache, layer: int, stop: int) -> KVBuffer:
        if isinstance(cache, SequenceCache):
            if cache.buffer.capacity < whole_blocks(stop):
                capacity = cache.buffer.capacity
                raise BackendError(f"cannot load {stop} tokens into a buffer for {capacity}")
            return cache.buffer
        theirs = cast(MlxLmKVCache, cache)
        if theirs.keys is None or theirs.values is None or not theirs.offset:
            return KVBuffer.empty(require_shape(self._shapes, layer), whole_blocks(stop))
        held = BufferRange(KVBuffer(theirs.keys, theirs.values), 0, theirs.offset)
        return KVBuffer.gather([held], whole_blocks(stop))

    def _window(
        self, old: ContiguousCache, piece: Piece, staging: Staging[KVBuffer], length: int
    ) -> SequenceCache:
        """Return a window layer's cache with the checkpoint's tokens, then the loaded tokens."""
        layer, tokens = piece.layer, piece.tokens
        keys, values = cast(tuple[StoredArray, StoredArray], piece.tree)
        ranges = [BufferRange(KVBuffer(keys.load(), values.load()), 0, len(tokens))]
        if tokens.stop < length:
            staging.require_window(range(tokens.stop, length))
            at = staging.window_tokens.start
            ranges.append(BufferRange(staging.window[layer], tokens.stop - at, length - at))
        ranges = [one for one in ranges if one.stop > one.start]
        held = sum(one.stop - one.start for one in ranges)
        capacity = max(cast(SequenceCache, old).buffer.capacity, whole_blocks(held))
        buffer = (
            KVBuffer.gather(ranges, capacity)
            if ranges
            else KVBuffer.empty(require_shape(self._shapes, layer), capacity)
        )
        return cache_of(self._spec.layers[layer], buffer, offset=length, held=held)


class _Reader:
    def __init__(
        self, caches: Sequence[ContiguousCache], shapes: Sequence[LayerShape | None]
    ) -> None:
        self._caches = caches
        self._shapes = shapes

    def __call__(self, layer: int, tokens: range) -> tuple[list[memoryview], list[memoryview]]:
        buffer, start = self.held(layer, tokens)
        if not tokens:
            return [], []
        stop = start + len(tokens)
        if on_cuda():  # else MLX would move the whole array to managed memory for good
            buffer = KVBuffer.gather([BufferRange(buffer, start, stop)], len(tokens))
            start, stop = 0, len(tokens)
        return _segments(buffer.k, start, stop), _segments(buffer.v, start, stop)

    def held(self, layer: int, tokens: range) -> tuple[KVBuffer, int]:
        """Return a layer's keys and values, and the index in both at which `tokens` begin."""
        buffer, held = _tokens_of(self._caches[layer])
        require_held(layer, held, tokens)
        shape = require_shape(self._shapes, layer)
        for array, dim in ((buffer.k, shape.k_head_dim), (buffer.v, shape.v_head_dim)):
            found = array.dtype, array.shape[1], array.shape[3]
            if tokens and found != (shape.dtype, shape.kv_heads, dim):
                raise BackendError(f"layer {layer} holds {array.dtype} of shape {array.shape}")
        return buffer, tokens.start - held.start


class _Copied:
    def __init__(self, array: mx.array, address: int) -> None:
        self._array: mx.array | None = array
        self._address = address

    @contextmanager
    def address(self) -> Iterator[int | None]:
        yield None if self._array is None else self._address

    def end(self) -> None:
        self._array = None


def _segments(array: mx.array, start: int, stop: int) -> list[memoryview]:
    raw = ordered_bytes_of(array)
    return list(_head_views(raw, array.shape[1], array.shape[2], start, stop))


def _tokens_of(cache: ContiguousCache) -> tuple[KVBuffer, range]:
    if isinstance(cache, SequenceCache):
        return cache.buffer, cache.held
    theirs = cast(MlxLmKVCache, cache)
    if theirs.keys is None or theirs.values is None:
        raise BackendError("the sequence is empty")
    return KVBuffer(theirs.keys, theirs.values), range(theirs.offset)


def _head_views(
    raw: memoryview, heads: int, capacity: int, start: int, stop: int
) -> Iterator[memoryview]:
    """Yield each head's bytes of tokens `start` to `stop`. `raw` is (1, heads, capacity, dim)."""
    per_head = len(raw) // heads
    per_token = per_head // capacity
    for head in range(heads):
        at = head * per_head
        yield raw[at + start * per_token : at + stop * per_token]
