"""Converts KV caches to stored blocks and back. All caches have the same byte layout.

A block body holds 256 tokens layer by layer. In each layer, keys come head by head, then values. A
checkpoint holds all other data of the caches.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

import mlx.core as mx

from semantic.adapters.mlx.arrays import array_from
from semantic.adapters.mlx.kv_cache.checkpoint import (
    ArrayForm,
    StoredArray,
    Tree,
    arrays_in,
    read_checkpoint,
    write_checkpoint,
)
from semantic.adapters.mlx.kv_cache.contiguous.layers import MlxLmCache
from semantic.adapters.mlx.kv_cache.contiguous.mlx_lm_state import read_state, write_state
from semantic.adapters.mlx.kv_cache.eight_bits import GROUP, in_other_bits, scales_of
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.adapters.mlx.kv_cache.staging import (
    MemoryT,
    Piece,
    Staging,
    require_block,
    require_bodies,
    require_shape,
)
from semantic.adapters.mlx.transfers import Room
from semantic.domain.block_hash import Part
from semantic.domain.stored import BlockLayout, Body, DeferredBody
from semantic.domain.value_objects import LayerKind, ModelCacheSpec, whole_blocks
from semantic.ports.generation import BodyTarget

CacheT = TypeVar("CacheT")

ReadTokens = Callable[[int, range], tuple[list[memoryview], list[memoryview]]]
"""Returns the bytes of a layer's keys and of its values, each (kv_heads, n, head_dim). Raises
BackendError if the layer does not hold the tokens."""


class BlockMemory(Protocol[CacheT, MemoryT]):
    """Converts caches of one form, contiguous or paged, to bytes and back."""

    def deferred(
        self, caches: Sequence[CacheT], layers: Sequence[int], tokens: range, room: Room | None
    ) -> DeferredBody | None:
        """Start copying a block body to memory that `room` returns. Return None if impossible."""

    def reader(self, caches: Sequence[CacheT]) -> ReadTokens:
        """Return a function that reads the bytes of tokens in `caches`."""

    def stage(
        self,
        caches: Sequence[CacheT],
        staging: Staging[MemoryT],
        layers: Sequence[int],
        part: Part,
        tokens: range,
    ) -> list[BodyTarget]:
        """Return targets that receive the block bodies of `tokens`, one target per block."""

    def restore(
        self,
        caches: Sequence[CacheT],
        staging: Staging[MemoryT],
        length: int,
        pieces: Sequence[Piece],
    ) -> list[CacheT]:
        """Return the caches after `length` tokens, from bodies in `staging` and from `pieces`."""


class BlockCodec(Generic[CacheT, MemoryT]):
    """A codec between the caches of one model's sequences and block bodies."""

    def __init__(
        self,
        spec: ModelCacheSpec,
        shapes: Sequence[LayerShape | None],
        ragged: Sequence[bool],
        states: Mapping[int, Tree],
        empty: Mapping[int, MlxLmCache],
        memory: BlockMemory[CacheT, MemoryT],
    ) -> None:
        """`ragged[i]` is True if layer i uses our cache. `states` and `empty` are for layers with
        mlx-lm's own cache."""
        self._spec = spec
        self._shapes = shapes
        self._ragged = ragged
        self._states = states
        self._empty = empty
        self._memory = memory
        self._parts = assign_parts(spec, ragged)
        stored = {*self._parts.full, *self._parts.window}
        self._others = [i for i in range(spec.n_layers) if i not in stored]
        described = [(i, self._kind_of(i)) for i in self._others]
        self.layout: BlockLayout = describe(self._parts, shapes, described)

    def export_block(
        self,
        caches: Sequence[CacheT],
        length: int,
        part: Part,
        tokens: range,
        room: Room | None = None,
    ) -> Body:
        require_block(length, part, tokens.start, tokens.stop)
        deferred = self._memory.deferred(caches, self._parts.of(part), tokens, room)
        if deferred is not None:
            return deferred
        read = self._memory.reader(caches)
        return b"".join(
            segment
            for layer in self._parts.of(part)
            for half in read(layer, tokens)
            for segment in half
        )

    def is_finite(self, part: Part, body: bytes) -> bool:
        if part is Part.CHECKPOINT:
            return _all_finite(arrays_in(body))
        n_tokens = len(body) // max(1, sum(self.layout.bytes_per_token(part)))
        arrays: list[mx.array] = []
        rest = memoryview(body)
        for layer in self._parts.of(part):
            for form in self._forms(layer, n_tokens):
                arrays.append(array_from(rest[: form.nbytes], form.dtype, form.shape))
                rest = rest[form.nbytes :]
        return _all_finite(arrays)

    def export_checkpoint(self, caches: Sequence[CacheT], length: int) -> bytes:
        read = self._memory.reader(caches)
        trees: list[Tree] = []
        for layer, tokens in self._contents(length):
            if tokens is None:
                trees.append(write_state(cast(MlxLmCache, caches[layer])))
            else:
                halves = zip(self._forms(layer, len(tokens)), read(layer, tokens), strict=True)
                trees.append(tuple(StoredArray(form, data) for form, data in halves))
        return write_checkpoint(self.layout.name, length, trees)

    def loading(
        self, caches: Sequence[CacheT], staging: Staging[MemoryT], part: Part, start: int, stop: int
    ) -> list[BodyTarget]:
        """See `BatchBackend.loading`. `staging` owns the targets' memory until `loaded`."""
        require_bodies(part, start, stop)
        if part is Part.FULL:
            staging.require_next(start, self.layout)
        else:
            staging.require_no_window()
        tokens = range(start, stop)
        targets = self._memory.stage(caches, staging, self._parts.of(part), part, tokens)
        if part is Part.FULL:
            staging.full_stop = stop
        else:
            staging.window_tokens = tokens
        return targets

    def loaded(
        self,
        caches: Sequence[CacheT],
        staging: Staging[MemoryT],
        length: int,
        checkpoint: bytes | None,
    ) -> list[CacheT]:
        """Return the caches after `length` tokens; see `BatchBackend.loaded`."""
        staging.require_loaded(length, checkpoint, self.layout)
        pieces: list[Piece] = []
        states: dict[int, MlxLmCache] = {}
        if checkpoint is not None:
            contents = self._contents(length)
            expected: list[Tree] = [
                self._states[layer] if tokens is None else self._forms(layer, len(tokens))
                for layer, tokens in contents
            ]
            trees = read_checkpoint(checkpoint, self.layout.name, length, expected)
            for (layer, tokens), form, tree in zip(contents, expected, trees, strict=True):
                if tokens is None:
                    states[layer] = read_state(tree, form, length, self._empty[layer])
                else:
                    pieces.append(Piece(layer, tokens, tree))
            mx.eval([state.state for state in states.values()])
        made = self._memory.restore(caches, staging, length, pieces)
        return [cast(CacheT, states.get(i, cache)) for i, cache in enumerate(made)]

    def _kind_of(self, layer: int) -> str:
        state = self._states.get(layer)
        if state is None:
            return f"window {self._spec.layers[layer].window}"
        return cast(tuple[str, Tree], state)[0]

    def _contents(self, length: int) -> list[tuple[int, range | None]]:
        """Return each layer in a checkpoint with its tokens, or with None if it has a state."""
        contents: list[tuple[int, range | None]] = [
            (layer, window_edge(length, self._parts.window_tokens or 1))
            for layer in self._parts.window
        ]
        for layer in self._others:
            window = self._spec.layers[layer].window
            if self._ragged[layer] and window is not None:
                contents.append((layer, range(window_start(length, window), length)))
            else:
                contents.append((layer, None))
        return contents

    def _forms(self, layer: int, n_tokens: int) -> tuple[ArrayForm, ArrayForm]:
        shape = require_shape(self._shapes, layer)
        return (
            ArrayForm(shape.dtype, (1, shape.kv_heads, n_tokens, shape.k_head_dim)),
            ArrayForm(shape.dtype, (1, shape.kv_heads, n_tokens, shape.v_head_dim)),
        )


@dataclass(frozen=True, slots=True)
class PartLayers:
    """The layers that each part of a block stores token by token."""

    full: tuple[int, ...]
    window: tuple[int, ...]
    window_tokens: int | None

    def of(self, part: Part) -> tuple[int, ...]:
        """Return the layers of one part, in the order of their bytes."""
        return {Part.FULL: self.full, Part.WINDOW: self.window, Part.CHECKPOINT: ()}[part]


def assign_parts(spec: ModelCacheSpec, ragged: Sequence[bool]) -> PartLayers:
    """Assign each layer to a part. WINDOW has only layers of the most common window size."""
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
    """Return the layout of a model's blocks. `others` are layers in no part: (index, kind)."""

    def name_of(shapes: Sequence[LayerShape | None]) -> str:
        name = {
            "full": _describe_layers(parts.full, shapes),
            "window": _describe_layers(parts.window, shapes),
            "window_tokens": parts.window_tokens,
            "checkpoint": _group([(kind, layer) for layer, kind in others]),
        }
        return json.dumps(name, separators=(",", ":"))

    name = name_of(shapes)
    other_name = name_of([None if one is None else in_other_bits(one) for one in shapes])
    return BlockLayout(
        name=name,
        full=_token_bytes(parts.full, shapes),
        window=_token_bytes(parts.window, shapes),
        window_tokens=parts.window_tokens,
        needs_checkpoint=bool(parts.window or others),
        other_name="" if other_name == name else other_name,
    )


def window_start(length: int, window: int) -> int:
    """Return the first position that a window layer still needs after `length` tokens."""
    return max(0, length - window + 1)


def window_edge(length: int, window: int) -> range:
    """Return the positions in the window that precede the window's first whole block."""
    first = window_start(length, window)
    return range(first, min(whole_blocks(first), length))


def _all_finite(arrays: Sequence[mx.array]) -> bool:
    """Packed heads have scales that are not finite if one of their numbers is not."""
    numbers = (scales_of(one) if one.dtype == mx.uint8 else one for one in arrays)
    return all(mx.all(mx.isfinite(one)).item() for one in numbers)


def _token_bytes(layers: Sequence[int], shapes: Sequence[LayerShape | None]) -> tuple[int, ...]:
    """Return the bytes per token of each segment: the keys or values of one head."""
    segments: list[int] = []
    for shape in (require_shape(shapes, layer) for layer in layers):
        for dim in (shape.k_head_dim, shape.v_head_dim):
            segments += [dim * shape.dtype.size] * shape.kv_heads
    return tuple(segments)


def _describe_layers(
    layers: Sequence[int], shapes: Sequence[LayerShape | None]
) -> list[list[object]]:
    described: list[tuple[str, int]] = []
    for layer in layers:
        shape = require_shape(shapes, layer)
        dtype = str(shape.dtype).removeprefix("mlx.core.")
        dims = f"{shape.kv_heads}x({shape.k_head_dim}+{shape.v_head_dim})"
        groups = "" if shape.packs is None else f" in groups of {GROUP}"
        described.append((f"{dims} {dtype}{groups}", layer))
    return _group(described)


def _group(described: Sequence[tuple[str, int]]) -> list[list[object]]:
    groups: dict[str, list[int]] = {}
    for text, layer in described:
        groups.setdefault(text, []).append(layer)
    return [[text, layers] for text, layers in groups.items()]
