"""Which layers of a model share pages: those that keep tokens of one shape for one window.

Knows shapes; no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.value_objects import BLOCK_TOKENS, LayerKind, ModelCacheSpec


@dataclass(frozen=True, slots=True)
class PageKind:
    """Layers of one shape and one window; a column holds 256 tokens of all of them.

    `ring` is how many columns a sequence has in turn where there is a window, else None.
    """

    layers: tuple[int, ...]
    shape: LayerShape
    window: int | None = None
    ring: int | None = None

    @property
    def column_shape(self) -> tuple[int, ...]:
        """(layers, keys and values, KV heads, tokens, head_dim)."""
        return (len(self.layers), 2, self.shape.kv_heads, BLOCK_TOKENS, self.shape.k_head_dim)

    def first_kept(self, first: int, length: int) -> int:
        """The first position, not before `first`, that is there after `length` tokens."""
        return first if self.ring is None else max(first, length - self.ring * BLOCK_TOKENS)

    def turn(self, block: int) -> int:
        """Which of a sequence's columns has the block with this number."""
        return block if self.ring is None else block % self.ring

    @property
    def column_bytes(self) -> int:
        """Bytes of one column."""
        layers, two, heads, tokens, dim = self.column_shape
        return layers * two * heads * tokens * dim * self.shape.dtype.size


def page_kinds(
    spec: ModelCacheSpec, shapes: Sequence[LayerShape | None]
) -> tuple[PageKind, ...] | None:
    """The kinds of a model's layers; None when one of them cannot lie in pages.

    Keys and values must be equally wide; a state that is not tokens has no pages.
    """
    groups: dict[tuple[LayerShape, int | None, int | None], list[int]] = {}
    for number, (layer, shape) in enumerate(zip(spec.layers, shapes, strict=True)):
        if shape is None or layer.kind is LayerKind.STATE or shape.k_head_dim != shape.v_head_dim:
            return None
        groups.setdefault((shape, layer.window, layer.max_blocks), []).append(number)
    return tuple(
        PageKind(tuple(layers), shape, window, ring)
        for (shape, window, ring), layers in groups.items()
    )
