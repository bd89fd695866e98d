"""Prefill of several sequences side by side: one pass over equally many tokens of each.

For models with states, which take their tokens one after the other: such a pass is about as long
as that of one sequence where states bound it. In layers with pages each token is a row of a batch;
states are rows as they are in decoding. Knows caches; neither requests nor when this pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from semantic.adapters.mlx.arrays import Heads, plain
from semantic.adapters.mlx.kv_cache.contiguous.state_batch import StateBatch
from semantic.adapters.mlx.kv_cache.merged import state_shapes
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import BatchMetadata
from semantic.adapters.mlx.kv_cache.paged.cache import (
    PagedBatch,
    PagedCache,
    PagedKeys,
    PagedLayer,
)

Caches = Sequence[PagedCache]
"""A sequence's caches of all layers; those without pages are mlx-lm's states."""


Chunk = tuple[Caches, Sequence[int]]
"""A sequence and its next tokens."""


class ChunkBatch:
    """One layer's pages of sequences that compute `n_tokens` each; mlx-lm's batch cache interface.

    Rows of `metadata` are the tokens, sequence after sequence; padding is whole sequences.
    """

    def __init__(self, layer: PagedLayer, metadata: BatchMetadata, n_tokens: int) -> None:
        self._rows = PagedBatch(layer, metadata, (), write_first=True)
        self._n_tokens = n_tokens
        firsts = metadata.lengths[::n_tokens]
        n_padding = metadata.n_rows // n_tokens - len(firsts)
        self.offset = mx.array([*firsts, *[0] * n_padding], mx.int32)
        """Position of the first token of each sequence; 0 of padding."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedKeys, PagedKeys]:
        """Take the tokens, (sequences, kv_heads, n_tokens, head_dim); as one handle."""
        if keys.shape[2] != self._n_tokens:
            raise ValueError(f"expected {self._n_tokens} tokens of each, not {keys.shape[2]}")
        handle = PagedKeys(self, self._as_rows(keys), self._as_rows(values), 0)
        return handle, handle

    def attend(
        self,
        q: mx.array | Heads,
        keys: PagedKeys,
        scale: float,
        sinks: mx.array | None,
        rope: mx.array | None = None,
    ) -> mx.array:
        """See `PagedBatch.attend`; (sequences, heads, n_tokens, width)."""
        rope = None if rope is None else self._as_rows(rope)
        found = self._rows.attend(self._as_rows(plain(q)), keys, scale, sinks, rope)
        rows, n_heads, _, width = found.shape
        found = found.reshape(rows // self._n_tokens, self._n_tokens, n_heads, width)
        return found.swapaxes(1, 2)

    @property
    def n_rows(self) -> int:
        """Sequences of a pass, with padding."""
        return self.offset.size

    def make_mask(self, *_: object, **__: object) -> None:
        """No mask: a row attends to the tokens up to its own."""

    @property
    def state(self) -> list[mx.array]:
        """The array to evaluate, which writes the tokens."""
        return self._rows.state

    def _as_rows(self, columns: mx.array) -> mx.array:
        """(sequences, heads, n_tokens, width) as (rows, heads, 1, width)."""
        n, n_heads, n_tokens, width = columns.shape
        return columns.swapaxes(1, 2).reshape(n * n_tokens, n_heads, 1, width)


class _Pass(NamedTuple):
    """Tokens, (sequences, tokens of each), and layers of sequences with states of one shape."""

    inputs: mx.array
    layers: list[ChunkBatch | StateBatch]


Layers = Callable[[Sequence[Caches], int], "list[ChunkBatch | StateBatch]"]
"""The layers of a pass over so many tokens of each of these sequences."""


def compute_side_by_side(model: Module, layers: Layers, chunks: Sequence[Chunk]) -> None:
    """Append equally many tokens to each of these sequences.

    What raises leaves all of them as they were.
    """
    held = [state for caches, _ in chunks for state in _states(caches)]
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
    """Sequences with and without a state are apart: to some models no state is not zeros."""
    groups: dict[object, list[Chunk]] = {}
    for chunk in chunks:
        groups.setdefault(state_shapes(chunk[0]), []).append(chunk)
    found: list[_Pass] = []
    for members in groups.values():
        inputs = mx.array([list(tokens) for _, tokens in members], mx.uint32)
        of = layers([caches for caches, _ in members], inputs.shape[1])
        n_padding = max(layer.n_rows for layer in of) - len(members)
        found.append(_Pass(mx.pad(inputs, [(0, n_padding), (0, 0)]), of))
    return found


def _states(caches: Caches) -> list[ArraysCache]:
    return [cache for cache in cast("Sequence[object]", caches) if isinstance(cache, ArraysCache)]
