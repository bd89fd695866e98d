"""The ways to turn blocks into caches that are compared, and plain copies as a baseline.

Each way is a function without arguments that returns when its arrays are evaluated. Knows no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from experiments.exp_006_gather.layouts import (
    Layout,
    Token,
    layer_caches,
    neighbours,
    ranges_of,
    scattered,
)
from semantic.adapters.mlx.kv_cache.contiguous.cache import BufferRange, SequenceCache
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.value_objects import BLOCK_TOKENS

Way = Callable[[], object]

ONE_ARRAY = "plain copy, one array"
BY_ARRAY = "plain copy, array by array"
PER_LAYER = "per layer"
GATHER = "gather"
COPY = "copy"
TAKE_OVER = "take over"
GROW = "take over and grow"
EXTRACT = "extract"
BLOCK_TENSORS = "block tensors"


def one_array(layout: Layout, token: Token) -> Way:
    """A plain copy: as many bytes as the blocks have, from one flat array into another."""
    return _plain_copy([layout.n_blocks * token.block_bytes], token)


def array_by_array(layout: Layout, token: Token) -> Way:
    """A plain copy into as many arrays as the caches have: keys and values of each layer."""
    return _plain_copy([n * token.block_bytes // 2 for n in layout.blocks for _ in "kv"], token)


def _plain_copy(sizes: Sequence[int], token: Token) -> Way:
    flat = [mx.ones((n_bytes // token.dtype.size,), token.dtype) for n_bytes in sizes]
    mx.eval(flat)

    def copy() -> object:
        # Two halves, because of one piece MLX would give the piece itself.
        halves = ((array[: array.size // 2], array[array.size // 2 :]) for array in flat)
        copied = [mx.concatenate(list(pair)) for pair in halves]
        mx.eval(copied)
        return copied

    return copy


def per_layer(layout: Layout, token: Token) -> Way:
    """The plan's algorithm: for each layer concatenate its blocks' keys and values, evaluate."""
    agent = scattered(layout, token)
    n_layers = len(layout.blocks)

    def reconstruct() -> object:
        cache = []
        for layer_id in range(n_layers):
            pieces = _pieces(agent.blocks_for_layer(layer_id))
            k = mx.concatenate([piece.buffer.k for piece in pieces], axis=2)
            v = mx.concatenate([piece.buffer.v for piece in pieces], axis=2)
            mx.eval(k, v)
            cache.append((k, v))
        return cache

    return reconstruct


def gather(layout: Layout, token: Token) -> Way:
    """The engine's restore of scattered blocks: everything is built, then evaluated at once."""
    return _restore(layout, token, scattered(layout, token), layout.context, exclusive=False)


def copy(layout: Layout, token: Token) -> Way:
    """The engine's restore of a cache that others go on using, with room for another block."""
    room = layout.context + BLOCK_TOKENS
    return _restore(layout, token, neighbours(layout, token), room, exclusive=False)


def take_over(layout: Layout, token: Token) -> Way:
    """The engine's restore of an agent's own cache, while the last block has room."""
    return _restore(layout, token, neighbours(layout, token), layout.context, exclusive=True)


def grow(layout: Layout, token: Token) -> Way:
    """The same when there must be room for another block: MLX arrays cannot grow in place."""
    agent = neighbours(layout, token)
    caches = layer_caches(layout, token)
    kept = [(piece.buffer, piece.buffer.k, piece.buffer.v) for piece in ranges_of(agent)]

    def restore() -> object:
        for buffer, k, v in kept:  # the last turn replaced the arrays
            buffer.k, buffer.v, buffer.capacity = k, v, k.shape[2]
        room = layout.context + BLOCK_TOKENS
        return caches.restored(agent, layout.context, room, exclusive=True)

    return restore


def extract(layout: Layout, token: Token) -> Way:
    """The engine's way back, from caches to blocks, when every block is full."""
    agent = neighbours(layout, token)
    makes = layer_caches(layout, token)
    caches = makes.restored(agent, layout.context, layout.context, exclusive=True)
    chains = [list(agent.blocks_for_layer(i)) for i in range(len(layout.blocks))]
    return lambda: makes.fill(caches, chains, layout.context)


def block_tensors(layout: Layout, token: Token) -> Way:
    """Not in the engine: one tensor per block for all layers of a kind, joined in one operation."""
    kinds = []
    for windowed in set(layout.windows):
        mine = [i for i, window in enumerate(layout.windows) if window is windowed]
        n_blocks = max(layout.blocks[i] for i in mine)
        shape = (len(mine), 2, token.kv_heads, BLOCK_TOKENS, token.head_dim)
        kinds.append([mx.ones(shape, token.dtype) for _ in range(n_blocks)])
    mx.eval(kinds)

    def reconstruct() -> object:
        joined = [mx.concatenate(blocks, axis=3) for blocks in kinds]
        mx.eval(joined)
        return joined

    return reconstruct


def bytes_moved(caches: object, agent: AgentBlocks) -> int:
    """Bytes of those of the caches' arrays that are not the agent's own arrays."""
    own = {id(array) for piece in ranges_of(agent) for array in (piece.buffer.k, piece.buffer.v)}
    arrays = [
        array
        for cache in (caches if isinstance(caches, list) else [])
        if isinstance(cache, SequenceCache)
        for array in cache.state
    ]
    return sum(array.nbytes for array in arrays if id(array) not in own)


def _restore(
    layout: Layout, token: Token, agent: AgentBlocks, capacity: int, *, exclusive: bool
) -> Way:
    caches = layer_caches(layout, token)
    return lambda: caches.restored(agent, layout.context, capacity, exclusive=exclusive)


def _pieces(blocks: Sequence[KVBlock]) -> list[BufferRange]:
    return [block.layer_data for block in blocks if isinstance(block.layer_data, BufferRange)]


WAYS: dict[str, Callable[[Layout, Token], Way]] = {
    ONE_ARRAY: one_array,
    BY_ARRAY: array_by_array,
    PER_LAYER: per_layer,
    GATHER: gather,
    COPY: copy,
    TAKE_OVER: take_over,
    GROW: grow,
    EXTRACT: extract,
    BLOCK_TENSORS: block_tensors,
}

PLAIN_COPIES = (ONE_ARRAY, BY_ARRAY)
