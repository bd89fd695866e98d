"""PromptDigests: digests of a prompt's prefixes, to estimate the common prefix of two prompts.

A prompt of any length takes about a kilobyte: one digest for each of the first 16 tokens, then
eight for each doubling of the length. The estimate is at most an eighth too short. Knows no agents.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from semantic.domain.block_hash import TOKEN_BYTES, pack_tokens

_EACH = 16
"""The first this many prefixes each have a digest."""
_PER_DOUBLING = 8
_DIGEST_BYTES = 8
"""Bytes of a digest. A collision only gives two agents one name."""


@dataclass(frozen=True, slots=True)
class PromptDigests:
    """Digests of a prompt of `n_tokens`: of its prefixes, concatenated, and of the whole."""

    n_tokens: int
    prefixes: bytes
    whole: bytes

    def common(self, other: PromptDigests) -> int:
        """Length of the longest digested prefix that both share."""
        n = min(len(self.prefixes), len(other.prefixes)) // _DIGEST_BYTES
        same = bisect_left(range(n), True, key=lambda at: self._digest(at) != other._digest(at))
        return _length(same - 1) if same else 0

    def _digest(self, at: int) -> bytes:
        return self.prefixes[at * _DIGEST_BYTES : (at + 1) * _DIGEST_BYTES]


def digests_of(tokens: Sequence[int]) -> PromptDigests:
    """The digests of a prompt."""
    digests, _ = digests_and_prefixes(tokens, ())
    return digests


def digests_and_prefixes(
    tokens: Sequence[int], lengths: Collection[int]
) -> tuple[PromptDigests, Mapping[int, bytes]]:
    """The digests of a prompt, and those of its prefixes of `lengths`."""
    packed = memoryview(pack_tokens(tokens))
    n_tokens = len(tokens)
    grid = list(_lengths(n_tokens))
    digests: dict[int, bytes] = {}
    running = hashlib.sha256()
    done = 0
    wanted = {length for length in lengths if 0 < length <= n_tokens}
    for length in sorted({*grid, *wanted, n_tokens}):
        running.update(packed[done * TOKEN_BYTES : length * TOKEN_BYTES])
        digests[length] = running.copy().digest()[:_DIGEST_BYTES]
        done = length
    result = PromptDigests(
        n_tokens, b"".join(digests[length] for length in grid), digests[n_tokens]
    )
    return result, digests


def _lengths(n_tokens: int) -> Iterator[int]:
    """The prefix lengths that are digested in a prompt of `n_tokens`."""
    at = 0
    while (length := _length(at)) <= n_tokens:
        yield length
        at += 1


def _length(at: int) -> int:
    """The length of digested prefix number `at`."""
    if at < _EACH:
        return at + 1
    doubling, step = divmod(at - _EACH, _PER_DOUBLING)
    return (_EACH << doubling) + (step + 1) * ((_EACH << doubling) // _PER_DOUBLING)
