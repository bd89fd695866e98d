"""Caches of given shapes made of synthetic blocks. Knows no clock.

Blocks are *scattered* (each in arrays of its own, as loaded from a file) or *neighbours* (ranges of
one array per layer, as an agent leaves them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from semantic.adapters.mlx.kv_cache.contiguous.cache import BufferRange, KVBuffer
from semantic.adapters.mlx.kv_cache.contiguous.layers import ContiguousLayers
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.entities import AgentBlocks
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import BLOCK_TOKENS, LayerKind, LayerSpec, ModelCacheSpec

WINDOW = 1024
GLOBAL_EVERY = 6


@dataclass(frozen=True, slots=True)
class Token:
    """One token's keys and values in one layer."""

    kv_heads: int
    head_dim: int
    dtype: mx.Dtype

    @property
    def layer_shape(self) -> LayerShape:
        return LayerShape(self.kv_heads, self.head_dim, self.head_dim, self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of 256 of them."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.size * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Layout:
    """How many blocks each layer holds of a context, and which layers have a window."""

    name: str
    context: int
    blocks: tuple[int, ...]
    windows: tuple[bool, ...]

    @property
    def n_blocks(self) -> int:
        return sum(self.blocks)

    def spec(self, token: Token) -> ModelCacheSpec:
        """The spec of a model of this shape."""
        return ModelCacheSpec(tuple(_layer(token, windowed) for windowed in self.windows))


def all_full(layers: int, blocks: int) -> Layout:
    """Every layer holds every block: the plan's 1,536 blocks are 48 by 32."""
    name = f"full_{layers}x{blocks}"
    return Layout(name, blocks * BLOCK_TOKENS, (blocks,) * layers, (False,) * layers)


def gemma(context: int, window_blocks: int = WINDOW // BLOCK_TOKENS) -> Layout:
    """Gemma 3 12B: every sixth layer is full, 40 hold `window_blocks` of their window.

    The plan counts the 4 blocks that a window fills; our window caches hold up to a fifth.
    """
    windows = tuple(layer % GLOBAL_EVERY != GLOBAL_EVERY - 1 for layer in range(48))
    full = context // BLOCK_TOKENS
    blocks = tuple(min(full, window_blocks) if windowed else full for windowed in windows)
    suffix = "" if window_blocks == WINDOW // BLOCK_TOKENS else f"_{window_blocks}_window_blocks"
    return Layout(f"gemma_{context // 1024}k{suffix}", context, blocks, windows)


def layer_caches(layout: Layout, token: Token) -> ContiguousLayers:
    """The engine's maker of caches for a model of this shape; there is no model behind it."""
    n_layers = len(layout.blocks)
    shapes = [token.layer_shape] * n_layers
    no_model = cast("Callable[[], Module]", Module)()
    return ContiguousLayers(no_model, layout.spec(token), shapes, [True] * n_layers)


def scattered(layout: Layout, token: Token) -> AgentBlocks:
    """An agent whose every block has arrays of its own."""
    return _agent(layout, token, together=False)


def neighbours(layout: Layout, token: Token) -> AgentBlocks:
    """An agent whose blocks lie side by side in one array per layer."""
    return _agent(layout, token, together=True)


def _layer(token: Token, windowed: bool) -> LayerSpec:
    return LayerSpec(
        LayerKind.SLIDING_WINDOW if windowed else LayerKind.FULL,
        kv_heads=token.kv_heads,
        k_head_dim=token.head_dim,
        v_head_dim=token.head_dim,
        itemsize=token.dtype.size,
        window=WINDOW if windowed else None,
    )


def _agent(layout: Layout, token: Token, *, together: bool) -> AgentBlocks:
    pool = BlockPool(layout.spec(token), total_blocks=layout.n_blocks)
    agent = AgentBlocks("agent", total_tokens=layout.context)
    for layer in pool.allocate_layers(layout.blocks, "agent"):
        first = layout.context - len(layer) * BLOCK_TOKENS
        for index, (block, piece) in enumerate(
            zip(layer, _ranges(len(layer), token, together=together), strict=True)
        ):
            block.start = first + index * BLOCK_TOKENS
            block.token_count = BLOCK_TOKENS
            block.layer_data = piece
            agent.add_block(block)
    mx.eval([piece.buffer.k for piece in ranges_of(agent)])
    mx.eval([piece.buffer.v for piece in ranges_of(agent)])
    return agent


def ranges_of(agent: AgentBlocks) -> Iterator[BufferRange]:
    """The array ranges behind an agent's blocks, layer by layer."""
    for block in agent.all_blocks():
        if isinstance(block.layer_data, BufferRange):
            yield block.layer_data


def _ranges(n_blocks: int, token: Token, *, together: bool) -> list[BufferRange]:
    if not together:
        buffers = [_buffer(BLOCK_TOKENS, token, i) for i in range(n_blocks)]
        return [BufferRange(buffer, 0, BLOCK_TOKENS) for buffer in buffers]
    buffer = _buffer(n_blocks * BLOCK_TOKENS, token, 0)
    starts = range(0, n_blocks * BLOCK_TOKENS, BLOCK_TOKENS)
    return [BufferRange(buffer, start, start + BLOCK_TOKENS) for start in starts]


def _buffer(n_tokens: int, token: Token, number: int) -> KVBuffer:
    """Keys that count the tokens from block `number` on, values that are their negatives."""
    positions = mx.arange(n_tokens) + number * BLOCK_TOKENS
    shape = (1, token.kv_heads, n_tokens, token.head_dim)
    keys = mx.broadcast_to(positions[:, None], shape).astype(token.dtype)
    return KVBuffer(mx.contiguous(keys), -keys)
