"""Split-KV plan of a decode step: each sequence's tokens are divided into items of work.

A thread group reads one item, a run of tokens of one sequence; there are enough items to keep the
device busy and no more. Knows positions and page tables; no arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from semantic.adapters.mlx.kv_cache.paged.kernel_source import ITEM_INTS
from semantic.domain.value_objects import BLOCK_TOKENS

SHORTEST = 64
"""Minimum tokens of an item, and the unit of its size: the tiles of four warps."""

MOST_ITEMS = 128
"""Maximum items of one row."""

_OVERHEAD = 192
"""Fixed cost of a thread group, in tokens that it could read meanwhile."""
_MOST_WAVES = 4


@dataclass(frozen=True, slots=True)
class RowPages:
    """A sequence's next position and its page table, a ring of `ring` pages if it has a window."""

    position: int
    pages: Sequence[int]
    window: int | None = None
    ring: int | None = None

    @property
    def first(self) -> int:
        """The first position that the next token attends to."""
        return 0 if self.window is None else max(0, self.position - self.window + 1)

    def page(self, block: int) -> int:
        """The page that holds the block with this number."""
        return self.pages[block if self.ring is None else block % self.ring]

    @property
    def capacity(self) -> int | None:
        """Positions below this have a page; None in a full ring, where all have."""
        if self.ring is not None and len(self.pages) >= self.ring:
            return None
        return len(self.pages) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """`numbers` has the items, ITEM_INTS each, then the page indices that they refer to.

    An item: first row, first position, position after the last, index in `numbers` of its first
    page, number of the first row's first result, number of each row's items, index among them,
    number of rows. Each item has a result for each of its rows: `spans` has the first result and
    the number of results of each row. Valid for `steps` steps.
    """

    numbers: list[int]
    spans: list[int]
    n_items: int
    n_results: int
    steps: int


def chunk_for(rows: Sequence[RowPages], at_once: int) -> int:
    """Tokens per item that finish soonest on a device that runs `at_once` items at a time.

    All items run at once or in a few full waves, whichever has the shorter critical path.
    """
    firsts = [row.first for row in rows]
    lengths = [row.position + 1 - first for row, first in zip(rows, firsts, strict=True)]
    longest, total = max(lengths), sum(lengths)
    least = -(-longest // (MOST_ITEMS - 1))

    def n_items(chunk: int) -> int:
        return sum(
            row.position // chunk - first // chunk + 1
            for row, first in zip(rows, firsts, strict=True)
        )

    costs: list[tuple[int, int]] = []
    for waves in range(1, _MOST_WAVES + 1):
        most = waves * at_once
        chunk = max(SHORTEST, -(-max(least, total // most) // SHORTEST) * SHORTEST)
        while (n := n_items(chunk)) > most and chunk < longest:
            chunk += SHORTEST
        costs.append((-(-n // at_once), chunk))
    return min((waves * (chunk + _OVERHEAD), chunk) for waves, chunk in costs)[1]


def cut_at_blocks(first: int, stop: int) -> list[range]:
    """Positions `first` to `stop`, cut at the edges of blocks."""
    edges = [first, *range(first - first % BLOCK_TOKENS + BLOCK_TOKENS, stop, BLOCK_TOKENS), stop]
    return [range(a, b) for a, b in itertools.pairwise(edges) if a < b]


def plan_split(
    rows: Sequence[RowPages], chunk: int, runs: Sequence[int] | None = None
) -> SplitPlan:
    """Plan items of `chunk` tokens for the next token of each row; every row has a page for it.

    With `runs`, `rows[i]` stands for a run of so many rows; see `joined_runs`.
    """
    runs = [1] * len(rows) if runs is None else runs
    starts = [_starts(row, chunk) for row in rows]
    n_items = sum(map(len, starts))
    items: list[int] = []
    pages: list[int] = []
    spans: list[int] = []
    steps, number, first = 1 << 30, 0, 0
    for row, n_rows, mine in zip(rows, runs, starts, strict=True):
        stop = mine[-1] + chunk
        if row.capacity is not None:
            stop = min(stop, row.capacity)
        blocks = range(mine[0] // BLOCK_TOKENS, (stop - 1) // BLOCK_TOKENS + 1)
        at = n_items * ITEM_INTS + len(pages) - blocks.start
        pages += [row.page(block) for block in blocks]
        for index, start in enumerate(mine):
            page = at + start // BLOCK_TOKENS
            items += [number, start, start + chunk, page, first, len(mine), index, n_rows]
        for _ in range(n_rows):
            spans += [first, len(mine)]
            first += len(mine)
        number += n_rows
        steps = min(steps, stop - row.position)
    return SplitPlan(items + pages, spans, n_items, first, steps)


def joined_runs(rows: Sequence[RowPages], most: int) -> tuple[list[RowPages], list[int]]:
    """Consecutive positions of one sequence, up to `most`, as one row; and how many each has.

    A run's row has the position of its last token, and a window that begins with its first one's.
    """
    joined: list[RowPages] = []
    runs: list[int] = []
    for row in rows:
        if runs and runs[-1] < most and _follows(row, joined[-1]):
            window = None if row.window is None else row.window + runs[-1]
            joined[-1] = RowPages(row.position, row.pages, window, row.ring)
            runs[-1] += 1
        else:
            joined.append(row)
            runs.append(1)
    return joined, runs


def _follows(row: RowPages, before: RowPages) -> bool:
    return row.pages is before.pages and row.position == before.position + 1


def _starts(row: RowPages, chunk: int) -> range:
    return range(row.first - row.first % chunk, row.position + 1, chunk)
