"""Keys and values in 8 bits: heads become bytes as a model computes them, and readers see those.

A group of 64 numbers of a head becomes 64 bytes, from its lowest number up in steps of one size.
The steps and the lowest numbers of all groups, in bfloat16, follow the head's bytes. Nothing
depends on other tokens or heads, so equal numbers have equal bytes in any chunk and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.errors import UnsupportedModelError
from semantic.domain.value_objects import LayerKind, ModelCacheSpec

PACKED_BITS = 8
GROUP = 64
"""The numbers that share a step."""
_STEP_AND_LOWEST = 2 * mx.bfloat16.size
_LEVELS = 255


def packed_size(width: int) -> int:
    """Return the bytes of a head of `width` numbers."""
    return width + width // GROUP * _STEP_AND_LOWEST


def width_of(n_bytes: int) -> int:
    """Return the numbers of a head of `n_bytes`."""
    return n_bytes // (GROUP + _STEP_AND_LOWEST) * GROUP


def pack(numbers: mx.array) -> mx.array:
    """Return the bytes of heads, (..., width), as (..., packed_size(width)) uint8."""
    *before, width = numbers.shape
    groups = numbers.astype(mx.float32).reshape(*before, width // GROUP, GROUP)
    lowest = mx.min(groups, axis=-1, keepdims=True).astype(mx.bfloat16)
    step = ((mx.max(groups, axis=-1, keepdims=True) - lowest) / _LEVELS).astype(mx.bfloat16)
    step = mx.where(step == 0, mx.ones_like(step), step)
    levels = mx.clip(mx.round((groups - lowest) / step.astype(mx.float32)), 0, _LEVELS)
    scales = mx.concatenate([step, lowest], axis=-1).reshape(*before, -1).view(mx.uint8)
    return mx.concatenate([levels.astype(mx.uint8).reshape(*before, width), scales], axis=-1)


def unpack(heads: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return the numbers of packed heads."""
    *before, n_bytes = heads.shape
    width = width_of(n_bytes)
    scales = scales_of(heads).astype(mx.float32)
    levels = heads[..., :width].astype(mx.float32).reshape(*before, width // GROUP, GROUP)
    return (levels * scales[..., :1] + scales[..., 1:]).reshape(*before, width).astype(dtype)


def rounded(numbers: mx.array) -> mx.array:
    """Return what readers of these numbers' bytes see."""
    return unpack(pack(numbers), numbers.dtype)


def held_in(dtype: mx.Dtype, numbers: mx.array) -> mx.array:
    """Return heads as a cache of arrays of `dtype` holds them: packed in bytes, or as they are."""
    return pack(numbers) if dtype == mx.uint8 else numbers


def seen_as(dtype: mx.Dtype, heads: mx.array) -> mx.array:
    """Return heads of a cache as a model that computes in `dtype` sees them."""
    return unpack(heads, dtype) if heads.dtype == mx.uint8 else heads


def scales_of(heads: mx.array) -> mx.array:
    """Return the step and the lowest number of each group of packed heads, (..., groups, 2)."""
    *before, n_bytes = heads.shape
    width = width_of(n_bytes)
    return heads[..., width:].view(mx.bfloat16).reshape(*before, width // GROUP, 2)


def packed_shape(shape: LayerShape) -> LayerShape:
    """Return the shape of packed heads. Raises UnsupportedModelError if groups do not divide
    them."""
    for width in (shape.k_head_dim, shape.v_head_dim):
        if width % GROUP:
            raise UnsupportedModelError(
                f"--kv-bits must be 16 for this model, got 8: groups of {GROUP} numbers do not "
                f"divide its heads of {width}"
            )
    k, v = packed_size(shape.k_head_dim), packed_size(shape.v_head_dim)
    return LayerShape(shape.kv_heads, k, v, mx.uint8, shape.dtype)


def numbers_of(shape: LayerShape) -> LayerShape:
    """Return the shape of the numbers that heads stand for, packed or not."""
    if shape.packs is None:
        return shape
    k, v = width_of(shape.k_head_dim), width_of(shape.v_head_dim)
    return LayerShape(shape.kv_heads, k, v, shape.packs)


def in_other_bits(shape: LayerShape) -> LayerShape:
    """Return the shape of the numbers of packed heads, and of packed heads for numbers if groups
    divide them."""
    if shape.packs is not None or shape.k_head_dim % GROUP or shape.v_head_dim % GROUP:
        return numbers_of(shape)
    return packed_shape(shape)


def packed_shapes(
    shapes: Sequence[LayerShape | None], ours: Sequence[bool] | None = None
) -> list[LayerShape | None]:
    """Return the shapes of layers with packed heads. `ours` is False for layers that keep mlx-lm's
    own cache. Raises UnsupportedModelError if any of them has keys and values, or if none has."""
    theirs = [i for i, one in enumerate(ours or ()) if not one and shapes[i] is not None]
    if theirs or not any(shapes):
        reason = f"layer {theirs[0]} keeps mlx-lm's own cache" if theirs else "it has only states"
        raise UnsupportedModelError(f"--kv-bits must be 16 for this model, got 8: {reason}")
    return [None if one is None else packed_shape(one) for one in shapes]


def packed_spec(spec: ModelCacheSpec) -> ModelCacheSpec | None:
    """Return `spec` with the sizes of packed heads; None if no layer has heads, or if groups do not
    divide them."""
    widths = {width for one in spec.layers for width in (one.k_head_dim, one.v_head_dim)}
    if not any(widths) or any(width % GROUP for width in widths):
        return None
    layers = [
        layer
        if layer.kind is LayerKind.STATE
        else replace(
            layer,
            k_head_dim=packed_size(layer.k_head_dim),
            v_head_dim=packed_size(layer.v_head_dim),
            itemsize=1,
        )
        for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers))
