"""Prefill of several sequences in one pass, for models with states.

Shorter sequences are padded at the end. mlx-lm's `lengths` make the states ignore padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Literal, NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from semantic.adapters.mlx.arrays import Heads, plain
from semantic.adapters.mlx.kv_cache.merged import StateBatch, state_shapes
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import BatchMetadata
from semantic.adapters.mlx.kv_cache.paged.cache import PagedBatch, PagedCache, PagedKeys, PagedLayer

Beside = Literal["alone", "even", "padded"]
"""How sequences of a model can share a pass: not at all, with equal lengths, or with padding."""

Caches = Sequence[PagedCache]
"""A sequence's caches for all layers."""


Chunk = tuple[Caches, Sequence[int]]
"""A sequence and its next tokens."""


class ChunkLayout:
    """Arranges the tokens of a pass as rows of one token or as an array (sequences, width).

    Sequence i has `counts[i]` tokens from position `firsts[i]` on.
    """

    def __init__(
        self, firsts: Sequence[int], counts: Sequence[int], shape: tuple[int, int], n_rows: int
    ) -> None:
        """`n_rows` and `shape`, (sequences, width), include padding."""
        self.shape = n_sequences, width = shape
        padding = [0] * (n_sequences - len(firsts))
        self.offset = mx.array([*firsts, *padding], mx.int32)
        self._slots: mx.array | None = None
        if n_rows == n_sequences * width and all(count == width for count in counts):
            return  # row i is slot i
        slots = [i * width + at for i, count in enumerate(counts) for at in range(count)]
        rows = [0] * (n_sequences * width)
        for row, slot in enumerate(slots):
            rows[slot] = row
        self._slots = mx.array([*slots, *[0] * (n_rows - len(slots))], mx.uint32)
        self._rows = mx.array(rows, mx.uint32)

    def to_rows(self, columns: mx.array) -> mx.array:
        """Rearrange `columns`, (sequences, heads, tokens, width), as (rows, heads, 1, width)."""
        n_heads, width = columns.shape[1], columns.shape[3]
        found = columns.swapaxes(1, 2).reshape(-1, n_heads, 1, width)
        return found if self._slots is None else found[self._slots]

    def to_columns(self, rows: mx.array) -> mx.array:
        """Undo `to_rows`. Padding becomes a copy of the first token."""
        found = rows if self._slots is None else rows[self._rows]
        return found.reshape(*self.shape, rows.shape[1], rows.shape[3]).swapaxes(1, 2)


class ChunkBatch(PagedBatch):
    """One layer's paged caches of the sequences in a pass, with mlx-lm's batch cache interface."""

    def __init__(self, layer: PagedLayer, metadata: BatchMetadata, layout: ChunkLayout) -> None:
        super().__init__(layer, metadata, (), together=True)
        self._layout = layout

    @property
    def offset(self) -> mx.array:
        """The position of each sequence's first token in this pass; 0 for padding."""
        return self._layout.offset

    def update_and_fetch(
        self, keys: mx.array | Heads, values: mx.array | Heads
    ) -> tuple[PagedKeys, PagedKeys]:
        """Accept tokens, (sequences, kv_heads, tokens, head_dim). Return a handle to them."""
        if (keys.shape[0], keys.shape[2]) != self._layout.shape:
            raise ValueError(f"expected {self._layout.shape} as (sequences, tokens)")
        as_rows = self._layout.to_rows
        handle = PagedKeys(self, as_rows(plain(keys)), as_rows(plain(values)), 0)
        return handle, handle

    def attend(
        self,
        q: mx.array | Heads,
        keys: PagedKeys,
        scale: float,
        sinks: mx.array | None,
        rope: mx.array | None = None,
    ) -> mx.array:
        """See `PagedBatch.attend`. Shapes are (sequences, heads, tokens, width)."""
        as_rows = self._layout.to_rows
        rope = None if rope is None else as_rows(rope)
        return self._layout.to_columns(super().attend(as_rows(plain(q)), keys, scale, sinks, rope))


class _Pass(NamedTuple):
    inputs: mx.array
    layers: list[ChunkBatch | StateBatch]


class ChunkLayers(NamedTuple):
    """A pass's cache in each layer. `shape` is (sequences, tokens per sequence) with padding."""

    shape: tuple[int, int]
    layers: list[ChunkBatch | StateBatch]


Layers = Callable[[Sequence[tuple[Caches, int]]], ChunkLayers]
"""Takes sequences and their numbers of next tokens. Returns the layers of one pass over them."""


def compute_side_by_side(model: Module, layers: Layers, chunks: Sequence[Chunk]) -> None:
    """Append each sequence's tokens to its caches. An error leaves all sequences unchanged."""
    every = [cast(object, cache) for caches, _ in chunks for cache in caches]
    held = [cache for cache in every if isinstance(cache, ArraysCache)]
    with ExitStack() as undo:
        for state in held:
            undo.callback(setattr, state, "cache", list(state.cache))
        passes = _passes(layers, chunks)
        for one in passes:
            model(one.inputs, cache=one.layers)
        mx.eval([layer.state for one in passes for layer in one.layers])
        for one in passes:
            for layer in one.layers:
                if isinstance(layer, StateBatch):
                    layer.end()
        mx.eval([state.cache for state in held])
        undo.pop_all()
    for caches, tokens in chunks:
        for cache in caches:
            if isinstance(cache, PagedCache):
                cache.advance(len(tokens))


def _passes(layers: Layers, chunks: Sequence[Chunk]) -> list[_Pass]:
    """Put sequences with and without a state into separate passes."""
    groups: dict[object, list[Chunk]] = {}
    for chunk in chunks:
        groups.setdefault(state_shapes(chunk[0]), []).append(chunk)
    found: list[_Pass] = []
    for members in groups.values():
        (n_sequences, width), of = layers([(caches, len(tokens)) for caches, tokens in members])
        rows = [[*tokens, *[0] * (width - len(tokens))] for _, tokens in members]
        rows += [[0] * width] * (n_sequences - len(members))
        found.append(_Pass(mx.array(rows, mx.uint32), of))
    return found
