"""The budget holds after every call, for all that lies in the folder; and what goes for it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.disk import DiskStore
from semantic.domain.block_hash import Part
from semantic.domain.stored import StoredBlock
from tests.support import store_blocks as make
from tests.support.lanes import examples
from tests.support.store_blocks import saved_agents
from tests.unit.adapters.disk.support import (
    FAST_FOLDER,
    bad_files,
    count,
    disk_usage,
    is_read,
    opened,
    path_of,
    put_all,
)

SMALL = 1_760_000
"""Room for some thirty blocks beside what the folder itself takes."""


def held(store: DiskStore, seed: int, n_tokens: int = 1024) -> list[bool]:
    links = make.chain(n_tokens, seed)
    found = store.find(make.keys(links))
    return [link.key(Part.FULL) in found for link in links]


def fill_up(store: DiskStore, first_seed: int = 100) -> int:
    """Put chains of four until something must have gone; how many."""
    for n in range(60):
        for link in make.chain(1024, first_seed + n):
            store.put(make.block(link))
            if count(store, "evicted") + count(store, "dropped"):
                return n + 1
    raise AssertionError("the budget was never reached")


def test_the_chain_used_longest_ago_goes_its_tail_first(root: Path) -> None:
    with opened(root, SMALL) as store:
        for seed in (1, 2):
            put_all(store, make.chain(1024, seed))
        store.touch(make.keys(make.chain(1024, 1)))
        fill_up(store)
        assert held(store, 1) == [True] * 4
        partly = held(store, 2)
        assert partly == sorted(partly, reverse=True)
        assert not partly[-1]


def test_a_block_never_displaces_those_before_it(root: Path) -> None:
    with opened(root, SMALL) as store:
        links = make.chain(256 * 100)
        kept = [store.put(make.block(link)) for link in links]
        first_dropped = kept.index(False)
        assert first_dropped > 5
        assert count(store, "evicted") == 0
        assert all(is_read(store, link) for link in links[:first_dropped])


def test_a_pinned_agents_blocks_stay(root: Path) -> None:
    with opened(root, SMALL) as store:
        put_all(store, make.chain(1000, 1))
        put_all(store, make.chain(1000, 1)[-1:], Part.CHECKPOINT)
        assert store.save(make.manifest("pinned", 1000, 1, pinned=True))
        pinned = store.stats()[0].pinned_bytes
        assert pinned > 5 * 4096
        for first in (100, 200, 300):
            fill_up(store, first)
        assert held(store, 1, 1000) == [True] * 4
        assert store.find(make.keys(make.chain(1000, 1)[-1:], Part.CHECKPOINT))
        assert store.stats()[0].pinned_bytes == pinned
        store.save(make.manifest("pinned", 1000, 1))
        assert store.stats()[0].pinned_bytes == 0


def test_what_does_not_fit_beside_pins_is_dropped_and_evicts_nothing(root: Path) -> None:
    with opened(root, SMALL) as store:
        n = 0
        for n in range(60):
            if not all(store.put(make.block(link)) for link in make.chain(256 * 3, n)):
                break
            assert store.save(make.manifest(f"agent {n}", 256 * 3, n, pinned=True))
            if count(store, "evicted") + count(store, "dropped"):
                break
        before = store.stats()[0]
        (link,) = make.chain(256, 999)
        results = [store.put(make.block(link)) for _ in range(3)]
        assert not any(results[1:]) or results[0]
        big = StoredBlock(make.header(link, Part.CHECKPOINT), bytes(SMALL))
        assert not store.put(big)
        assert count(store, "dropped") >= 1
        assert store.stats()[0].pinned_bytes == before.pinned_bytes
        for seed in range(n):
            assert held(store, seed, 256 * 3) == [True] * 3


def test_a_manifest_goes_only_when_nothing_else_is_left(root: Path) -> None:
    with opened(root, SMALL) as store:
        for n in range(3):
            assert store.save(make.manifest(f"agent {n}", 20_000, n))
        fill_up(store)
        assert len(saved_agents(store)) == 3
        assert count(store, "evicted manifests") == 0
        for n in range(3, 12):
            store.save(make.manifest(f"agent {n}", 20_000, n))
        assert count(store, "evicted manifests") > 0
        assert store.stats()[0].n_blocks == 0
        names = [one.agent_id for one in saved_agents(store)]
        assert "agent 11" in names
        assert "agent 0" not in names
        assert disk_usage(root) <= SMALL


@pytest.mark.process
def test_an_agent_longer_than_the_budget_is_saved(root: Path) -> None:
    """Blocks beyond the budget are no failed writes, after which the queue would pause."""
    with opened(root, SMALL) as disk:
        store = BackgroundStore(disk, 64 << 20)
        agent = make.manifest("long", 256 * 60)
        for link in agent.scope.chain(agent.token_ids):
            assert store.put(make.block(link))
        assert store.agents.save(agent)
        store.flush()
        assert [one.agent_id for one in saved_agents(disk)] == ["long"]
        counts = store.stats()[0].counts
        assert (counts["dropped"], counts.get("back-offs", 0)) == (0, 0)
        assert count(disk, "dropped") > 3
        store.close()


def test_damaged_files_count_and_go_first(root: Path) -> None:
    with opened(root, SMALL) as store:
        links = make.chain(256 * 3, 1)
        put_all(store, links)
        for link in links:
            path_of(root, link.key(Part.FULL)).write_bytes(b"junk" * 1000)
            assert not is_read(store, link)
        assert len(bad_files(root)) == 3
        fill_up(store)
        assert bad_files(root) == []


def test_a_budget_too_small_for_anything_keeps_nothing(root: Path) -> None:
    with opened(root, 1) as store:
        assert not store.put(make.block(make.chain(9)[0]))
        assert not store.save(make.manifest("a", 9))
        assert saved_agents(store) == []
        counts = store.stats()[0].counts
        assert (counts["dropped"], counts["dropped manifests"]) == (1, 1)


@pytest.mark.parametrize("part", list(Part))
def test_other_parts_of_a_block_go_before_the_block(root: Path, part: Part) -> None:
    with opened(root, SMALL) as store:
        links = make.chain(512, 1)
        put_all(store, links)
        if part is not Part.FULL:
            put_all(store, links, part)
        store.touch(make.keys(links))
        fill_up(store)
        found = store.find([link.key(one) for link in links for one in Part])
        for link in links:
            others = [one for one in Part if link.key(one) in found]
            assert not others or Part.FULL in others


agents = st.sampled_from(["a", "b", "c", "d"])
seeds = st.integers(0, 5)


class BudgetMachine(RuleBasedStateMachine):
    """Two stores on one folder do anything; the folder never takes more than it may."""

    @initialize(max_bytes=st.integers(1_360_000, 2_260_000))
    def make_folder(self, max_bytes: int) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=FAST_FOLDER)
        self.root = Path(self.folder.name) / "store"
        self.max_bytes = max_bytes
        self.stores = [DiskStore.open(self.root, max_bytes, durable=False) for _ in range(2)]

    @rule(which=st.integers(0, 1), seed=seeds, n=st.integers(1, 3000), part=st.sampled_from(Part))
    def put(self, which: int, seed: int, n: int, part: Part) -> None:
        for link in make.chain(n, seed):
            kept = self.stores[which].put(make.block(link, part))
            assert not kept or self.stores[which].read(make.header(link, part)) is not None

    @rule(which=st.integers(0, 1), agent=agents, seed=seeds, n=st.integers(0, 30_000),
          pinned=st.booleans())  # fmt: skip
    def save(self, which: int, agent: str, seed: int, n: int, pinned: bool) -> None:
        if self.stores[which].save(make.manifest(agent, n, seed, pinned=pinned)):
            found = self.stores[1 - which].manifest(make.SCOPE, agent)
            assert found is not None
            assert found.token_ids == make.text(n, seed)

    @rule(which=st.integers(0, 1), seed=seeds)
    def touch(self, which: int, seed: int) -> None:
        self.stores[which].touch(make.keys(make.chain(2000, seed)))

    @rule(which=st.integers(0, 1), agent=agents)
    def remove(self, which: int, agent: str) -> None:
        known = self.stores[which].manifest(make.SCOPE, agent) is not None
        assert self.stores[which].remove(make.SCOPE, agent) == known

    @rule(which=st.integers(0, 1), seed=seeds)
    def damage(self, which: int, seed: int) -> None:
        (link,) = make.chain(256, seed)
        path = path_of(self.root, link.key(Part.FULL))
        if path.exists():
            path.write_bytes(path.read_bytes()[:-1])
            assert self.stores[which].read(make.header(link)) is None

    @rule(which=st.integers(0, 1), dry_run=st.booleans())
    def gc(self, which: int, dry_run: bool) -> None:
        self.stores[which].gc(dry_run=dry_run)

    @rule(which=st.integers(0, 1), rebuild=st.booleans())
    def reopen(self, which: int, rebuild: bool) -> None:
        if rebuild:
            self.stores[which].rebuild_index()
        before = self.stores[which].stats()[0].n_blocks
        self.stores[which].close()
        self.stores[which] = DiskStore.open(self.root, self.max_bytes, durable=False)
        assert self.stores[which].stats()[0].n_blocks == before

    @invariant()
    def the_budget_holds(self) -> None:
        if hasattr(self, "root"):
            used = disk_usage(self.root)
            stats = self.stores[0].stats()[0]
            assert used <= stats.n_bytes
            assert used <= self.max_bytes
            assert stats.n_bytes <= self.max_bytes or stats.n_blocks == 0

    @invariant()
    def the_sum_is_right(self) -> None:
        if hasattr(self, "root"):
            with self.stores[0]._store.index.writing() as db:
                (kept,) = db.execute("SELECT value FROM numbers WHERE name = 'bytes'").fetchone()
                tables = ("blocks", "manifests", "reservations", "others")
                sums = [
                    db.execute(f"SELECT coalesce(sum(cost), 0) FROM {table}").fetchone()[0]
                    for table in tables
                ]
                assert kept == sum(sums)
                (sessions,) = db.execute("SELECT count(*) FROM reservations").fetchone()
                assert sessions <= 2

    def teardown(self) -> None:
        if hasattr(self, "root"):
            for store in self.stores:
                store.close()
            self.folder.cleanup()


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(
    max_examples=examples(15, thorough=150), stateful_step_count=25, deadline=None
)
