"""Finds the blocks that share most tokens with a prompt, among the blocks after one parent.

Sorts packed tokens, so that a few searches suffice for any number of blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence

from semantic.domain.block_hash import (
    TOKEN_BYTES,
    BlockHash,
    BlockKey,
    Part,
    begins_like,
    pack_tokens,
    unpack_tokens,
)
from semantic.domain.stored import BlockHeader

Search = Callable[[bytes], bytes | None]

_FEW = 8
"""The maximum number of siblings to compare one by one."""
_BEHIND = b"\xff" * 33
"""A byte string that sorts after every hash."""


def nearest(like: bytes, at_most: Search, above: Search) -> list[bytes]:
    """Return the members of a sorted set of packed tokens that are worth comparing with `like`.

    `at_most` returns the last member up to its argument, `above` the first member after it.
    """
    found: dict[bytes, None] = {}
    after = above(like)
    if after is not None:
        found[after] = None
    rest = like
    while rest and (before := at_most(rest)) is not None:
        shared = shared_bytes(before, rest)
        if rest is like or shared == len(before):
            found[before] = None
        if not shared:
            break
        # Whatever remains to be found is a prefix of `rest` and sorts before all other members.
        rest = rest[: shared - TOKEN_BYTES if shared == len(before) else shared]
    tokens = unpack_tokens(like)
    return [one for one in found if begins_like(unpack_tokens(one), tokens)]


def shared_bytes(one: bytes, other: bytes) -> int:
    """Return the length, in bytes, of the longest common prefix of whole tokens."""
    n = min(len(one), len(other))
    differing = int.from_bytes(one[:n], "big") ^ int.from_bytes(other[:n], "big")
    same = n - (differing.bit_length() + 7) // 8
    return same - same % TOKEN_BYTES


class Children:
    """Headers of blocks, by parent and part. Not thread-safe."""

    def __init__(self) -> None:
        self._families: dict[tuple[BlockHash, Part], _Family] = {}

    def add(self, header: BlockHeader) -> None:
        """Insert a header if the header is new."""
        self._families.setdefault((header.link.parent, header.part), _Family()).add(header)

    def remove(self, header: BlockHeader) -> None:
        """Remove a header."""
        place = header.link.parent, header.part
        family = self._families[place]
        family.remove(header)
        if not family.headers:
            del self._families[place]

    def clear(self) -> None:
        self._families.clear()

    def of(self, parent: BlockHash, part: Part) -> list[BlockHeader]:
        """Return the headers of the blocks that follow the block `parent`, oldest first."""
        family = self._families.get((parent, part))
        return [] if family is None else list(family.headers.values())

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> list[BlockHeader]:
        family = self._families.get((parent, part))
        return [] if family is None else family.nearest(like)

    def longer(self, header: BlockHeader) -> bool:
        """Return whether a sibling begins with the tokens of `header` and has more tokens."""
        family = self._families.get((header.link.parent, header.part))
        packed = pack_tokens(header.link.tokens)
        after = None if family is None else family.above(packed)
        return after is not None and after.startswith(packed)


class _Family:
    # Sorts only more than `_FEW` blocks

    __slots__ = ("_sorted", "headers")

    def __init__(self) -> None:
        self.headers: dict[BlockKey, BlockHeader] = {}
        self._sorted: list[tuple[bytes, BlockHash]] | None = None

    def add(self, header: BlockHeader) -> None:
        if header.key in self.headers:
            return
        self.headers[header.key] = header
        if self._sorted is not None:
            insort(self._sorted, _place(header))
        elif len(self.headers) > _FEW:
            self._sorted = sorted(map(_place, self.headers.values()))

    def remove(self, header: BlockHeader) -> None:
        del self.headers[header.key]
        if self._sorted is not None:
            del self._sorted[bisect_left(self._sorted, _place(header))]

    def nearest(self, like: Sequence[int]) -> list[BlockHeader]:
        part = next(iter(self.headers)).part
        order = self._order()
        found = []
        for packed in nearest(pack_tokens(like), self.at_most, self.above):
            of_tokens = order[bisect_left(order, (packed, b"")) : bisect_right(order, _end(packed))]
            found += [self.headers[BlockKey(name, part)] for _, name in of_tokens]
        return found

    def at_most(self, packed: bytes) -> bytes | None:
        order = self._order()
        at = bisect_right(order, _end(packed))
        return order[at - 1][0] if at else None

    def above(self, packed: bytes) -> bytes | None:
        order = self._order()
        at = bisect_right(order, _end(packed))
        return order[at][0] if at < len(order) else None

    def _order(self) -> list[tuple[bytes, BlockHash]]:
        return (
            self._sorted if self._sorted is not None else sorted(map(_place, self.headers.values()))
        )


def _place(header: BlockHeader) -> tuple[bytes, BlockHash]:
    return pack_tokens(header.link.tokens), header.link.hash


def _end(packed: bytes) -> tuple[bytes, bytes]:
    return packed, _BEHIND
