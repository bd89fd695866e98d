"""Kinds of layers: those that keep tokens of one shape for one window share pages.

Knows shapes; no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.value_objects import BLOCK_TOKENS, LayerKind, ModelCacheSpec


@dataclass(frozen=True, slots=True)
class PageKind:
    """Layers of one shape and one window; a page holds 256 tokens of all of them.

    `ring` is the number of pages of a sequence where there is a window, else None.
    """

    layers: tuple[int, ...]
    shape: LayerShape
    window: int | None = None
    ring: int | None = None

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Numbers of a head's 256 keys, and of its values."""
        return BLOCK_TOKENS * self.shape.k_head_dim, BLOCK_TOKENS * self.shape.v_head_dim

    @property
    def page_shape(self) -> tuple[int, int]:
        """(layers, numbers of a layer: keys, (kv_heads, 256, k_head_dim), then values)."""
        return len(self.layers), self.shape.kv_heads * sum(self.head_sizes)

    def keys_and_values(self, pages: mx.array) -> tuple[mx.array, mx.array]:
        """Views of pages, (..., numbers of a layer), as (..., kv_heads, 256, head_dim) each."""
        shape, before = self.shape, pages.shape[:-1]
        n_keys = shape.kv_heads * self.head_sizes[0]
        keys = pages[..., :n_keys].reshape(*before, shape.kv_heads, BLOCK_TOKENS, shape.k_head_dim)
        values = pages[..., n_keys:].reshape(
            *before, shape.kv_heads, BLOCK_TOKENS, shape.v_head_dim
        )
        return keys, values

    def first_kept(self, first: int, length: int) -> int:
        """The first position, not before `first`, still in the pages after `length` tokens."""
        return first if self.ring is None else max(first, length - self.ring * BLOCK_TOKENS)

    def turn(self, block: int) -> int:
        """Index in a page table of the page that holds block number `block`."""
        return block if self.ring is None else block % self.ring

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        layers, numbers = self.page_shape
        return layers * numbers * self.shape.dtype.size


def page_kinds(
    spec: ModelCacheSpec, shapes: Sequence[LayerShape | None]
) -> tuple[PageKind, ...] | None:
    """The kinds of a model's layers, or None if a layer cannot use pages.

    A layer with a state, which is not tokens, needs none; there must be others.
    """
    groups: dict[tuple[LayerShape, int | None, int | None], list[int]] = {}
    for number, (layer, shape) in enumerate(zip(spec.layers, shapes, strict=True)):
        if layer.kind is LayerKind.STATE:
            continue
        if shape is None:
            return None
        groups.setdefault((shape, layer.window, layer.max_blocks), []).append(number)
    kinds = tuple(
        PageKind(tuple(layers), shape, window, ring)
        for (shape, window, ring), layers in groups.items()
    )
    return kinds or None
