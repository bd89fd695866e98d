"""One layer's cache in pages, of a sequence alone and of a batch, as mlx-lm's models call them.

Alone a sequence is prefilled: models get plain arrays. In a batch it decodes: models get a handle
that only our attention reads. Joining and leaving change lists. Knows no blocks and no budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.contiguous.cache import causal_mask
from semantic.adapters.mlx.kv_cache.contiguous.ragged_batch import Mask
from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention, Place
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import Lineups
from semantic.adapters.mlx.kv_cache.paged.page_table import Chain, PagedSequence


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """A layer: its kind's number, its own number in that kind, and what computes over its pages."""

    kind: int
    number: int
    attention: PagedAttention
    lineups: Lineups


class PagedCache:
    """One layer's cache of a sequence of `offset` tokens; those from `first` on are there."""

    def __init__(
        self,
        layer: PagedLayer,
        sequence: PagedSequence,
        offset: int = 0,
        first: int = 0,
        pending: mx.array | None = None,
    ) -> None:
        """`pending` is what has to be computed for its tokens to be there."""
        self.layer = layer
        self.sequence = sequence
        self.offset = offset
        self.first = first
        self._pending = pending

    @property
    def chain(self) -> Chain:
        """The sequence's columns of this layer's kind."""
        return self.sequence.chains[self.layer.kind]

    @property
    def held(self) -> range:
        """Positions of the tokens that are there."""
        return range(self.first, self.offset)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens."""
        self.chain.reserve(capacity)

    # What mlx-lm calls

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add tokens, (1, kv_heads, n, head_dim) each; returns all that they may attend to."""
        at, stop = self.offset, self.offset + keys.shape[2]
        self.chain.reserve(stop)
        added = self.layer.attention.append(
            keys, values, self.chain, at, self._seen_from(), self.layer.number, self._pending
        )
        self._pending = added.done
        self.offset = stop
        self.first = self.chain.pages.kind.first_kept(self.first, stop)
        return added.k, added.v

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,  # noqa: ARG002
    ) -> Mask:
        """Mask for the next `N` tokens. A model's `window_size` is the window we were made for."""
        window = self.chain.pages.kind.window
        if N == 1:
            return None
        before = self.offset - self._seen_from()
        if window is not None and before + N > window:
            return causal_mask(N, before, window)
        return causal_mask(N, before) if return_array else "causal"

    @classmethod
    def merge(cls, caches: Sequence[PagedCache]) -> PagedBatch:
        """The batch of these sequences; copies nothing."""
        return PagedBatch(
            caches[0].layer,
            [cache.sequence for cache in caches],
            [cache.offset for cache in caches],
            [cache.first for cache in caches],
        )

    @property
    def state(self) -> list[mx.array]:
        """The arrays to evaluate."""
        return [] if self._pending is None else [self._pending]

    @property
    def nbytes(self) -> int:
        pages = self.chain.pages
        return len(self.chain.leases) * pages.kind.column_bytes // len(pages.kind.layers)

    def size(self) -> int:
        """Tokens held."""
        return len(self.held)

    def empty(self) -> bool:
        return self.offset == 0

    def _seen_from(self) -> int:
        """The first position that the next token attends to."""
        window = self.chain.pages.kind.window
        return 0 if window is None else max(self.first, self.offset - window + 1)


class PagedBatch:
    """One layer's caches of the sequences in a batch; mlx-lm's batch cache interface."""

    def __init__(
        self,
        layer: PagedLayer,
        sequences: Sequence[PagedSequence],
        lengths: Sequence[int],
        firsts: Sequence[int],
    ) -> None:
        self._layer = layer
        self._firsts = list(firsts)
        self._lineup = layer.lineups.get(sequences, lengths)
        self._step = 0
        self._last: mx.array | None = None  # what the last step returned

    def __deepcopy__(self, memo: dict[int, object]) -> PagedBatch:
        """mlx-lm copies a batch to split it; the sequences are shared, each used once."""
        return PagedBatch(self._layer, self._lineup.sequences, self._lengths(), self._firsts)

    @property
    def offset(self) -> mx.array:
        """Position of the next token of each sequence, (batch,) int32."""
        return self._lineup.positions(self._step)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PagedKeys, PagedKeys]:
        """Take one new token per sequence, (batch, kv_heads, 1, head_dim); a handle for both."""
        if keys.shape[2] != 1:
            raise ValueError(f"a batch takes one token per sequence at a time, not {keys.shape[2]}")
        handle = PagedKeys(self, keys, values, self._step)
        self._step += 1
        return handle, handle

    def attend(
        self, q: mx.array, keys: PagedKeys, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Attention of the tokens of a handle, which are in their pages afterwards."""
        layer = self._layer
        place = Place(self._lineup, keys.step, layer.kind, layer.number)
        self._last = layer.attention.attend(q, keys.k, keys.v, place, scale, sinks, self._last)
        return self._last

    def make_mask(self, *_: object, **__: object) -> None:
        """No mask: nothing is padded."""

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep only these rows."""
        self._firsts = [self._firsts[i] for i in batch_indices]
        self._lineup = self._layer.lineups.keep(self._lineup, self._step, batch_indices)
        self._step = 0

    def extend(self, other: PagedBatch) -> None:
        """Add the rows of `other`."""
        self._firsts += other._firsts
        self._lineup = self._layer.lineups.get(
            [*self._lineup.sequences, *other._lineup.sequences],
            [*self._lengths(), *other._lengths()],
        )
        self._step = 0

    def extract(self, idx: int) -> PagedCache:
        """Row `idx`, as it is."""
        sequence = self._lineup.sequences[idx]
        length = self._lineup.lengths[idx] + self._step
        first = sequence.chains[self._layer.kind].pages.kind.first_kept(self._firsts[idx], length)
        return PagedCache(self._layer, sequence, length, first, self._last)

    @property
    def state(self) -> list[mx.array]:
        """The arrays to evaluate: tokens are in their pages when their logits are there."""
        return []

    @property
    def nbytes(self) -> int:
        return sum(self.extract(i).nbytes for i in range(len(self._firsts)))

    def size(self) -> int:
        """Tokens of the longest row."""
        return max(self._lengths(), default=0)

    def empty(self) -> bool:
        return not any(self._lengths())

    def _lengths(self) -> list[int]:
        return [length + self._step for length in self._lineup.lengths]


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """What a model gets for keys and values: a handle that only our attention can read."""

    batch: PagedBatch
    k: mx.array
    v: mx.array
    step: int
