"""Creates a sequence's contiguous caches for all layers, and converts them to blocks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from semantic.adapters.mlx.kv_cache.contiguous.cache import (
    BufferRange,
    FullCache,
    KVBuffer,
    SequenceCache,
    WindowCache,
    join_neighbours,
)
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.entities import AgentBlocks, BlockData, KVBlock
from semantic.domain.errors import CacheReconstructionError
from semantic.domain.prefix import earliest_cut
from semantic.domain.value_objects import (
    BLOCK_TOKENS,
    LayerKind,
    LayerSpec,
    ModelCacheSpec,
    whole_blocks,
)


class MlxLmCache(Protocol):
    """The interface of mlx-lm's own caches for a single sequence."""

    @property
    def state(self) -> object: ...

    @property
    def nbytes(self) -> int: ...

    def is_trimmable(self) -> bool: ...

    def trim(self, n: int) -> int: ...


@dataclass(frozen=True, slots=True)
class MlxLmState:
    """The block data of a layer with mlx-lm's own cache: the whole cache of `length` tokens."""

    cache: MlxLmCache
    length: int


ContiguousCache = SequenceCache | MlxLmCache
"""One layer's cache of one sequence: ours, or mlx-lm's."""


MakeStates = Callable[[], Mapping[int, MlxLmCache]]
"""Creates empty caches for the layers that keep a state, by layer number."""


def states_of(model: Module, spec: ModelCacheSpec) -> MakeStates | None:
    """Return a function that creates a model's states; None if no layer has a state."""
    numbers = [i for i, layer in enumerate(spec.layers) if layer.kind is LayerKind.STATE]

    def make() -> dict[int, MlxLmCache]:
        caches = cast(list[MlxLmCache], make_prompt_cache(model))
        return {i: caches[i] for i in numbers}

    return make if numbers else None


class ContiguousLayers:
    """Creates a model's contiguous caches.

    `ragged[i]` is True if layer i can be in our batch. `together` is True if sequences can be
    batched.
    """

    unused_bytes = None

    def __init__(
        self,
        model: Module,
        spec: ModelCacheSpec,
        shapes: Sequence[LayerShape | None],
        ragged: Sequence[bool],
        *,
        together: bool = True,
    ) -> None:
        self.together = together
        self._model = model
        self._spec = spec
        self._shapes = shapes
        self.ragged = tuple(ragged)
        self.shared = (False,) * spec.n_layers
        self.ours = tuple(
            usable and shape is not None for usable, shape in zip(ragged, shapes, strict=True)
        )
        """`ours[i]` is True if layer i uses our cache."""

    def set_aside(self, n_bytes: int) -> None:
        """Do nothing: each cache has its own memory."""

    def shrink(self, _room: int) -> bool:
        """Return False: freed memory goes back to the system at once."""
        return False

    def abandon(self) -> None:
        """Do nothing: caches free their own memory."""

    def empty(self, capacity: int) -> list[ContiguousCache]:
        """Return the caches of a new sequence, with buffers for `capacity` tokens."""
        theirs = cast(list[MlxLmCache], make_prompt_cache(self._model))
        caches: list[ContiguousCache] = []
        for i, layer in enumerate(self._spec.layers):
            shape = self._shapes[i]
            if self.ours[i] and shape is not None:
                buffer = KVBuffer.empty(shape, self._capacity(layer, capacity))
                caches.append(cache_of(layer, buffer, offset=0, held=0))
            else:
                caches.append(theirs[i])
        return caches

    def restored(
        self, blocks: AgentBlocks, length: int, capacity: int, *, exclusive: bool
    ) -> list[ContiguousCache]:
        """Return caches that begin with the first `length` tokens of `blocks`. Raises
        CacheReconstructionError if a layer does not hold them."""
        for i in range(self._spec.n_layers):
            self._check(i, blocks, length)
        caches = [
            self._restore_layer(i, layer, blocks, length, capacity, exclusive=exclusive)
            for i, layer in enumerate(self._spec.layers)
        ]
        # Copy now: pending copies would refer to arrays to which other sequences write.
        mx.eval([cache.state for cache in caches])
        return caches

    def reserve(self, caches: Sequence[ContiguousCache], capacity: int) -> None:
        """Grow the buffers of our caches to hold `capacity` tokens."""
        for layer, cache in zip(self._spec.layers, caches, strict=True):
            if isinstance(cache, SequenceCache):
                cache.reserve(self._capacity(layer, capacity))

    def fill(
        self, caches: Sequence[ContiguousCache], blocks: Sequence[Sequence[KVBlock]], length: int
    ) -> list[KVBlock]:
        """Fill `blocks` with the first `length` tokens of `caches`; return the unused blocks."""
        unused: list[KVBlock] = []
        shrunk: list[mx.array] = []
        for layer, cache, mine in zip(self._spec.layers, caches, blocks, strict=True):
            if isinstance(cache, SequenceCache):
                needed = len(cache.ranges(BLOCK_TOKENS))
                if 0 < needed * BLOCK_TOKENS < cache.buffer.capacity:
                    cache.buffer.resize(range(len(cache.held)), needed * BLOCK_TOKENS)
                    shrunk += cache.state
                _fill_ours(cache, mine[:needed])
            else:
                needed = fill_state(layer, MlxLmState(cache, length), mine)
            unused += mine[needed:]
        mx.eval(shrunk)
        return unused

    @staticmethod
    def _capacity(layer: LayerSpec, capacity: int) -> int:
        return layer.blocks_for(capacity) * BLOCK_TOKENS

    def _restore_layer(
        self,
        i: int,
        layer: LayerSpec,
        blocks: AgentBlocks,
        length: int,
        capacity: int,
        *,
        exclusive: bool,
    ) -> ContiguousCache:
        layer_blocks = blocks.blocks_for_layer(i)
        data = [block.layer_data for block in layer_blocks]
        if self.ours[i]:
            held = blocks.token_range(i)
            ranges = _ranges_of(data)
            needed = self._capacity(layer, capacity)
            joined = join_neighbours(ranges)
            buffer = joined[0].buffer
            if not exclusive or len(joined) > 1 or joined[0].start:
                ranges = _first_tokens(ranges, length - held.start)
                held = range(held.start, length)
                buffer = KVBuffer.gather(ranges, max(needed, whole_blocks(len(held))))
            cache = cache_of(layer, buffer, offset=held.stop, held=len(held))
            cache.trim(length)
            cache.reserve(needed)
            return cache
        (state,) = {piece for piece in data if isinstance(piece, MlxLmState)}
        return cut_state(state, length, exclusive=exclusive)

    def _check(self, i: int, blocks: AgentBlocks, length: int) -> None:
        layer_blocks = blocks.blocks_for_layer(i)
        data = [block.layer_data for block in layer_blocks]
        who = f"layer {i} of {blocks.agent_id!r}"
        if not layer_blocks or any(a.stop != b.start for a, b in itertools.pairwise(layer_blocks)):
            raise CacheReconstructionError(f"{who}: blocks are missing")
        require_cut(self._spec.layers[i], blocks.token_range(i), length, who)
        if not self.ours[i]:
            if len({id(piece) for piece in data if isinstance(piece, MlxLmState)}) != 1:
                raise CacheReconstructionError(f"{who} has no state")
            return
        ranges = _ranges_of(data)
        if [r.stop - r.start for r in ranges] != [block.token_count for block in layer_blocks]:
            raise CacheReconstructionError(f"{who} has no arrays for its tokens")
        for buffer in {id(piece.buffer): piece.buffer for piece in ranges}.values():
            shape, k = self._shapes[i], buffer.k
            packs = None if shape is None else shape.packs
            found = LayerShape(k.shape[1], k.shape[3], buffer.v.shape[3], k.dtype, packs)
            if found != shape:
                raise CacheReconstructionError(f"{who}: expected {shape}, got {found}")


def require_cut(layer: LayerSpec, held: range, length: int, who: str) -> None:
    """Raise CacheReconstructionError unless a cache of positions `held` can be cut to `length`."""
    if not earliest_cut(layer, held, held.stop) <= length <= held.stop:
        raise CacheReconstructionError(
            f"{who} holds tokens {held.start} to {held.stop}; cannot cut it to the first {length}"
        )


def cache_of(layer: LayerSpec, buffer: KVBuffer, *, offset: int, held: int) -> SequenceCache:
    """Return a layer's cache after `offset` tokens; `buffer` begins with the last `held` tokens."""
    if layer.kind is LayerKind.SLIDING_WINDOW and layer.window is not None:
        most = (layer.max_blocks or 0) * BLOCK_TOKENS
        return WindowCache(buffer, offset, layer.window, most, held)
    return FullCache(buffer, offset)


def _ranges_of(data: Sequence[BlockData]) -> list[BufferRange]:
    return [piece for piece in data if isinstance(piece, BufferRange)]


def _first_tokens(ranges: Sequence[BufferRange], n_tokens: int) -> list[BufferRange]:
    first: list[BufferRange] = []
    for piece in ranges:
        if n_tokens <= 0:
            break
        taken = min(n_tokens, piece.stop - piece.start)
        first.append(BufferRange(piece.buffer, piece.start, piece.start + taken))
        n_tokens -= taken
    return first


def _fill_ours(cache: SequenceCache, blocks: Sequence[KVBlock]) -> None:
    first = cache.held.start
    for block, piece in zip(blocks, cache.ranges(BLOCK_TOKENS), strict=True):
        block.start = first + piece.start
        block.token_count = piece.stop - piece.start
        block.layer_data = piece


def fill_state(layer: LayerSpec, state: MlxLmState, blocks: Sequence[KVBlock]) -> int:
    """Put `state` into as many of `blocks` as its tokens need. Return the number of blocks used."""
    blocks = blocks[: layer.blocks_for(state.length)]
    first = 0
    if layer.window is not None and state.length >= layer.window:
        first = state.length - layer.window + 1  # a full ring buffer cannot be trimmed
    edges = [min(first + i * BLOCK_TOKENS, state.length) for i in range(len(blocks))]
    stops = [*edges[1:], state.length]
    for block, start, stop in zip(blocks, edges, stops, strict=True):
        block.start, block.token_count, block.layer_data = start, stop - start, state
    return len(blocks)


def cut_state(state: MlxLmState, length: int, *, exclusive: bool) -> MlxLmCache:
    """Return the state's cache, cut to `length` tokens. Raises CacheReconstructionError if it
    cannot be cut."""
    cache = state.cache if exclusive else _copied(state.cache)
    surplus = state.length - length
    if surplus == 0:
        return cache
    if not cache.is_trimmable() or cache.trim(surplus) != surplus:
        raise CacheReconstructionError(
            f"cannot cut a {type(cache).__name__} of {state.length} tokens to {length}"
        )
    return cache


def _copied(cache: MlxLmCache) -> MlxLmCache:
    """Return a copy of `cache`. It shares the arrays of states, which never change in place."""
    if isinstance(cache, ArraysCache):
        other = ArraysCache(len(cache.cache))
        other.cache = list(cache.cache)
        return cast(MlxLmCache, other)
    return copy.deepcopy(cache)
