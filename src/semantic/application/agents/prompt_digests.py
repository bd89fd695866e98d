"""Where two prompts part, as near as an eighth, from a kilobyte of each.

Digests of a prompt's beginnings stand for it: of each of the first 16 tokens, then of eight
lengths each time the length doubles. Knows no agents.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from semantic.domain.block_hash import TOKEN_BYTES, pack_tokens

_EACH = 16
"""So many beginnings are marked one by one."""
_PER_DOUBLING = 8
_MARK_BYTES = 8
"""Of a digest: whoever makes two prompts look alike gives two agents one name."""


@dataclass(frozen=True, slots=True)
class Marks:
    """A prompt of `n_tokens`: its marks one behind the other, and the digest of the whole."""

    n_tokens: int
    marks: bytes
    whole: bytes

    def common(self, other: Marks) -> int:
        """The longest marked length to which both are the same."""
        n = min(len(self.marks), len(other.marks)) // _MARK_BYTES
        same = bisect_left(range(n), True, key=lambda at: self._mark(at) != other._mark(at))
        return _length(same - 1) if same else 0

    def _mark(self, at: int) -> bytes:
        return self.marks[at * _MARK_BYTES : (at + 1) * _MARK_BYTES]


def marks_of(tokens: Sequence[int]) -> Marks:
    """The marks of a prompt."""
    marks, _ = marked(tokens, ())
    return marks


def marked(tokens: Sequence[int], lengths: Collection[int]) -> tuple[Marks, Mapping[int, bytes]]:
    """The marks of a prompt, and the digests of its beginnings of these `lengths`."""
    packed = memoryview(pack_tokens(tokens))
    n_tokens = len(tokens)
    grid = list(_lengths(n_tokens))
    digests: dict[int, bytes] = {}
    running = hashlib.sha256()
    done = 0
    wanted = {length for length in lengths if 0 < length <= n_tokens}
    for length in sorted({*grid, *wanted, n_tokens}):
        running.update(packed[done * TOKEN_BYTES : length * TOKEN_BYTES])
        digests[length] = running.copy().digest()[:_MARK_BYTES]
        done = length
    marks = Marks(n_tokens, b"".join(digests[length] for length in grid), digests[n_tokens])
    return marks, digests


def _lengths(n_tokens: int) -> Iterator[int]:
    """The lengths that are marked in a prompt of so many tokens."""
    at = 0
    while (length := _length(at)) <= n_tokens:
        yield length
        at += 1


def _length(at: int) -> int:
    """The length of mark number `at`."""
    if at < _EACH:
        return at + 1
    doubling, step = divmod(at - _EACH, _PER_DOUBLING)
    return (_EACH << doubling) + (step + 1) * ((_EACH << doubling) // _PER_DOUBLING)
