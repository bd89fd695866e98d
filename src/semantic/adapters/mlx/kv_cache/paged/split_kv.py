"""What a step's attention reads: runs of tokens of each sequence, as numbers for a kernel.

Each run is an item; enough of them to keep a device busy, and no more. Knows positions and
columns; no arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from semantic.adapters.mlx.kv_cache.paged.kernel_source import ITEM_INTS
from semantic.domain.value_objects import BLOCK_TOKENS

SHORTEST = 64
"""Tokens of an item at least, and what its tokens are a multiple of: the tiles of four warps."""

MOST_ITEMS = 128
"""Items of one row."""

_OVERHEAD = 192
"""Tokens that a thread group could read in the time in which it begins and ends."""
_MOST_WAVES = 4


@dataclass(frozen=True, slots=True)
class RowPages:
    """A sequence's next position and its columns: in order, or in turn where there is a window.

    With a window there are `ring` columns once the sequence is long enough.
    """

    position: int
    columns: Sequence[int]
    window: int | None = None
    ring: int | None = None

    @property
    def first(self) -> int:
        """The first position that the next token attends to."""
        return 0 if self.window is None else max(0, self.position - self.window + 1)

    def column(self, block: int) -> int:
        """The column of the sequence's block with this number."""
        return self.columns[block if self.ring is None else block % self.ring]

    @property
    def room(self) -> int | None:
        """Positions below this have a column; None when all have."""
        if self.ring is not None and len(self.columns) >= self.ring:
            return None
        return len(self.columns) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Plan:
    """`numbers`: the items, ITEM_INTS each, then the columns that they point to.

    An item: its row, its first position, the position after its last, where its first column
    stands in `numbers`, the number of its row's first item, of how many items of its row it is
    which. `spans` are the first item and the number of items of each row. Good for `steps` steps.
    """

    numbers: list[int]
    spans: list[int]
    n_items: int
    steps: int


def chunk_for(rows: Sequence[RowPages], at_once: int) -> int:
    """Tokens per item with which a device that runs `at_once` items at a time is done first.

    Either all run at once, or in a few full waves, whichever reads less in a row.
    """
    lengths = [row.position + 1 - row.first for row in rows]
    least = -(-max(lengths) // (MOST_ITEMS - 1))
    costs: list[tuple[int, int]] = []
    for waves in range(1, _MOST_WAVES + 1):
        most = waves * at_once
        chunk = _rounded(max(least, sum(lengths) // most))
        while (n_items := _n_items(rows, chunk)) > most and chunk < max(lengths):
            chunk += SHORTEST
        costs.append((-(-n_items // at_once), chunk))
    return min((waves * (chunk + _OVERHEAD), chunk) for waves, chunk in costs)[1]


def cut_at_blocks(first: int, stop: int) -> list[range]:
    """Positions `first` to `stop`, in ranges that lie in one block each."""
    edges = [first, *range(first - first % BLOCK_TOKENS + BLOCK_TOKENS, stop, BLOCK_TOKENS), stop]
    return [range(a, b) for a, b in itertools.pairwise(edges) if a < b]


def _rounded(n_tokens: int) -> int:
    return max(SHORTEST, -(-n_tokens // SHORTEST) * SHORTEST)


def make_plan(rows: Sequence[RowPages], chunk: int) -> Plan:
    """Items of `chunk` tokens each, for the next token of every row; each has room for it."""
    starts = [_starts(row, chunk) for row in rows]
    n_items = sum(map(len, starts))
    items: list[int] = []
    columns: list[int] = []
    spans: list[int] = []
    steps, first = 1 << 30, 0
    for number, (row, mine) in enumerate(zip(rows, starts, strict=True)):
        stop = mine[-1] + chunk
        if row.room is not None:
            stop = min(stop, row.room)
        blocks = range(mine[0] // BLOCK_TOKENS, (stop - 1) // BLOCK_TOKENS + 1)
        at = n_items * ITEM_INTS + len(columns) - blocks.start
        columns += [row.column(block) for block in blocks]
        for index, start in enumerate(mine):
            column = at + start // BLOCK_TOKENS
            items += [number, start, start + chunk, column, first, len(mine), index, 0]
        spans += [first, len(mine)]
        first += len(mine)
        steps = min(steps, stop - row.position)
    return Plan(items + columns, spans, n_items, steps)


def _n_items(rows: Sequence[RowPages], chunk: int) -> int:
    return sum(len(_starts(row, chunk)) for row in rows)


def _starts(row: RowPages, chunk: int) -> range:
    return range(row.first - row.first % chunk, row.position + 1, chunk)
