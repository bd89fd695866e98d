"""WriteOrder: which of the queued writes is next, and which of them something longer replaces.

Writes are numbered in the order in which they are queued, and mostly done in it. Two kinds of a
request that has not ended are held back. A partial block of keys and values lingers: a longer one
replaces it, most likely at the end of the turn. Checkpoints, and windows for them, that lie behind
the end give way to everything else, if asked for: where writes take time from decoding, what the
next turn continues from goes first. Knows numbers and headers; neither bodies nor threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from semantic.domain.block_hash import BlockKey, Part
from semantic.domain.stored import BlockHeader, StoredBlock

LINGER = 60.0
"""Seconds that a partial interim block waits for the longer one that makes it needless. It is of a
checkpoint on the way: the end of the turn most likely extends it."""


class WriteOrder:
    """The order of queued writes. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], *, defers: bool) -> None:
        """With `defers` interim checkpoints and windows give way to all other writes."""
        self._clock = clock
        self._defers = defers
        self._prompt: dict[int, None] = {}
        self._lingering: dict[int, tuple[BlockHeader, float]] = {}  # and when it is due
        self._deferred: dict[int, BlockKey] = {}
        self._held: dict[BlockKey, int] = {}  # of these two

    def add(self, number: int, block: StoredBlock | None = None) -> None:
        """A write, of a block or of something else; `number` is above all others."""
        if block is None or not block.interim:
            self._prompt[number] = None
        elif block.header.part is not Part.FULL and self._defers:
            self._held[block.header.key] = number
            self._deferred[number] = block.header.key
        elif block.header.part is Part.FULL and not block.header.link.is_full:
            self._held[block.header.key] = number
            self._lingering[number] = block.header, self._clock() + LINGER
        else:
            self._prompt[number] = None

    def discard(self, number: int) -> None:
        """The write is no longer queued."""
        self._prompt.pop(number, None)
        lingering = self._lingering.pop(number, None)
        key = lingering[0].key if lingering else self._deferred.pop(number, None)
        if key is not None:
            del self._held[key]

    def holds(self, key: BlockKey) -> bool:
        """True if a block is held back."""
        return key in self._held

    def hasten(self, key: BlockKey) -> None:
        """A block is held back no longer: it is of a turn that has ended."""
        number = self._held.get(key)
        if number is not None:
            self.discard(number)
            self._prompt[number] = None

    def replaced_by(self, longer: BlockHeader) -> Sequence[int]:
        """The writes that linger and with whose tokens this block begins."""
        return [n for n, (shorter, _) in self._lingering.items() if _extends(longer, shorter)]

    def next(self, *, lingers: bool = True) -> int | None:
        """The write that is due, which is not taken; None if none is. Without `lingers` nothing
        waits for a longer block."""
        number = next(iter(self._prompt), None)
        waiting, (_, due) = next(iter(self._lingering.items()), (None, (None, 0.0)))
        if waiting is not None and not (lingers and due > self._clock()):
            return waiting if number is None else min(number, waiting)
        return next(iter(self._deferred), None) if number is None else number

    def oldest_deferred(self) -> int | None:
        """The write that gives way to all others and came first."""
        return next(iter(self._deferred), None)

    def delay(self) -> float | None:
        """Seconds until what lingers is due; None if nothing does."""
        _, due = next(iter(self._lingering.values()), (None, None))
        return None if due is None else max(0.0, due - self._clock())


def _extends(longer: BlockHeader, shorter: BlockHeader) -> bool:
    """True if `longer` has all tokens of `shorter`, and more."""
    mine, other = longer.link, shorter.link
    return (
        longer.part is Part.FULL
        and mine.parent == other.parent
        and len(mine.tokens) > len(other.tokens)
        and mine.tokens[: len(other.tokens)] == other.tokens
    )
