"""One layer's paged cache, of one sequence and of a batch, with the interface of mlx-lm's caches.

During prefill models get plain arrays. In a batch they get a handle that only our attention can
read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, cast

import mlx.core as mx

from semantic.adapters.mlx.arrays import Heads, plain
from semantic.adapters.mlx.kv_cache.contiguous.cache import Mask, mask_over
from semantic.adapters.mlx.kv_cache.contiguous.ragged_array import nothing_of
from semantic.adapters.mlx.kv_cache.paged.attention import DecodeStep, PagedAttention, PrefillChunk
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import (
    BatchMetadata,
    LateMetadata,
    MetadataCache,
    rows_of,
)
from semantic.adapters.mlx.kv_cache.paged.page_pool import PagedSequence, PageTable


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """A model's layer with pages. `number` counts the layers of the same kind of pages."""

    kind: int
    number: int
    attention: PagedAttention
    shared: MetadataCache


class PagedCache:
    """One layer's cache of a sequence of `offset` tokens. It holds positions from `first` on."""

    def __init__(
        self,
        layer: PagedLayer,
        sequence: PagedSequence,
        offset: int = 0,
        first: int = 0,
        pending: mx.array | None = None,
    ) -> None:
        """Evaluating `pending` writes the cache's tokens to their pages."""
        self.layer = layer
        self.sequence = sequence
        self.offset = offset
        self.first = first
        self._pending = pending
        self._seen: tuple[mx.array, mx.array] | None = None  # last chunk's, until evaluation

    @property
    def table(self) -> PageTable:
        return self.sequence.tables[self.layer.kind]

    @property
    def held(self) -> range:
        """The positions of the tokens that the cache holds."""
        return range(self.first, self.offset)

    # Called by mlx-lm

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append tokens, (1, kv_heads, n, head_dim). Return all tokens that they attend to."""
        padding = self.sequence.padding
        at, n_tokens = self.offset, keys.shape[2] - padding
        self.table.reserve(at + n_tokens)
        layer = self.layer
        added = layer.attention.append(
            PrefillChunk(
                keys, values, self.table, at, self._seen_from(), layer.number, self._pending,
                padding,
            )
        )  # fmt: skip
        self.advance(n_tokens, added.done)
        self._seen = added.k, added.v
        return self._seen

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        if self._seen is None:
            raise ValueError("no tokens appended since the cache's evaluation")
        return self._seen

    def advance(self, n_tokens: int, pending: mx.array | None = None) -> None:
        """Add `n_tokens` to the length. Evaluating `pending` writes these tokens to the pages."""
        self._pending = pending
        self.offset += n_tokens
        self.first = self.table.pool.kind.first_kept(self.first, self.offset)

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,  # noqa: ARG002
    ) -> Mask:
        """Return the mask for the next `N` tokens. Ignores `window_size`."""
        window = self.table.pool.kind.window
        return mask_over(N, self.offset - self._seen_from(), window, as_array=return_array)

    @classmethod
    def merge(cls, caches: Sequence[PagedCache]) -> PagedBatch:
        """Return a batch of these sequences without copying anything."""
        layer = caches[0].layer
        sequences = [cache.sequence for cache in caches]
        metadata = layer.shared.get(sequences, [cache.offset for cache in caches])
        return PagedBatch(layer, metadata, [cache.first for cache in caches])

    @property
    def state(self) -> list[mx.array]:
        """The cache's arrays, for `mx.eval`. This discards the last chunk's keys and values."""
        self._seen = None
        return [] if self._pending is None else [self._pending]

    @property
    def nbytes(self) -> int:
        pool = self.table.pool
        return len(self.table.refs) * pool.kind.page_bytes // len(pool.kind.layers)

    def _seen_from(self) -> int:
        window = self.table.pool.kind.window
        return 0 if window is None else max(self.first, self.offset - window + 1)


class PagedBatch:
    """One layer's caches of the sequences in a batch, with mlx-lm's batch cache interface."""

    def __init__(
        self,
        layer: PagedLayer,
        metadata: BatchMetadata,
        firsts: Sequence[int],
        *,
        together: bool = False,
    ) -> None:
        """See `DecodeStep` for `together`."""
        self._layer = layer
        self._firsts = list(firsts)
        self._metadata = metadata
        self._together = together
        self._step = 0
        self._last: mx.array | None = None  # the last step's result
        # The last tokens. A handle would keep the batch and its sequences' pages alive.
        self._tokens: tuple[mx.array | Heads, mx.array | Heads] | None = None

    @property
    def n_rows(self) -> int:
        """The number of rows in a step: one row per sequence, then padding rows."""
        return self._metadata.n_rows

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token, (n_rows,) int32."""
        return self._metadata.positions(self._step)

    def update_and_fetch(
        self, keys: mx.array | Heads, values: mx.array | Heads
    ) -> tuple[PagedKeys, PagedKeys]:
        """Accept one new token per sequence, (batch, kv_heads, 1, head_dim). Return a handle."""
        if keys.shape[2] != 1:
            raise ValueError(f"a batch takes one token per sequence at a time, not {keys.shape[2]}")
        self._tokens = keys, values
        self._step += 1
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[PagedKeys, PagedKeys]:
        """Return a handle to the last tokens. Layers that share a cache call this."""
        if self._tokens is None:
            raise ValueError("a batch has no tokens before its first step")
        handle = PagedKeys(self, *self._tokens, self._step - 1)
        return handle, handle

    def attend(
        self,
        q: mx.array | Heads,
        keys: PagedKeys,
        scale: float,
        sinks: mx.array | None,
        rope: mx.array | None = None,
    ) -> mx.array:
        """Write the tokens of the handle `keys` to pages. Return the attention of `q`."""
        layer = self._layer
        self._last = layer.attention.attend(
            DecodeStep(
                q, keys.k, keys.v, self._metadata, keys.step, layer.kind, layer.number,
                scale, sinks, self._last, rope, self._together,
            )
        )  # fmt: skip
        return self._last

    def make_mask(self, *_: object, **__: object) -> None:
        """Return None, because rows have no padding."""

    def filter(self, batch_indices: Sequence[int]) -> None:
        self._firsts = [self._firsts[i] for i in batch_indices]
        self._metadata = self._layer.shared.select(self._metadata, self._step, batch_indices)
        self._step, self._tokens = 0, None

    def extend(self, other: PagedBatch) -> None:
        self._firsts += other._firsts
        self._metadata = self._layer.shared.get(
            [*self._metadata.sequences, *other._metadata.sequences],
            [*self._lengths(), *other._lengths()],
        )
        self._step, self._tokens = 0, None

    def drafted(self, counts: Sequence[int]) -> PagedBatch:
        """Return a batch with `counts[i]` rows for the next tokens of sequence i. Its rows get the
        bits of one token at a time."""
        return self._drafted(self.metadata_of(counts), self._last)

    def metadata_of(self, counts: Sequence[int]) -> BatchMetadata:
        """Return the metadata of `drafted`."""
        given = zip(self._metadata.sequences, self._lengths(), counts, strict=True)
        return self._layer.shared.get(*rows_of(given))

    @property
    def can_follow(self) -> bool:
        """True if `following` works."""
        return self._layer.attention.reads_plans

    def following(self, metadata: LateMetadata) -> PagedBatch:
        """Return a batch for the drafts after this one's. Fill `metadata`, and call `fill`, before
        the evaluation of its step."""
        return self._drafted(metadata, self._last)

    def late_metadata(self) -> LateMetadata:
        """Return metadata for `following`, for as many rows as this batch has."""
        return LateMetadata(self._metadata)

    def fill(self, metadata: BatchMetadata) -> None:
        """Accept the metadata that `LateMetadata.fill` has read."""
        self._metadata = metadata

    def _drafted(self, metadata: BatchMetadata, last: mx.array | None) -> PagedBatch:
        found = PagedBatch(self._layer, metadata, ())
        found._last = last
        return found

    def keep(self, drafted: PagedBatch, counts: Sequence[int]) -> None:
        """Append the first `counts[i]` tokens that sequence i got in the step of `drafted`."""
        sequences, written = self._metadata.sequences, drafted._metadata
        last = dict(zip(written.sequences, written.lengths, strict=True))  # positions
        kind = self._layer.kind
        # All tokens of the step are in the pages, and have replaced the oldest ones.
        self._firsts = [
            one.tables[kind].pool.kind.first_kept(first, last[one] + 1)
            for one, first in zip(sequences, self._firsts, strict=True)
        ]
        lengths = [length + n for length, n in zip(self._lengths(), counts, strict=True)]
        self._metadata = self._layer.shared.get(sequences, lengths)
        self._step, self._tokens, self._last = 0, None, drafted._last

    def extract(self, idx: int, n_unread: int = 0) -> PagedCache:
        """Return a sequence's cache without its last `n_unread` tokens."""
        sequence = self._metadata.sequences[idx]
        length = self._metadata.lengths[idx] + self._step - n_unread
        first = sequence.tables[self._layer.kind].pool.kind.first_kept(self._firsts[idx], length)
        return PagedCache(self._layer, sequence, length, first, self._last)

    @property
    def state(self) -> list[mx.array]:
        """Evaluating this array writes the tokens' keys and values."""
        return [] if self._last is None else [self._last]

    def _lengths(self) -> list[int]:
        return [length + self._step for length in self._metadata.lengths]


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """A handle to a batch's keys and values. Only our attention can read it."""

    batch: PagedBatch
    k: mx.array | Heads
    v: mx.array | Heads
    step: int

    def swapaxes(self, axis1: int, axis2: int) -> RopeKeys:  # noqa: ARG002
        """Return the rope keys for their product with MLA's rope queries."""
        return RopeKeys(plain(self.v).dtype)


class RopeKeys(mx.array):
    """A batch's rope keys, (rows, 1, head_dim, tokens), which attention reads from pages."""

    def __new__(cls, dtype: mx.Dtype) -> Self:  # noqa: ARG004
        return cast(Callable[[type], Self], mx.array.__new__)(cls)

    def __init__(self, dtype: mx.Dtype) -> None:
        super().__init__(nothing_of(dtype))

    def __rmatmul__(self, left: mx.array) -> RopeScores:  # type: ignore[misc]  # no array
        return RopeScores(left)


@dataclass(frozen=True, slots=True)
class RopeScores:
    """The product of scaled `queries`, (rows, heads, 1, dim), and rope keys in MLA's scores."""

    queries: mx.array
