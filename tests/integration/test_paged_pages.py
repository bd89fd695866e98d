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

from semantic.adapters.mlx.kv_cache.paged.kinds import PageKind
from semantic.adapters.mlx.kv_cache.paged.page_pool import Lease, Pages
from semantic.adapters.mlx.kv_cache.paged.page_table import Chain
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape

KIND = PageKind((0, 2), LayerShape(1, 2, 2, mx.float32))
RING = PageKind((1,), LayerShape(1, 2, 2, mx.float32), window=300, ring=2)


class Leases(RuleBasedStateMachine):
    """Takes, shares, drops and grows at random; each column holds a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(KIND)
        self.leases: list[Lease] = []
        self.written: dict[int, int] = {}
        self.number = 0

    def _write(self, lease: Lease) -> None:
        self.number += 1
        self.pages.data[lease.index] = float(self.number)
        self.written[lease.index] = self.number

    @rule()
    def take(self) -> None:
        lease = self.pages.take()
        assert lease.index not in {other.index for other in self.leases}
        assert not lease.is_shared
        self.leases.append(lease)
        self._write(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        # By number: what hypothesis draws it keeps.
        lease = self.leases[data.draw(st.integers(0, len(self.leases) - 1))]
        again = self.pages.share(lease)
        assert again.index == lease.index
        assert again.is_shared
        assert lease.is_shared
        self.leases.append(again)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), elsewhere=st.booleans())
    def drop(self, data: st.DataObject, elsewhere: bool) -> None:
        dropped = [self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))]
        if elsewhere:
            thread = threading.Thread(target=dropped.clear)
            thread.start()
            thread.join()
        dropped.clear()

    @rule(n=st.integers(0, 20))
    def grow(self, n: int) -> None:
        before = self.pages.n_columns
        self.pages.grow(n)
        assert self.pages.n_columns == max(before, n)

    @invariant()
    def accounts_agree(self) -> None:
        used = {lease.index for lease in self.leases}
        assert self.pages.n_used == len(used)
        assert self.pages.nbytes == self.pages.n_columns * KIND.column_bytes
        free = self.pages._free
        assert sorted([*free, *used]) == list(range(self.pages.n_columns))
        for lease in self.leases:
            users = sum(other.index == lease.index for other in self.leases)
            assert lease.is_shared == (users > 1)

    @invariant()
    def contents_stay(self) -> None:
        used = {lease.index for lease in self.leases}
        if used:
            found = cast("list[float]", mx.min(self.pages.data, axis=(1, 2, 3, 4, 5)).tolist())
            most = mx.max(self.pages.data, axis=(1, 2, 3, 4, 5)).tolist()
            assert found == most
            assert {at: found[at] for at in used} == {at: self.written[at] for at in used}

    def teardown(self) -> None:
        self.leases.clear()
        assert self.pages.n_used == 0


def test_leases_come_and_go_in_any_order() -> None:
    run_state_machine_as_test(Leases, settings=settings(max_examples=40, stateful_step_count=30))


def test_leases_dropped_by_many_threads_while_others_are_taken_are_all_free_again() -> None:
    pages = Pages(KIND)
    pages.grow(64)
    dropping: list[list[Lease]] = [[] for _ in range(4)]
    done = threading.Event()

    def drop(mine: list[Lease]) -> None:
        while not done.is_set() or mine:
            if mine:
                mine.pop()

    threads = [threading.Thread(target=drop, args=(mine,)) for mine in dropping]
    for thread in threads:
        thread.start()
    kept: list[Lease] = []
    for turn in range(4000):
        lease = pages.take()
        assert lease.index not in {other.index for other in kept}
        dropping[turn % 4].append(pages.share(lease))
        if turn % 3:
            dropping[(turn + 1) % 4].append(lease)
        else:
            kept.append(lease)
        if len(kept) > 20:
            dropping[turn % 4].append(kept.pop(0))
        del lease
    done.set()
    for thread in threads:
        thread.join()
    assert pages.n_used == len(kept)
    kept.clear()
    assert pages.n_used == 0
    assert sorted(pages._free) == list(range(pages.n_columns))


def test_the_lowest_columns_are_taken_first() -> None:
    pages = Pages(KIND)
    pages.grow(3)
    leases = [pages.take() for _ in range(3)]
    assert [lease.index for lease in leases] == [0, 1, 2]
    leases += [pages.take() for _ in range(2)]
    assert [lease.index for lease in leases] == [0, 1, 2, 3, 4]


def test_a_lease_knows_whose_it_is() -> None:
    pages, others = Pages(KIND), Pages(KIND)
    lease = pages.take()
    assert lease.of(pages)
    assert not lease.of(others)


@pytest.mark.parametrize(
    ("kind", "n_tokens", "n_columns"),
    [
        (KIND, 0, 0), (KIND, 1, 1), (KIND, 256, 1), (KIND, 257, 2), (KIND, 5000, 20),
        (RING, 0, 0), (RING, 256, 1), (RING, 257, 2), (RING, 513, 2), (RING, 5000, 2),
    ],
)  # fmt: skip
def test_a_chain_has_a_column_for_each_block_or_for_each_of_its_ring(
    kind: PageKind, n_tokens: int, n_columns: int
) -> None:
    pages = Pages(kind)
    chain = Chain(pages)
    chain.reserve(n_tokens)
    assert len(chain.leases) == chain.columns_for(n_tokens) == n_columns
    assert chain.has_room(n_tokens)
    if n_columns:
        assert chain.array().tolist() == chain.columns
        chain.reserve(n_tokens + 256)
        assert chain.array().tolist() == chain.columns
    chain.reserve(1)  # room is never given back
    assert len(chain.leases) >= n_columns
    del chain
    assert pages.n_used == 0


def test_abandoned_pages_hold_no_memory_and_bear_late_leases() -> None:
    pages = Pages(KIND)
    pages.grow(3)
    lease = pages.take()
    pages.abandon()
    assert pages.nbytes == 0
    del lease


def test_pages_that_come_when_needed_stop_at_what_was_set_aside() -> None:
    pages = Pages(KIND)
    pages.expect(11)
    sizes = []
    leases = []
    for _ in range(12):
        leases.append(pages.take())
        sizes.append(pages.n_columns)
    assert sizes == [4] * 4 + [8] * 4 + [11] * 3 + [22]
