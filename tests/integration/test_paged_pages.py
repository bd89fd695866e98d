"""Columns and who uses them: nothing is given twice, nothing is lost, growing keeps all."""

from __future__ import annotations

import threading
from typing import cast

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from semantic.adapters.mlx.kv_cache.paged import page_pool
from semantic.adapters.mlx.kv_cache.paged.page_pool import PageKind, PagePool, PageRef, PageTable
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from tests.support.lanes import examples

KIND = PageKind((0, 2), LayerShape(1, 2, 2, mx.float32))
RING = PageKind((1,), LayerShape(1, 2, 2, mx.float32), window=300, ring=2)


class Leases(RuleBasedStateMachine):
    """Takes, shares, drops and grows at random; each column holds a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PagePool(KIND)
        self.refs: list[PageRef] = []
        self.written: dict[int, int] = {}
        self.number = 0

    def _write(self, ref: PageRef) -> None:
        self.number += 1
        self.pages.data[ref.index] = float(self.number)
        self.written[ref.index] = self.number

    @rule()
    def take(self) -> None:
        ref = self.pages.take()
        assert ref.index not in {other.index for other in self.refs}
        assert not ref.is_shared
        self.refs.append(ref)
        self._write(ref)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        # By number: what hypothesis draws it keeps.
        ref = self.refs[data.draw(st.integers(0, len(self.refs) - 1))]
        again = self.pages.share(ref)
        assert again.index == ref.index
        assert again.is_shared
        assert ref.is_shared
        self.refs.append(again)

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), elsewhere=st.booleans())
    def drop(self, data: st.DataObject, elsewhere: bool) -> None:
        dropped = [self.refs.pop(data.draw(st.integers(0, len(self.refs) - 1)))]
        if elsewhere:
            thread = threading.Thread(target=dropped.clear)
            thread.start()
            thread.join()
        dropped.clear()

    @rule(n=st.integers(0, 20))
    def grow(self, n: int) -> None:
        before = self.pages.n_pages
        self.pages.grow(n)
        assert self.pages.n_pages == max(before, n)

    @rule(room=st.integers(0, 20))
    def shrink(self, room: int) -> None:
        used = {ref.index: ref for ref in self.refs}
        free, number = self.pages.n_pages - len(used), {at: self.written[at] for at in used}
        returned = self.pages.shrink(room * KIND.page_bytes)
        assert returned == (free * KIND.page_bytes if len(used) <= room else 0)
        if returned:
            assert self.pages.n_pages == len(used)
            self.written = {ref.index: number[at] for at, ref in used.items()}

    @invariant()
    def accounts_agree(self) -> None:
        used = {ref.index for ref in self.refs}
        assert self.pages.n_used == len(used)
        assert self.pages.nbytes == self.pages.n_pages * KIND.page_bytes
        free = self.pages._free
        assert sorted([*free, *used]) == list(range(self.pages.n_pages))
        for ref in self.refs:
            users = sum(other.index == ref.index for other in self.refs)
            assert ref.is_shared == (users > 1)

    @invariant()
    def contents_stay(self) -> None:
        used = {ref.index for ref in self.refs}
        if used:
            found = cast("list[float]", mx.min(self.pages.data, axis=(1, 2)).tolist())
            most = mx.max(self.pages.data, axis=(1, 2)).tolist()
            assert found == most
            assert {at: found[at] for at in used} == {at: self.written[at] for at in used}

    def teardown(self) -> None:
        self.refs.clear()
        assert self.pages.n_used == 0


@pytest.mark.process
def test_leases_come_and_go_in_any_order() -> None:
    run_state_machine_as_test(
        Leases, settings=settings(max_examples=examples(20, thorough=200), stateful_step_count=30)
    )


def test_pages_that_are_lent_do_not_move() -> None:
    pages = PagePool(KIND)
    first, second = pages.take(), pages.take()
    loan = pages.lend(second)
    del first
    assert not pages.shrink(1 << 20)
    loan.end()
    assert pages.shrink(1 << 20)
    assert second.index == 0


@pytest.mark.process
def test_leases_dropped_by_many_threads_while_others_are_taken_are_all_free_again() -> None:
    pages = PagePool(KIND)
    pages.grow(64)
    dropping: list[list[PageRef]] = [[] for _ in range(4)]
    done = threading.Event()

    def drop(mine: list[PageRef]) -> None:
        while not done.is_set() or mine:
            if mine:
                mine.pop()

    threads = [threading.Thread(target=drop, args=(mine,)) for mine in dropping]
    for thread in threads:
        thread.start()
    kept: list[PageRef] = []
    for turn in range(4000):
        ref = pages.take()
        assert ref.index not in {other.index for other in kept}
        dropping[turn % 4].append(pages.share(ref))
        if turn % 3:
            dropping[(turn + 1) % 4].append(ref)
        else:
            kept.append(ref)
        if len(kept) > 20:
            dropping[turn % 4].append(kept.pop(0))
        del ref
    done.set()
    for thread in threads:
        thread.join()
    assert pages.n_used == len(kept)
    kept.clear()
    assert pages.n_used == 0
    assert sorted(pages._free) == list(range(pages.n_pages))


def test_the_lowest_columns_are_taken_first() -> None:
    pages = PagePool(KIND)
    pages.grow(3)
    refs = [pages.take() for _ in range(3)]
    assert [ref.index for ref in refs] == [0, 1, 2]
    refs += [pages.take() for _ in range(2)]
    assert [ref.index for ref in refs] == [0, 1, 2, 3, 4]


def test_a_lease_knows_whose_it_is() -> None:
    pages, others = PagePool(KIND), PagePool(KIND)
    ref = pages.take()
    assert ref.of(pages)
    assert not ref.of(others)


@pytest.mark.parametrize(
    ("kind", "n_tokens", "n_pages"),
    [
        (KIND, 0, 0), (KIND, 1, 1), (KIND, 256, 1), (KIND, 257, 2), (KIND, 5000, 20),
        (RING, 0, 0), (RING, 256, 1), (RING, 257, 2), (RING, 513, 2), (RING, 5000, 2),
    ],
)  # fmt: skip
def test_a_chain_has_a_column_for_each_block_or_for_each_of_its_ring(
    kind: PageKind, n_tokens: int, n_pages: int
) -> None:
    pages = PagePool(kind)
    table = PageTable(pages)
    table.reserve(n_tokens)
    assert len(table.refs) == table.pages_for(n_tokens) == n_pages
    assert table.has_capacity(n_tokens)
    if n_pages:
        assert table.array().tolist() == table.pages
        table.reserve(n_tokens + 256)
        assert table.array().tolist() == table.pages
    table.reserve(1)  # room is never given back
    assert len(table.refs) >= n_pages
    del table
    assert pages.n_used == 0


def test_abandoned_pages_hold_no_memory_and_bear_late_leases() -> None:
    pages = PagePool(KIND)
    pages.grow(3)
    ref = pages.take()
    pages.abandon()
    assert pages.nbytes == 0
    del ref


def test_pages_that_come_when_needed_stop_at_what_was_set_aside() -> None:
    pages = PagePool(KIND)
    pages.expect(11)
    sizes = []
    refs = []
    for _ in range(12):
        refs.append(pages.take())
        sizes.append(pages.n_pages)
    assert sizes == [4] * 4 + [8] * 4 + [11] * 3 + [15]
    pages.expect(64)
    refs += [pages.take() for _ in range(53)]
    assert pages.n_pages == 72


def test_pages_grow_little_while_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = PagePool(KIND)
    pages.expect(64)
    monkeypatch.setattr(page_pool, "memory_to_spare", lambda: 30 * KIND.page_bytes)
    monkeypatch.setattr(page_pool, "memory_kept", lambda: 2 * KIND.page_bytes)
    refs: list[PageRef] = []
    sizes = [0]
    while len(refs) < 40:
        refs.append(pages.take())
        sizes += [pages.n_pages] if pages.n_pages != sizes[-1] else []
    assert sizes == [0, 4, 8, 16, 32, 36, 40]
