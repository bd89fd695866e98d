"""One sequence's cache of one layer, in the form that mlx-lm's models call.

A model sees it as a cache of its own while the sequence is prefilled alone; `merge` then puts
several into one batch. Knows the arrays and the layer's window; not blocks, pools or requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.contiguous.buffer import BufferRange, KVBuffer
from semantic.adapters.mlx.kv_cache.contiguous.ragged_batch import Mask, RaggedBatch
from semantic.domain.value_objects import whole_blocks


def causal_mask(n: int, before: int, window: int | None = None) -> mx.array:
    """(n, before + n) booleans: query i sees key j if that is not later, nor out of the window."""
    queries = mx.arange(before, before + n)[:, None]
    keys = mx.arange(before + n)[None]
    mask = queries >= keys
    return mask if window is None else mask & (queries < keys + window)


class SequenceCache(ABC):
    """Keys and values of the tokens of one sequence in one layer.

    The buffer grows by itself when it must; who counts blocks reserves room before. `offset` is
    the number of tokens the sequence has: the position of the next one.
    """

    def __init__(self, buffer: KVBuffer, offset: int) -> None:
        self.buffer = buffer
        self.offset = offset

    @abstractmethod
    def append(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Add tokens, (1, kv_heads, n, head_dim) each; returns all that they may attend to."""

    @abstractmethod
    def mask_for(self, n: int) -> Mask:
        """Mask for the next `n` tokens over what `append` will return for them."""

    @abstractmethod
    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens in the buffer."""

    @abstractmethod
    def trim(self, length: int) -> None:
        """Forget the tokens from position `length` on."""

    @property
    @abstractmethod
    def held(self) -> range:
        """Positions of the tokens that are still there."""

    def ranges(self, size: int) -> list[BufferRange]:
        """What is held, in ranges of at most `size` tokens."""
        n = len(self.held)
        return [BufferRange(self.buffer, i, min(i + size, n)) for i in range(0, n, size)]

    # What mlx-lm calls, while the sequence is prefilled alone

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """mlx-lm's name for `append`."""
        return self.append(keys, values)

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,  # noqa: ARG002
    ) -> Mask:
        """mlx-lm's name for `mask_for`. A model's `window_size` is the window we were made for."""
        mask = self.mask_for(N)
        if return_array and isinstance(mask, str):
            return causal_mask(N, len(self.held))
        return mask

    @classmethod
    def merge(cls, caches: Sequence[SequenceCache]) -> RaggedBatch:
        """The batch of these sequences; copies nothing."""
        from semantic.adapters.mlx.kv_cache.contiguous.ragged_batch import RaggedBatch

        return RaggedBatch(list(caches))

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The arrays to evaluate."""
        return self.buffer.k, self.buffer.v

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def size(self) -> int:
        """Tokens held."""
        return len(self.held)

    def empty(self) -> bool:
        return self.offset == 0


class FullCache(SequenceCache):
    """Every token of the sequence, token i at position i of the buffer."""

    def append(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """See `SequenceCache.append`."""
        stop = self.offset + k.shape[2]
        if stop > self.buffer.capacity:
            self.reserve(stop)
        self.buffer.write(self.offset, stop, k, v)
        self.offset = stop
        return self.buffer.read(0, stop)

    def mask_for(self, n: int) -> Mask:
        """See `SequenceCache.mask_for`."""
        return "causal" if n > 1 else None

    def reserve(self, capacity: int) -> None:
        """See `SequenceCache.reserve`."""
        if capacity > self.buffer.capacity:
            self.buffer.resize(range(self.offset), whole_blocks(capacity))

    def trim(self, length: int) -> None:
        """See `SequenceCache.trim`."""
        self.offset = min(self.offset, length)

    @property
    def held(self) -> range:
        """See `SequenceCache.held`."""
        return range(self.offset)


class WindowCache(SequenceCache):
    """The last tokens of the sequence, at least `window` of them once there were that many.

    They lie in order from the front of the buffer. When the buffer is full, the last `window`
    tokens move to the front, so their cost is spread over as many steps as there is room beyond
    the window.
    """

    def __init__(
        self, buffer: KVBuffer, offset: int, window: int, most: int, held: int = 0
    ) -> None:
        """`most` is the largest capacity the buffer may grow to; it exceeds `window`."""
        super().__init__(buffer, offset)
        self.window = window
        self._most = most
        self._held = held

    def append(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """See `SequenceCache.append`."""
        n = k.shape[2]
        self.reserve(self._held + n)
        first = max(0, self._held - (self.window - 1))  # the oldest that the first new one sees
        if self._held + n <= self.buffer.capacity:
            self.buffer.write(self._held, self._held + n, k, v)
            self._held += n
            seen = self.buffer.read(first, self._held)
        elif n == 1:
            self.buffer.resize(range(self._held - self.window, self._held), self.buffer.capacity)
            self.buffer.write(self.window, self.window + 1, k, v)
            self._held = self.window + 1
            seen = self.buffer.read(1, self._held)
        else:
            seen = self._append_long(first, k, v)
        self.offset += n
        return seen

    def _append_long(self, first: int, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Append more than the buffer can hold: attend over all of it, keep the last of it."""
        old_k, old_v = self.buffer.read(first, self._held)
        seen = KVBuffer(mx.concatenate([old_k, k], axis=2), mx.concatenate([old_v, v], axis=2))
        total = seen.capacity
        self._held = min(self.window, total)
        last = BufferRange(seen, total - self._held, total)
        kept = KVBuffer.gather([last], self.buffer.capacity)
        self.buffer.k, self.buffer.v = kept.k, kept.v
        return seen.k, seen.v

    def mask_for(self, n: int) -> Mask:
        """See `SequenceCache.mask_for`."""
        if n == 1:
            return None
        before = min(self._held, self.window - 1)
        if before + n <= self.window:
            return "causal"
        return causal_mask(n, before, self.window)

    def reserve(self, capacity: int) -> None:
        """See `SequenceCache.reserve`; never more than the window needs."""
        wanted = min(whole_blocks(capacity), self._most)
        if wanted > self.buffer.capacity:
            self.buffer.resize(range(self._held), wanted)

    def trim(self, length: int) -> None:
        """See `SequenceCache.trim`."""
        gone = max(0, self.offset - length)
        self._held -= gone
        self.offset -= gone

    @property
    def held(self) -> range:
        """See `SequenceCache.held`."""
        return range(self.offset - self._held, self.offset)
