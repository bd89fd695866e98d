"""Metadata of a batch for the kernels: positions, page tables and split-KV plans.

Splits depend on their sequence alone, so its attention has the same bits in every batch.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from semantic.adapters.mlx.arrays import Late, async_eval, on_device, on_device_async
from semantic.adapters.mlx.kv_cache.paged.kernel_source import ITEM_INTS
from semantic.adapters.mlx.kv_cache.paged.page_pool import PagedSequence, PageTable
from semantic.domain.value_objects import BLOCK_TOKENS

SHORTEST = 2 * BLOCK_TOKENS
"""The minimum number of tokens in a split."""

MOST_SPLITS = 64
"""The maximum number of splits of one row. The kernels can combine 128 splits."""

_OVERHEAD = 192
"""The fixed cost of a thread group, in tokens that the group could read in that time."""
_MOST_WAVES = 4


@dataclass(frozen=True, slots=True)
class RowPages:
    """A sequence's next position and page table. With a window, the table is a ring of pages."""

    position: int
    pages: Sequence[int]
    window: int | None = None
    ring: int | None = None

    @property
    def first(self) -> int:
        """The first position to which the next token attends."""
        return 0 if self.window is None else max(0, self.position - self.window + 1)

    def page(self, block: int) -> int:
        """Return the page of block number `block`."""
        return self.pages[block if self.ring is None else block % self.ring]

    @property
    def capacity(self) -> int | None:
        """The position below which all positions have a page; None if the ring is full."""
        if self.ring is not None and len(self.pages) >= self.ring:
            return None
        return len(self.pages) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A division of a step's keys into items of work, valid for `steps` steps."""

    # ITEM_INTS numbers per item, then page indices. An item's numbers are its first row, its first
    # position, the position after its last, the index here of its first page, the number of its
    # first row's first result, how many splits each of its rows has, the index of its first split
    # among them, its count of rows, the tokens of a split, how many items each row has, and how
    # many rows of the sequence precede its first row.
    numbers: list[int]
    spans: list[int]  # each row's first result and count of results, one per split
    n_items: int
    n_results: int
    steps: int


_NO_ITEM = [0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0]
"""An item without keys and results."""


class Run(NamedTuple):
    """Consecutive rows of a sequence that a thread group computes together."""

    n_rows: int = 1
    n_before: int = 0
    """The rows of the sequence before them."""


def split_for(row: RowPages) -> int:
    """Return the number of tokens per split of `row`. A row has at most `MOST_SPLITS` splits."""
    split, first = SHORTEST, row.first
    while row.position // split - first // split >= MOST_SPLITS:
        split *= 2
    return split


def splits_of(row: RowPages, split: int) -> range:
    """Divide `row` into splits of `split` tokens. Return the first position of each split."""
    return range(row.first - row.first % split, row.position + 1, split)


def items_of(splits: range, chunk: int) -> range:
    """Divide `splits` into items of at most `chunk` tokens. Return the first position of each."""
    return splits[:: max(1, chunk // splits.step)]


def chunk_for(splits: Sequence[range], at_once: int) -> int:
    """Return the number of tokens per item of work with which the device finishes soonest. It
    processes `at_once` items in parallel."""
    lengths = [len(one) * one.step for one in splits]
    longest, total = max(lengths), sum(lengths)

    def n_items(chunk: int) -> int:
        return sum(len(items_of(one, chunk)) for one in splits)

    costs: list[tuple[int, int]] = []
    for waves in range(1, _MOST_WAVES + 1):
        most = waves * at_once
        chunk = max(SHORTEST, -(-total // most // SHORTEST) * SHORTEST)
        while (n := n_items(chunk)) > most and chunk < longest:
            chunk += SHORTEST
        costs.append((-(-n // at_once), chunk))
    return min((waves * (chunk + _OVERHEAD), chunk) for waves, chunk in costs)[1]


def cut_at_blocks(first: int, stop: int) -> list[range]:
    """Return positions `first` to `stop` as one range per block."""
    edges = [first, *range(first - first % BLOCK_TOKENS + BLOCK_TOKENS, stop, BLOCK_TOKENS), stop]
    return [range(a, b) for a, b in itertools.pairwise(edges) if a < b]


def plan_split(
    rows: Sequence[RowPages],
    splits: Sequence[range],
    chunk: int,
    runs: Sequence[Run] | None = None,
    least_items: int = 0,
) -> SplitPlan:
    """Divide the keys of each row's next token into items of at most `chunk` tokens. If `runs` is
    given, `rows[i]` stands for the rows of `runs[i]`. Empty items make them `least_items`."""
    runs = [Run()] * len(rows) if runs is None else runs
    starts = [items_of(mine, chunk) for mine in splits]
    n_items = max(least_items, sum(map(len, starts)))
    items: list[int] = []
    pages: list[int] = []
    spans: list[int] = []
    steps, number, first = 1 << 30, 0, 0
    for row, (n_rows, n_before), mine, own in zip(rows, runs, splits, starts, strict=True):
        end = mine[-1] + mine.step
        stop = end if row.capacity is None else min(end, row.capacity)
        blocks = range(mine[0] // BLOCK_TOKENS, (stop - 1) // BLOCK_TOKENS + 1)
        at = n_items * ITEM_INTS + len(pages) - blocks.start
        pages += [row.page(block) for block in blocks]
        for start in own:
            items += [number, start, min(start + own.step, end), at + start // BLOCK_TOKENS, first]
            items += [len(mine), (start - mine[0]) // mine.step, n_rows, mine.step, len(own)]
            items.append(n_before)
        for _ in range(n_rows):
            spans += [first, len(mine)]
            first += len(mine)
        number += n_rows
        steps = min(steps, stop - row.position)
        if row.window is not None:  # until the first split leaves the window
            steps = min(steps, mine[0] + mine.step + row.window - 1 - row.position)
    items += _NO_ITEM * (n_items - len(items) // ITEM_INTS)
    return SplitPlan(items + pages, spans, n_items, first, steps)


def joined_runs(rows: Sequence[RowPages], most: int) -> tuple[list[RowPages], list[Run]]:
    """Join rows at consecutive positions of a sequence into runs of up to `most` rows. Return what
    each run reads, and the runs."""
    firsts, runs = equal_runs(rows, most)
    joined: list[RowPages] = []
    for first, (n_rows, _) in zip(firsts, runs, strict=True):
        last = rows[first + n_rows - 1]
        window = None if last.window is None else last.window + n_rows - 1
        joined.append(replace(last, window=window))
    return joined, runs


def equal_runs(
    rows: Sequence[RowPages], most: int, splits: Sequence[range] | None = None
) -> tuple[list[int], list[Run]]:
    """Join rows at consecutive positions of a sequence into runs of up to `most` rows, if they have
    the same `splits`. Return the index of each run's first row, and the runs."""
    firsts: list[int] = []
    runs: list[Run] = []
    for i, row in enumerate(rows):
        n_rows, n_before = runs[-1] if runs else Run()
        if not runs or not _follows(row, rows[i - 1]):
            firsts.append(i)
            runs.append(Run())
        elif n_rows < most and (splits is None or splits[i] == splits[i - 1]):
            runs[-1] = Run(n_rows + 1, n_before)
        else:
            firsts.append(i)
            runs.append(Run(1, n_before + n_rows))
    return firsts, runs


def _follows(row: RowPages, before: RowPages) -> bool:
    return row.pages is before.pages and row.position == before.position + 1


RowSize = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The keys that each thread group reads in steps before step `until`. The plan is invalid after
    the pool has moved pages more than `moves` times."""

    n_items: int
    n_results: int
    plan: mx.array
    spans: mx.array
    until: int
    moves: int


_NO_SIZES_BETWEEN = 16
_SPARE_ITEMS = 16
"""The items that a step may have more than the step before it."""


def exact(n_rows: int) -> int:
    """Return `n_rows`: the batch has no padding."""
    return n_rows


def row_size(n_rows: int) -> int:
    """Return `n_rows` with padding. On CUDA, a new number of rows takes the time of ten steps."""
    size = 1 << max(0, n_rows - 1).bit_length()
    between = 3 * size // 4
    return between if _NO_SIZES_BETWEEN < n_rows <= between else size


class BatchMetadata:
    """The metadata of sequences with `lengths` tokens, and of padding rows after them."""

    __slots__ = (
        "__weakref__", "_plans", "_positions", "_row_plans", "lengths", "n_rows",
        "sequences",
    )  # fmt: skip

    def __init__(
        self, sequences: tuple[PagedSequence, ...], lengths: tuple[int, ...], size: RowSize = exact
    ) -> None:
        self.sequences = sequences
        self.lengths = lengths
        self.n_rows = size(len(sequences))
        self._positions: tuple[int, mx.array] | None = None
        self._plans: dict[int, StepPlan] = {}
        self._row_plans: dict[int, StepPlan] = {}

    def positions(self, step: int) -> mx.array:
        """Return the position of each sequence's token in step `step`, (n_rows,) int32."""
        known = self._positions
        if known is None or not 0 <= step - known[0] <= 1:
            padding = [0] * (self.n_rows - len(self.lengths))
            before = [*(length + step - 1 for length in self.lengths), *padding]
            known = step - 1, on_device_async(before)
        if step > known[0]:
            known = step, known[1] + 1  # added even in the first step, for one CUDA graph
        self._positions = known
        return known[1]

    def plan(self, kind: int, step: int, at_once: int, most_rows: int = 1) -> StepPlan:
        """Return a step's plan for a kind's layers. Allocates pages for the step's tokens. A thread
        group computes at most `most_rows` rows of a sequence."""
        known = self._plans.get(kind)
        if known is None or step >= known.until or known.moves != self._moves(kind):
            made = self.split(kind, step, at_once, most_rows)
            known = self._plans[kind] = _on_device(made, step, self._moves(kind))
        return known

    def split(
        self, kind: int, step: int, at_once: int, most_rows: int, least_items: int = 0
    ) -> SplitPlan:
        """Return the numbers of `plan`, with at least `least_items` items."""
        rows = self.rows(kind, step)
        splits = [splits_of(row, split_for(row)) for row in rows]
        firsts, runs = equal_runs(rows, most_rows, splits)
        rows, splits = [rows[i] for i in firsts], [splits[i] for i in firsts]
        return plan_split(rows, splits, chunk_for(splits, at_once), runs, least_items)

    def row_plan(self, kind: int, most_rows: int, at_once: int) -> StepPlan:
        """Return a plan for step 0 in which the rows of a sequence read their keys together."""
        known = self._row_plans.get(kind)
        if known is None or known.moves != self._moves(kind):
            rows, runs = joined_runs(self.rows(kind, 0), most_rows)
            splits = [splits_of(row, split_for(row)) for row in rows]
            chunk = chunk_for(splits, at_once)
            pairs = zip(rows, splits, strict=True)  # their kernel has one split per item
            splits = [splits_of(row, max(chunk, one.step)) for row, one in pairs]
            made = plan_split(rows, splits, chunk, runs)
            known = self._row_plans[kind] = _on_device(made, 0, self._moves(kind))
        return known

    def _moves(self, kind: int) -> int:
        return self.sequences[0].tables[kind].pool.moves

    def rows(self, kind: int, step: int) -> list[RowPages]:
        """Return each sequence's page table, with a page for its token in step `step`."""
        tables = [sequence.tables[kind] for sequence in self.sequences]
        for table, length in zip(tables, self.lengths, strict=True):
            if not table.has_capacity(length + step + 1):
                table.reserve(length + step + 1)
        rows: list[RowPages] = []
        known: tuple[PageTable, list[int]] | None = None
        for table, length in zip(tables, self.lengths, strict=True):
            if known is None or known[0] is not table:
                known = table, table.pages  # for all rows of a sequence
            one = table.pool.kind
            rows.append(RowPages(length + step, known[1], one.window, one.ring))
        return rows


class _LatePlan(NamedTuple):
    made: StepPlan
    at_once: int
    most_rows: int
    plan: Late
    spans: Late
    pages: mx.array


class LateMetadata(BatchMetadata):
    """The metadata of a step whose graph exists before its rows do."""

    __slots__ = ("_first", "_late", "_like")

    def __init__(self, like: BatchMetadata) -> None:
        """Expect no more rows than `like` has with padding, and plans of about the same size."""
        padding = [0] * (like.n_rows - len(like.lengths))
        super().__init__(like.sequences, (*like.lengths, *padding))
        self.n_rows = like.n_rows
        self._like = like
        self._first = Late(self.n_rows)
        self._positions = -1, self._first.array
        self._late: dict[int, _LatePlan] = {}

    def plan(self, kind: int, step: int, at_once: int, most_rows: int = 1) -> StepPlan:
        """Return a plan for step 0 whose numbers `fill` writes."""
        known = self._late.get(kind)
        if known is None:
            like, rows = self._like.split(kind, 0, at_once, most_rows), self._like.rows(kind, 0)
            n_items = like.n_items + _SPARE_ITEMS
            n_results = self.n_rows * (1 + max(like.spans[1::2]))
            n_pages = 2 + max(row.position - row.first for row in rows) // BLOCK_TOKENS
            plan = Late(n_items * ITEM_INTS + self.n_rows * (n_pages + 1))
            spans = Late(2 * self.n_rows)
            pool = self.sequences[0].tables[kind].pool
            made = StepPlan(n_items, n_results, plan.array, spans.array, step + 1, pool.moves)
            known = _LatePlan(made, at_once, most_rows, plan, spans, pool.data)
            self._late[kind] = known
        return known.made

    def fill(self, real: BatchMetadata) -> bool:
        """Make the rows those of step 0 of `real`. Return False if the graph has no room, or is for
        more than twice the rows."""
        if not self.n_rows // 2 <= real.n_rows <= self.n_rows:
            return False
        plans: list[tuple[_LatePlan, SplitPlan]] = []
        for kind, one in self._late.items():
            n_items = one.made.n_items
            found = real.split(kind, 0, one.at_once, one.most_rows, n_items)
            pool = self.sequences[0].tables[kind].pool
            stays = pool.data is one.pages and pool.moves == one.made.moves
            small = found.n_items == n_items and len(found.numbers) <= one.plan.array.size
            if not (stays and small and found.n_results <= one.made.n_results):
                return False
            plans.append((one, found))
        for one, found in plans:
            one.plan.write(found.numbers)
            one.spans.write(found.spans)
        self._first.write([length - 1 for length in real.lengths])
        written = [array for one, _ in plans for array in (one.plan.array, one.spans.array)]
        async_eval(self._first.array, *written)
        return True


def _on_device(made: SplitPlan, step: int, moves: int) -> StepPlan:
    return StepPlan(
        made.n_items,
        made.n_results,
        on_device_async(made.numbers),
        on_device(made.spans),
        step + made.steps,
        moves,
    )


def rows_of(
    chunks: Iterable[tuple[PagedSequence, int, int]],
) -> tuple[list[PagedSequence], list[int]]:
    """Return the sequences and positions of the rows for sequences' next tokens. A chunk has a
    sequence, its length and the number of tokens."""
    sequences: list[PagedSequence] = []
    positions: list[int] = []
    for sequence, length, n_tokens in chunks:
        sequences += [sequence] * n_tokens
        positions += range(length, length + n_tokens)
    return sequences, positions


class MetadataCache:
    """Creates a batch's metadata once for all layers."""

    __slots__ = ("_last", "_subset", "size")

    def __init__(self, size: RowSize = exact) -> None:
        """`size` maps a number of rows to the padded number of rows."""
        self.size = size
        # Weak references, because sequences that have left a batch must not stay alive.
        self._last: weakref.ref[BatchMetadata] | None = None
        self._subset: tuple[weakref.ref[BatchMetadata], int, tuple[int, ...]] | None = None

    def get(self, sequences: Sequence[PagedSequence], lengths: Sequence[int]) -> BatchMetadata:
        """Return the metadata for these sequences. Reuses the last object if nothing changed."""
        last = None if self._last is None else self._last()
        if last is None or (last.sequences, last.lengths) != (tuple(sequences), tuple(lengths)):
            last = BatchMetadata(tuple(sequences), tuple(lengths), self.size)
            self._last, self._subset = weakref.ref(last), None
        return last

    def select(self, old: BatchMetadata, step: int, rows: Sequence[int]) -> BatchMetadata:
        """Return the metadata for some rows of `old`, `step` steps later."""
        rows, known = tuple(rows), self._subset
        if known is not None and known[1] == step and known[2] == rows and known[0]() is old:
            last = None if self._last is None else self._last()
            if last is not None:
                return last
        made = self.get([old.sequences[i] for i in rows], [old.lengths[i] + step for i in rows])
        self._subset = weakref.ref(old), step, rows
        return made
