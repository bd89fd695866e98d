"""The sequences of a batch in their order, and what a step's kernels must be told of them.

All layers of a batch share it: positions are made once per step, plans once in many. Knows
sequences and their columns; nothing of attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from semantic.adapters.mlx.arrays import on_device, on_device_async
from semantic.adapters.mlx.kv_cache.paged.page_table import PagedSequence
from semantic.adapters.mlx.kv_cache.paged.split_kv import RowPages, chunk_for, make_plan


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which thread group reads what, for steps before `until`; see `plan.Plan`."""

    n_items: int
    plan: mx.array
    spans: mx.array
    until: int


class Lineup:
    """Sequences with `lengths` tokens each when step 0 begins."""

    __slots__ = ("__weakref__", "_plans", "_positions", "lengths", "sequences")

    def __init__(self, sequences: tuple[PagedSequence, ...], lengths: tuple[int, ...]) -> None:
        self.sequences = sequences
        self.lengths = lengths
        self._positions: tuple[int, mx.array] | None = None
        self._plans: dict[int, StepPlan] = {}

    def positions(self, step: int) -> mx.array:
        """Position of each sequence's token of `step`, (rows,) int32."""
        known = self._positions
        if known is None or not 0 <= step - known[0] <= 1:
            known = step - 1, on_device_async([length + step - 1 for length in self.lengths])
        if step > known[0]:
            known = step, known[1] + 1  # the first step as well: all are the same CUDA graph
        self._positions = known
        return known[1]

    def plan(self, kind: int, step: int, at_once: int) -> StepPlan:
        """What a step's attention reads in the layers of a kind; makes room for its tokens."""
        known = self._plans.get(kind)
        if known is None or step >= known.until:
            rows = self.rows(kind, step)
            made = make_plan(rows, chunk_for(rows, at_once))
            known = self._plans[kind] = StepPlan(
                made.n_items,
                on_device_async(made.numbers),
                on_device(made.spans),
                step + made.steps,
            )
        return known

    def rows(self, kind: int, step: int) -> list[RowPages]:
        """The columns of each sequence, with room for the token of `step`."""
        rows: list[RowPages] = []
        for sequence, length in zip(self.sequences, self.lengths, strict=True):
            chain = sequence.chains[kind]
            chain.reserve(length + step + 1)
            one = chain.pages.kind
            rows.append(RowPages(length + step, chain.columns, one.window, one.ring))
        return rows


class Lineups:
    """Gives each layer of a batch the same lineup: the first asks for it, the others find it."""

    __slots__ = ("_kept", "_last")

    def __init__(self) -> None:
        # Weakly: who has left a batch must not be kept in memory by it.
        self._last: weakref.ref[Lineup] | None = None
        self._kept: tuple[weakref.ref[Lineup], int, tuple[int, ...]] | None = None

    def get(self, sequences: Sequence[PagedSequence], lengths: Sequence[int]) -> Lineup:
        """The lineup of these sequences; the one asked for last if it is the same."""
        last = None if self._last is None else self._last()
        if last is None or (last.sequences, last.lengths) != (tuple(sequences), tuple(lengths)):
            last = Lineup(tuple(sequences), tuple(lengths))
            self._last, self._kept = weakref.ref(last), None
        return last

    def keep(self, old: Lineup, step: int, rows: Sequence[int]) -> Lineup:
        """The lineup of some rows of another after so many steps."""
        rows, kept = tuple(rows), self._kept
        if kept is not None and kept[1] == step and kept[2] == rows and kept[0]() is old:
            last = None if self._last is None else self._last()
            if last is not None:
                return last
        made = self.get([old.sequences[i] for i in rows], [old.lengths[i] + step for i in rows])
        self._kept = weakref.ref(old), step, rows
        return made
