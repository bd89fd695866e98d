"""Plans of attention over pages: each token that is attended to is read once, and where it is."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantic.adapters.mlx.kv_cache.paged.batch_metadata import (
    MOST_SPLITS,
    SHORTEST,
    RowPages,
    SplitPlan,
    chunk_for,
    cut_at_blocks,
    equal_runs,
    joined_runs,
    plan_split,
    split_for,
    splits_of,
)
from semantic.adapters.mlx.kv_cache.paged.kernel_source import ITEM_INTS
from semantic.domain.value_objects import BLOCK_TOKENS, LayerKind, LayerSpec
from tests.support.lanes import examples

WINDOWS = [1, 2, 16, 40, 127, 128, 129, 200, 255, 256, 257, 300, 512, 700, 1024, 4096]

positions = st.one_of(
    st.integers(0, 3000),
    st.sampled_from([0, 254, 255, 256, 257, 511, 512, 4095, 4096]),
    st.integers(0, 140_000),
)


@st.composite
def pages_of_rows(draw: st.DrawFn) -> list[RowPages]:
    """Sequences of one model: all with the same window, and each column another one's."""
    window = draw(st.none() | st.sampled_from(WINDOWS))
    numbers = list(range(3000))
    random.Random(draw(st.integers(0, 5))).shuffle(numbers)
    rows = []
    for position in draw(st.lists(positions, min_size=1, max_size=5)):
        ring = None
        if window is not None:
            ring = LayerSpec(LayerKind.SLIDING_WINDOW, window=window).max_blocks
        n_pages = position // BLOCK_TOKENS + 1 + draw(st.integers(0, 3))
        n_pages = n_pages if ring is None else min(n_pages, ring)
        columns, numbers = numbers[:n_pages], numbers[n_pages:]
        rows.append(RowPages(position, columns, window, ring))
    return rows


chunks = st.integers(1, 40).map(lambda n: n * SHORTEST)


def own_splits(rows: list[RowPages], least: int = 0) -> list[range]:
    return [splits_of(row, max(least, split_for(row))) for row in rows]


def pieces_read(plan: SplitPlan, item: list[int], row: RowPages, position: int) -> list[range]:
    """The positions that a kernel reads for an item; checks in which columns it looks for them."""
    _, start, stop, columns, *_ = item
    seen_from = 0 if row.window is None else max(0, position - row.window + 1)
    begin, end = max(start, seen_from), min(stop, position + 1)
    pieces = []
    for block in range(begin // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
        own = range(max(begin, block * BLOCK_TOKENS), min(end, (block + 1) * BLOCK_TOKENS))
        if own:
            found = plan.numbers[columns + block - start // BLOCK_TOKENS]
            where = block if row.ring is None else block % row.ring
            assert found == row.pages[where], (item, position, block)
            pieces.append(own)
    return pieces


def require_right(plan: SplitPlan, rows: list[RowPages], step: int) -> None:
    """What the plan reads at a step is what the rows' tokens attend to then."""
    items = [plan.numbers[i * ITEM_INTS : (i + 1) * ITEM_INTS] for i in range(plan.n_items)]
    for number, row in enumerate(rows):
        position = row.position + step
        first, n_splits = plan.spans[2 * number : 2 * number + 2]
        mine = [item for item in items if item[0] == number]
        assert 1 <= n_splits <= MOST_SPLITS
        split = split_for(replace(row, position=position))
        index = 0
        for item in mine:
            assert item[4:] == [first, n_splits, index, 1, split, len(mine), 0]
            assert item[1] % split == 0
            assert (item[2] - item[1]) % split == 0
            index += (item[2] - item[1]) // split
        assert index == n_splits
        pieces = [piece for item in mine for piece in pieces_read(plan, item, row, position)]
        seen_from = 0 if row.window is None else max(0, position - row.window + 1)
        assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
        assert (pieces[0].start, pieces[-1].stop) == (seen_from, position + 1)
        # Exactly one item puts the new token into its page.
        assert sum(item[1] <= position < item[2] for item in mine) == 1
    assert sum(plan.spans[1::2]) == plan.n_results


@given(rows=pages_of_rows(), chunk=chunks)
@settings(max_examples=examples(150, thorough=3000))
def test_every_token_attended_to_is_read_once_and_where_it_is(
    rows: list[RowPages], chunk: int
) -> None:
    plan = plan_split(rows, own_splits(rows), chunk)
    assert plan.steps >= 1
    for step in {0, 1, plan.steps // 2, plan.steps - 1}:
        if step < plan.steps:
            require_right(plan, rows, step)


@given(rows=pages_of_rows(), chunk=chunks)
def test_a_plan_is_good_as_long_as_there_is_room_and_its_items_reach(
    rows: list[RowPages], chunk: int
) -> None:
    plan = plan_split(rows, own_splits(rows), chunk)
    reasons = []
    for row in rows:
        split = split_for(row)
        reasons.append(row.position - row.position % split + split)
        if row.capacity is not None:
            reasons[-1] = min(reasons[-1], row.capacity)
        if row.window is not None:
            reasons[-1] = min(reasons[-1], row.first - row.first % split + split + row.window - 1)
        reasons[-1] -= row.position
    assert plan.steps == min(reasons)


@given(rows=pages_of_rows(), at_once=st.sampled_from([1, 2, 33, 99, 396, 3168]))
@settings(max_examples=examples(150, thorough=3000))
def test_a_chosen_chunk_makes_items_of_whole_splits(rows: list[RowPages], at_once: int) -> None:
    splits = own_splits(rows)
    chunk = chunk_for(splits, at_once)
    assert chunk >= SHORTEST
    assert chunk % SHORTEST == 0
    require_right(plan_split(rows, splits, chunk), rows, 0)


def test_a_lone_row_is_divided_as_finely_as_the_device_has_room() -> None:
    splits = own_splits([RowPages(8191, range(32))])
    assert chunk_for(splits, 396) == SHORTEST
    assert chunk_for(splits, 1) == 8192


@given(rows=pages_of_rows(), at_once=st.sampled_from([1, 33, 396]), back=st.integers(0, 600))
@settings(max_examples=examples(100, thorough=2000))
def test_a_row_has_the_same_splits_alone_among_others_and_in_a_plan_made_earlier(
    rows: list[RowPages], at_once: int, back: int
) -> None:
    """Its partial results, and so the bits of its attention, are its own."""

    def planned(rows: list[RowPages]) -> SplitPlan:
        splits = own_splits(rows)
        return plan_split(rows, splits, chunk_for(splits, at_once))

    def splits_in(plan: SplitPlan, number: int) -> list[int]:
        items = [plan.numbers[i * ITEM_INTS : (i + 1) * ITEM_INTS] for i in range(plan.n_items)]
        mine = [item for item in items if item[0] == number]
        return [at for _, start, stop, *_, split, _, _ in mine for at in range(start, stop, split)]

    together = planned(rows)
    earlier = [replace(row, position=max(0, row.position - back)) for row in rows]
    for number, (row, before) in enumerate(zip(rows, earlier, strict=True)):
        alone = splits_in(planned([row]), 0)
        assert splits_in(together, number) == alone
        past = planned([before])
        if row.position - before.position < past.steps:
            assert splits_in(past, 0) == alone


@given(first=st.integers(0, 2000), n=st.integers(0, 2000))
def test_cutting_at_blocks_loses_nothing(first: int, n: int) -> None:
    pieces = cut_at_blocks(first, first + n)
    assert list(itertools.chain(*pieces)) == list(range(first, first + n))
    for piece in pieces:
        assert len({at // BLOCK_TOKENS for at in piece}) == 1
    assert len(pieces) == len({at // BLOCK_TOKENS for at in range(first, first + n)})


@pytest.mark.parametrize("window", WINDOWS)
def test_in_a_ring_no_token_lies_where_another_is_attended_to(window: int) -> None:
    ring = LayerSpec(LayerKind.SLIDING_WINDOW, window=window).max_blocks
    assert ring is not None
    for position in (*range(0, 5000, 97), *range(ring * 256 - 2, ring * 256 + 3)):
        row = RowPages(position, range(min(ring, position // BLOCK_TOKENS + 1)), window, ring)
        places = {
            (row.page(at // BLOCK_TOKENS), at % BLOCK_TOKENS)
            for at in range(row.first, position + 1)
        }
        assert len(places) == position + 1 - row.first


@given(
    rows=pages_of_rows(), extra=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    most=st.sampled_from([1, 3, 4, 16]),
)  # fmt: skip
@settings(max_examples=examples(60, thorough=1000))
def test_rows_that_are_computed_together_have_the_splits_that_they_have_alone(
    rows: list[RowPages], extra: list[int], most: int
) -> None:
    all_rows = [
        replace(row, position=row.position - back)
        for row, n in zip(rows, itertools.cycle(extra), strict=False)
        for back in range(min(n, row.position), -1, -1)
    ]
    splits = own_splits(all_rows)
    firsts, runs = equal_runs(all_rows, most, splits)
    assert [*itertools.accumulate(run.n_rows for run in runs)] == [*firsts[1:], len(all_rows)]
    for first, (n_rows, n_before) in zip(firsts, runs, strict=True):
        assert n_rows <= most
        before = all_rows[first - n_before : first + n_rows]
        assert all(one.pages is before[0].pages for one in before)
        assert [one.position for one in before] == list(
            range(before[0].position, before[0].position + len(before))
        )
        is_first = first == n_before or all_rows[first - n_before - 1].pages is not before[0].pages
        assert is_first, "all rows of the sequence that the step adds are known"
        assert all(one == splits[first] for one in splits[first : first + n_rows])
    plan = plan_split([all_rows[i] for i in firsts], [splits[i] for i in firsts], SHORTEST, runs)
    counts = [len(one) for one in splits]
    starts = [0, *itertools.accumulate(counts)][:-1]
    assert plan.spans == [x for pair in zip(starts, counts, strict=True) for x in pair]


@given(
    rows=pages_of_rows(), extra=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    most=st.sampled_from([1, 3, 16, 32]), chunk=chunks,
)  # fmt: skip
@settings(max_examples=examples(60, thorough=1000))
def test_runs_of_rows_read_what_each_of_their_rows_attends_to(
    rows: list[RowPages], extra: list[int], most: int, chunk: int
) -> None:
    all_rows = [
        replace(row, position=row.position - back)
        for row, n in zip(rows, itertools.cycle(extra), strict=False)
        for back in range(min(n, row.position), -1, -1)
    ]
    joined, runs = joined_runs(all_rows, most)
    assert sum(run.n_rows for run in runs) == len(all_rows)
    assert max(run.n_rows for run in runs) <= most
    plan = plan_split(joined, own_splits(joined, chunk), chunk, runs)
    assert plan.n_results == sum(plan.spans[1::2])
    items = [plan.numbers[i * ITEM_INTS : (i + 1) * ITEM_INTS] for i in range(plan.n_items)]
    results: set[int] = set()
    for item in items:
        number, _, _, _, first, n_items, index, n_rows, _, _, _ = item
        mine = all_rows[number : number + n_rows]
        assert all(one.pages is mine[0].pages for one in mine)
        assert [one.position - mine[0].position for one in mine] == list(range(n_rows))
        for at in range(n_rows):
            assert plan.spans[2 * (number + at) : 2 * (number + at) + 2] == [
                first + at * n_items, n_items,
            ]  # fmt: skip
            results.add(first + at * n_items + index)
    assert results == set(range(plan.n_results))
    number = 0
    for run, (n_rows, _) in zip(joined, runs, strict=True):
        own = [item for item in items if item[0] == number]
        pieces = [one for item in own for one in pieces_read(plan, item, run, run.position)]
        assert pieces[0].start == all_rows[number].first
        assert pieces[-1].stop == run.position + 1
        assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
        number += n_rows
