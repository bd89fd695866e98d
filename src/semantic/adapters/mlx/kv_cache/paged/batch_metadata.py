"""Batch metadata for the kernels: the sequences of a batch, their positions and page tables.

All layers of a batch share it: positions are made once per step, plans once in many steps. Knows
sequences and their page tables; nothing of attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from semantic.adapters.mlx.arrays import on_device, on_device_async
from semantic.adapters.mlx.kv_cache.paged.page_table import PagedSequence, PageTable
from semantic.adapters.mlx.kv_cache.paged.split_kv import (
    RowPages,
    chunk_for,
    joined_runs,
    plan_split,
)
from semantic.domain.value_objects import BLOCK_TOKENS

RowSize = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What each thread group reads, for steps before `until`, unless the pages of its pool have
    moved more than `moves` times; see `split_kv.SplitPlan`."""

    n_items: int
    n_results: int
    plan: mx.array
    spans: mx.array
    until: int
    moves: int


_NO_SIZES_BETWEEN = 16


def exact(n_rows: int) -> int:
    """Batches without padding rows."""
    return n_rows


def row_size(n_rows: int) -> int:
    """The rows that a batch of `n_rows` is padded to: a power of two, or above 16 also 1.5 of one.

    Few sizes, so that the shapes of a step recur while sequences join and leave: on CUDA a new one
    costs as much as ten steps.
    """
    size = 1 << max(0, n_rows - 1).bit_length()
    between = 3 * size // 4
    return between if _NO_SIZES_BETWEEN < n_rows <= between else size


class BatchMetadata:
    """Sequences of `lengths` tokens each before step 0.

    A batch has `n_rows` rows; those after the sequences' are padding, which no page is read or
    written for.
    """

    __slots__ = (
        "__weakref__", "_plans", "_positions", "_row_plans", "_targets", "lengths", "n_rows",
        "sequences",
    )  # fmt: skip

    def __init__(
        self,
        sequences: tuple[PagedSequence, ...],
        lengths: tuple[int, ...],
        size: RowSize = exact,
    ) -> None:
        self.sequences = sequences
        self.lengths = lengths
        self.n_rows = size(len(sequences))
        self._positions: tuple[int, mx.array] | None = None
        self._plans: dict[int, StepPlan] = {}
        self._row_plans: dict[int, StepPlan] = {}
        self._targets: dict[int, tuple[mx.array, int]] = {}

    def positions(self, step: int) -> mx.array:
        """Position of each sequence's token of `step`, (n_rows,) int32."""
        known = self._positions
        if known is None or not 0 <= step - known[0] <= 1:
            padding = [0] * (self.n_rows - len(self.lengths))
            before = [*(length + step - 1 for length in self.lengths), *padding]
            known = step - 1, on_device_async(before)
        if step > known[0]:
            known = step, known[1] + 1  # also in the first step, so that all use one CUDA graph
        self._positions = known
        return known[1]

    def plan(self, kind: int, step: int, at_once: int) -> StepPlan:
        """The plan of a step for the layers of a kind; allocates pages for the step's tokens."""
        known = self._plans.get(kind)
        if known is None or step >= known.until or known.moves != self._moves(kind):
            rows = self.rows(kind, step)
            moves = self._moves(kind)
            known = self._plans[kind] = _planned(rows, [1] * len(rows), at_once, step, moves)
        return known

    def row_plan(self, kind: int, most_rows: int, at_once: int) -> StepPlan:
        """The plan of step 0 in which up to `most_rows` rows of a sequence read together."""
        known = self._row_plans.get(kind)
        if known is None or known.moves != self._moves(kind):
            rows, runs = joined_runs(self.rows(kind, 0), most_rows)
            known = self._row_plans[kind] = _planned(rows, runs, at_once, 0, self._moves(kind))
        return known

    def targets(self, kind: int) -> mx.array:
        """The page to which each row's token of step 0 is written, (rows,) int32."""
        known = self._targets.get(kind)
        if known is None or known[1] != self._moves(kind):
            pages = [row.page(row.position // BLOCK_TOKENS) for row in self.rows(kind, 0)]
            known = self._targets[kind] = on_device_async(pages), self._moves(kind)
        return known[0]

    def _moves(self, kind: int) -> int:
        """How often the pages of a kind have moved."""
        return self.sequences[0].tables[kind].pool.moves

    def rows(self, kind: int, step: int) -> list[RowPages]:
        """The page table of each sequence, with a page for the token of `step`."""
        rows: list[RowPages] = []
        known: tuple[PageTable, list[int]] | None = None
        for sequence, length in zip(self.sequences, self.lengths, strict=True):
            table = sequence.tables[kind]
            if not table.has_capacity(length + step + 1):
                table.reserve(length + step + 1)
                known = None
            if known is None or known[0] is not table:
                known = table, table.pages  # of all rows of a sequence
            one = table.pool.kind
            rows.append(RowPages(length + step, known[1], one.window, one.ring))
        return rows


def _planned(
    rows: Sequence[RowPages], runs: Sequence[int], at_once: int, step: int, moves: int
) -> StepPlan:
    made = plan_split(rows, chunk_for(rows, at_once), runs)
    return StepPlan(
        made.n_items,
        made.n_results,
        on_device_async(made.numbers),
        on_device(made.spans),
        step + made.steps,
        moves,
    )


class MetadataCache:
    """Gives every layer of a batch the same metadata: the first call makes it."""

    __slots__ = ("_last", "_size", "_subset")

    def __init__(self, size: RowSize = exact) -> None:
        """`size` gives the rows that a batch of so many sequences is padded to."""
        self._size = size
        # Weak references: sequences that left a batch must not be known alive.
        self._last: weakref.ref[BatchMetadata] | None = None
        self._subset: tuple[weakref.ref[BatchMetadata], int, tuple[int, ...]] | None = None

    def get(self, sequences: Sequence[PagedSequence], lengths: Sequence[int]) -> BatchMetadata:
        """The metadata of these sequences: the last one returned if it is equal."""
        last = None if self._last is None else self._last()
        if last is None or (last.sequences, last.lengths) != (tuple(sequences), tuple(lengths)):
            last = BatchMetadata(tuple(sequences), tuple(lengths), self._size)
            self._last, self._subset = weakref.ref(last), None
        return last

    def select(self, old: BatchMetadata, step: int, rows: Sequence[int]) -> BatchMetadata:
        """The metadata of some rows of `old`, `step` steps later."""
        rows, known = tuple(rows), self._subset
        if known is not None and known[1] == step and known[2] == rows and known[0]() is old:
            last = None if self._last is None else self._last()
            if last is not None:
                return last
        made = self.get([old.sequences[i] for i in rows], [old.lengths[i] + step for i in rows])
        self._subset = weakref.ref(old), step, rows
        return made
