"""Reads the kinds, windows and shapes of a model's cached layers.

The shapes come from a forward pass that MLX never evaluates, so no weights are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_caches

from semantic.domain.errors import UnsupportedModelError
from semantic.domain.value_objects import BLOCK_TOKENS, LayerKind, LayerSpec, ModelCacheSpec


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one token's keys and values in one layer, as its cache holds them. Packed heads
    are bytes; see `eight_bits`."""

    kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: mx.Dtype
    packs: mx.Dtype | None = None
    """The type of the numbers that packed heads stand for."""


class KeyValueCache(Protocol):
    """The attributes of mlx-lm's attention caches that this module reads."""

    keys: mx.array
    values: mx.array


def read_spec(model: Module) -> ModelCacheSpec:
    """Return the spec of an mlx-lm model. Raises UnsupportedModelError for an unknown cache."""
    short, long = trace(model, 1), trace(model, BLOCK_TOKENS + 1)
    return ModelCacheSpec(
        tuple(_read_layer(i, *pair) for i, pair in enumerate(zip(short, long, strict=True)))
    )


def read_shapes(model: Module) -> list[LayerShape | None]:
    """Return the shape of each layer's keys and values; None for layers with other states."""
    return [
        _shape(cache) if _kind(i, cache) is not LayerKind.STATE else None
        for i, cache in enumerate(trace(model, 1))
    ]


def trace(model: Module, n_tokens: int) -> list[object]:
    """Return mlx-lm's caches of `model` after `n_tokens` tokens, without computing anything."""
    caches: list[object] = mlx_caches.make_prompt_cache(model)
    model(mx.zeros((1, n_tokens), dtype=mx.int32), cache=caches)
    return caches


def _kind(layer: int, cache: object) -> LayerKind:
    if type(cache) is mlx_caches.KVCache:
        return LayerKind.FULL
    if type(cache) is mlx_caches.RotatingKVCache and cache.keep == 0:
        return LayerKind.SLIDING_WINDOW
    if isinstance(cache, mlx_caches.ArraysCache | mlx_caches.RotatingKVCache):
        return LayerKind.STATE
    if hasattr(cache, "state"):
        return LayerKind.STATE  # an unknown class: its state is kept as a whole
    raise UnsupportedModelError(
        f"layer {layer} keeps a {type(cache).__name__}, which has no state to keep"
    )


def _shape(cache: object) -> LayerShape:
    filled = cast(KeyValueCache, cache)
    k, v = filled.keys, filled.values
    return LayerShape(k.shape[1], k.shape[3], v.shape[3], k.dtype)


def _read_layer(layer: int, short: object, long: object) -> LayerSpec:
    kind = _kind(layer, short)
    if kind is LayerKind.STATE:
        one, more = _state_bytes(short), _state_bytes(long)
        grows = more > one
        # A growing state is counted per block: as the bytes that a second block adds, or as the
        # first block's bytes if those are more.
        return LayerSpec(kind, state_bytes=max(one, more - one), state_grows=grows)
    shape = _shape(short)
    window = short.max_size if isinstance(short, mlx_caches.RotatingKVCache) else None
    return LayerSpec(
        kind,
        kv_heads=shape.kv_heads,
        k_head_dim=shape.k_head_dim,
        v_head_dim=shape.v_head_dim,
        itemsize=shape.dtype.size,
        window=window,
    )


def _state_bytes(cache: object) -> int:
    state = getattr(cache, "state", ())
    leaves = [leaf for _, leaf in cast(list[tuple[str, object]], tree_flatten(state))]
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, mx.array))
