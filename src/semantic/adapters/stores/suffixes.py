"""A sorted array of the places in a text, to find the longest match of what came last.

The order of places is that of the tokens before them, the last one first. So all places after the
same tokens are neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

END = -1
"""The token after the end of a text."""

SHORTEST, LONGEST = 2, 12
"""The fewest tokens of a match, and the most tokens that decide the order of places."""

_BITS, _TOGETHER = 21, 3
"""A key has three tokens of 21 bits."""
_FEW = 32
"""The number of places to compare at once."""

Tokens = NDArray[np.int32]


class Match(NamedTuple):
    """A place after `n_tokens` that equal the tokens that came last. `LONGEST` means at least as
    many."""

    text: Tokens
    at: int
    n_tokens: int


class Suffixes:
    """The places of a text that never changes. Takes 16 bytes per token."""

    def __init__(self, text: Sequence[int] | Tokens) -> None:
        """`text` may contain `END`, behind which a match does not continue."""
        self.text: Tokens = np.asarray(text, np.int32)
        parts = [_keys(self.text, depth) for depth in range(0, LONGEST, _TOGETHER)]
        order = np.lexsort(parts[::-1])
        self._order = order.astype(np.int32)
        self._keys = parts[0][order]

    def __len__(self) -> int:
        return len(self.text)

    def longest(self, before: Sequence[int]) -> Match | None:
        """Return the last place inside a text after the longest match with the end of `before`."""
        if len(before) < SHORTEST or not len(self):
            return None
        wanted = [*before[: -LONGEST - 1 : -1], *[END] * LONGEST][:LONGEST]
        found = self._between(wanted)
        if found is None:
            return None
        places = self._order[found.start : found.stop]
        if len(places) > _FEW:  # matches of two tokens
            places = np.partition(places, len(places) - _FEW)[-_FEW:]
        context = self._contexts(places)
        equal = (context == np.asarray(wanted, np.int32)) & (context != END)
        lengths = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
        lengths[self.text[places] == END] = 0
        longest, at = max(zip(lengths.tolist(), places.tolist(), strict=True))
        return Match(self.text, at, longest) if longest >= SHORTEST else None

    def _between(self, wanted: Sequence[int]) -> range | None:
        """Return a few neighbours with the longest match; None if it is too short."""
        key = _key(wanted)
        low, high = self._rank(key), self._rank(key + 1)
        if low == high or wanted[_TOGETHER - 1] == END:
            low = self._rank(_key((*wanted[:SHORTEST], END)))
            high = self._rank(_key((wanted[0], wanted[1] + 1, END)))
            return range(low, high) if low < high else None
        for depth in range(_TOGETHER, LONGEST, _TOGETHER):
            if high - low <= _FEW:
                break
            key = _key(wanted[depth:])
            at = self._key_of(depth)
            first = bisect_left(range(high), key, low, high, key=at)
            last = bisect_right(range(high), key, first, high, key=at)
            if first == last:  # the neighbours of where it would be
                return range(max(low, first - _FEW // 2), min(high, first + _FEW // 2))
            low, high = first, last
        return range(max(low, high - _FEW), high)

    def _rank(self, key: int) -> int:
        return int(self._keys.searchsorted(np.int64(key)))

    def _key_of(self, depth: int) -> Callable[[int], int]:
        order, text = self._order, self.text

        def key_at(number: int) -> int:
            end = int(order[number]) - depth
            first = max(0, end - _TOGETHER)
            given = text[first:end].tolist() if end > 0 else []
            return _key([*given[::-1], END, END, END])

        return key_at

    def _contexts(self, places: Tokens) -> Tokens:
        """Return the tokens before each place, the last one first, (places, LONGEST)."""
        before = places[:, None] - np.arange(1, LONGEST + 1, dtype=np.int32)
        return np.where(before < 0, END, self.text[np.maximum(before, 0)])


def _keys(text: Tokens, depth: int) -> NDArray[np.int64]:
    """Return the key of each place, of the three tokens from `depth` before it on."""
    keys = np.zeros(len(text), np.int64)
    for number in range(depth + 1, depth + 1 + _TOGETHER):
        before = np.full(len(text), END, np.int64)
        before[number:] = text[: max(0, len(text) - number)]
        keys = (keys << _BITS) + before + 1
    return keys


def _key(tokens: Sequence[int]) -> int:
    first, second, third = tokens[:_TOGETHER]
    return ((first + 1 << _BITS) + second + 1 << _BITS) + third + 1
