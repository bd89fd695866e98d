"""Which layers go into which part of a stored block, and in what order their bytes lie.

Follows from what a model caches and from which layers use our caches. Knows no sequence.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.block_hash import Part
from semantic.domain.stored import BlockLayout
from semantic.domain.value_objects import BLOCK_TOKENS, LayerKind, ModelCacheSpec, whole_blocks


@dataclass(frozen=True, slots=True)
class PartLayers:
    """The layers whose tokens go into bodies, by part; all others go whole into a checkpoint."""

    full: tuple[int, ...]
    window: tuple[int, ...]
    window_tokens: int | None

    def of(self, part: Part) -> tuple[int, ...]:
        """The layers of one part, in the order of their bytes."""
        return {Part.FULL: self.full, Part.WINDOW: self.window, Part.CHECKPOINT: ()}[part]


def assign_parts(spec: ModelCacheSpec, ragged: Sequence[bool]) -> PartLayers:
    """The parts of each layer's cache.

    Windows share a body only with those of the same size, so the size that most layers have is
    taken; mlx-lm's own window caches keep their tokens in a ring and cannot be cut.
    """
    windows = Counter(layer.window for layer, ours in zip(spec.layers, ragged, strict=True) if ours)
    del windows[None]
    size = windows.most_common(1)[0][0] if windows else None
    full = [i for i, layer in enumerate(spec.layers) if layer.kind is LayerKind.FULL]
    window = [
        i
        for i, layer in enumerate(spec.layers)
        if size is not None and layer.window == size and ragged[i]
    ]
    return PartLayers(tuple(full), tuple(window), size)


def describe(
    parts: PartLayers, shapes: Sequence[LayerShape | None], others: Sequence[tuple[int, str]]
) -> BlockLayout:
    """The layout; `others` are the layers of the checkpoint and the class of their caches."""
    name = {
        "full": _describe_layers(parts.full, shapes),
        "window": _describe_layers(parts.window, shapes),
        "window_tokens": parts.window_tokens,
        "checkpoint": _group([(kind, layer) for layer, kind in others]),
    }
    return BlockLayout(
        name=json.dumps(name, separators=(",", ":")),
        full=_token_bytes(parts.full, shapes),
        window=_token_bytes(parts.window, shapes),
        window_tokens=parts.window_tokens,
        needs_checkpoint=bool(parts.window or others),
    )


def window_start(length: int, window: int) -> int:
    """The first token that a layer with this window needs for the token at position `length`."""
    return max(0, length - window + 1)


def window_edge(length: int, window: int) -> range:
    """The tokens at the window's beginning that are no whole block, nor the last of one."""
    first = window_start(length, window)
    return range(first, min(whole_blocks(first), length))


def blocks_in(start: int, stop: int) -> int:
    """Blocks that tokens `start` (a block's first) to `stop` lie in."""
    return -(-(stop - start) // BLOCK_TOKENS)


def _token_bytes(layers: Sequence[int], shapes: Sequence[LayerShape | None]) -> tuple[int, ...]:
    """Bytes of one token in each segment."""
    segments: list[int] = []
    for shape in (shapes[layer] for layer in layers):
        if shape is not None:
            for dim in (shape.k_head_dim, shape.v_head_dim):
                segments += [dim * shape.dtype.size] * shape.kv_heads
    return tuple(segments)


def _describe_layers(
    layers: Sequence[int], shapes: Sequence[LayerShape | None]
) -> list[list[object]]:
    described: list[tuple[str, int]] = []
    for layer in layers:
        shape = shapes[layer]
        if shape is None:
            raise AssertionError(f"layer {layer} has no keys and values")
        dtype = str(shape.dtype).removeprefix("mlx.core.")
        dims = f"{shape.kv_heads}x({shape.k_head_dim}+{shape.v_head_dim})"
        described.append((f"{dims} {dtype}", layer))
    return _group(described)


def _group(described: Sequence[tuple[str, int]]) -> list[list[object]]:
    """Layers of the same description together: a model of 60 layers has two or three kinds."""
    groups: dict[str, list[int]] = {}
    for text, layer in described:
        groups.setdefault(text, []).append(layer)
    return [[text, layers] for text, layers in groups.items()]
