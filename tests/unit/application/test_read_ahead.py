"""What is read before it is needed: when, for whom, how much, and that it changes no answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from semantic.adapters.stores.memory import MemoryStore
from semantic.adapters.stores.tiered import TieredStore
from semantic.application.cache.prefix_lookup import StoredPrefix
from semantic.application.cache.read_ahead import LEAD, ReadAhead
from semantic.application.engine.submission import Submission
from semantic.domain.identity import Hints
from semantic.domain.stored import BlockHeader, Found, Tier
from semantic.domain.value_objects import CacheKey, ModelCacheSpec
from tests.support.fake_backend import FULL
from tests.support.fake_clock import FakeClock
from tests.support.http_server import until
from tests.support.store_blocks import chain, header, scope_of
from tests.unit.adapters.test_tiered_store import OnDisk
from tests.unit.application.world import World, expected, text_of

BODY = 100
ANN, BEN, CY = (CacheKey("m", agent) for agent in ("ann", "ben", "cy"))


def prefix(agent: str, n_blocks: int = 3) -> StoredPrefix:
    """Blocks that are on disk."""
    full = [header(link) for link in chain(256 * n_blocks, scope=scope_of(agent))]
    found = {one.key: Found(BODY, Tier.DISK) for one in full}
    return StoredPrefix(256 * n_blocks, full=tuple(full), found=found)


@dataclass
class Disk:
    """`Prefixes` of agents with three blocks each."""

    ahead_bytes: int = 10 * BODY
    loads: int = 0
    """How often a load is in progress when asked."""
    read: list[BlockHeader] = field(default_factory=list)
    full_after: int = 1000

    def stored_prefix(self, agent_id: str, tenant: str) -> StoredPrefix | None:  # noqa: ARG002
        return None if agent_id == "new" else prefix(agent_id)

    def prefetch(self, header: BlockHeader) -> bool:
        self.read.append(header)
        return len(self.read) <= self.full_after

    def wait_until_loaded(self, seconds: float) -> bool:
        assert seconds > 0
        self.loads -= 1
        return self.loads < 0


class Reader:
    """A `ReadAhead` whose reads are the test's."""

    def __init__(self, disk: Disk | None = None, *in_pool: CacheKey) -> None:
        self.disk = disk or Disk()
        self.clock = FakeClock()
        self.in_pool = set(in_pool)
        self.ahead = ReadAhead(self.disk, lambda key: key in self.in_pool, self.clock)
        self.ahead._thread = threading.current_thread()  # none is started

    def read_after(self, seconds: float) -> int:
        """How many bodies are read until then."""
        before = len(self.disk.read)
        self.clock.advance(seconds)
        self.ahead.read_due()
        return len(self.disk.read) - before


def test_an_agent_is_read_shortly_before_it_is_expected_from_the_head_on() -> None:
    reader = Reader()
    reader.ahead.expect(ANN, 60)
    assert reader.read_after(60 - LEAD - 0.1) == 0
    assert reader.ahead.read_due() == pytest.approx(0.1)
    assert reader.read_after(0.1) == 3
    assert reader.disk.read == list(prefix("ann").full)
    assert reader.ahead.read_due() is None


def test_the_one_that_is_back_first_is_read_first() -> None:
    reader = Reader()
    for key, seconds in ((ANN, 30.0), (BEN, 10.0), (CY, 20.0)):
        reader.ahead.expect(key, seconds)
    reader.read_after(30)
    assert reader.disk.read == [one for agent in ("ben", "cy", "ann") for one in prefix(agent).full]


def test_what_is_in_the_pool_or_not_stored_costs_nothing() -> None:
    reader = Reader(None, ANN)
    reader.ahead.expect(ANN, 1)
    reader.ahead.expect(CacheKey("m", "new"), 1)
    assert reader.read_after(5) == 0


def test_an_agent_that_is_back_early_is_not_read() -> None:
    reader = Reader()
    reader.ahead.expect(ANN, 10)
    reader.ahead.arrived(ANN)
    assert reader.read_after(60) == 0


def test_a_request_that_waits_is_read_at_once_until_it_waits_no_more() -> None:
    reader = Reader()
    reader.ahead.waits(ANN, prefix("ann", 4))
    assert reader.read_after(0) == 4
    reader.ahead.waits(ANN, prefix("ann", 4))
    reader.ahead.arrived(ANN)
    assert reader.read_after(0) == 0


def test_loads_of_requests_go_first_and_reading_ends_when_the_agent_is_back() -> None:
    reader = Reader(Disk(loads=7))
    reader.ahead.waits(ANN, prefix("ann"))
    assert reader.read_after(0) == 3
    assert reader.disk.loads < 0

    class Busy(Disk):
        def wait_until_loaded(self, seconds: float) -> bool:
            assert seconds > 0
            reader.ahead.arrived(ANN)
            return False

    reader = Reader(Busy())
    reader.ahead.waits(ANN, prefix("ann"))
    assert reader.read_after(0) == 0


def test_between_two_bodies_it_rests_for_three_times_as_long_as_one_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(Disk):
        def prefetch(self, header: BlockHeader) -> bool:
            reader.clock.advance(0.01)
            return super().prefetch(header)

    rests: list[float | None] = []

    def rest(arrived: Callable[[], bool], seconds: float | None = None) -> bool:
        rests.append(seconds)
        return arrived()

    reader = Reader(Slow())
    monkeypatch.setattr(reader.ahead._changed, "wait_for", rest)
    reader.ahead.waits(ANN, prefix("ann"))
    assert reader.read_after(0) == 3
    assert rests == pytest.approx([0.03] * 3)


def test_all_that_is_not_used_yet_has_a_bound() -> None:
    reader = Reader(Disk(ahead_bytes=5 * BODY))
    for key in (ANN, BEN):
        reader.ahead.expect(key, LEAD)
    assert reader.read_after(0) == 3 + 2
    reader.ahead.expect(CY, LEAD)
    assert reader.read_after(0) == 0
    reader.ahead.arrived(ANN)
    reader.ahead.expect(CY, LEAD)
    assert reader.read_after(0) == 3
    reader.ahead.expect(ANN, 120)  # both others are late by then
    assert reader.read_after(120) == 3


def test_what_memory_refuses_ends_a_chain() -> None:
    reader = Reader(Disk(full_after=1))
    reader.ahead.expect(ANN, 0)
    assert reader.read_after(0) == 2


def test_the_number_of_agents_that_are_expected_is_bounded() -> None:
    reader = Reader()
    for number in range(1002):
        reader.ahead.expect(CacheKey("m", str(number)), 2000 - number)
    assert len(reader.ahead._jobs) == 1000
    assert CacheKey("m", "0") not in reader.ahead._jobs


@pytest.mark.process
def test_an_agent_that_is_due_sooner_does_not_wait_for_one_that_is_due_later() -> None:
    disk = Disk()
    ahead = ReadAhead(disk, lambda _: False)
    ahead.expect(ANN, 10_000)
    ahead.expect(BEN, LEAD + 0.05)
    until(lambda: len(disk.read) == 3)
    ahead.close()
    assert disk.read == list(prefix("ben").full)


def test_nothing_is_read_after_the_end() -> None:
    reader = Reader()
    reader.ahead._thread = None
    reader.ahead.expect(ANN, 1000)
    thread = reader.ahead._thread
    assert thread is not None
    reader.ahead.close()
    assert not thread.is_alive()
    reader.ahead.expect(ANN, 0)
    assert reader.read_after(0) == 0


# In an engine


def engine(memory_bytes: int = 1 << 20, total_blocks: int = 200) -> tuple[World, TieredStore]:
    """An engine whose store has two tiers, of which the fast one is empty."""
    cold = OnDisk(1 << 30)
    filled = World(ModelCacheSpec((FULL, FULL)), 200, prefix_store=cold)
    for agent in ("ann", "ben"):
        filled.run(agent, text_of(len(agent) + ord(agent[0]), 700))
    store = TieredStore(MemoryStore(memory_bytes, secret=cold.secret), cold)
    return World(ModelCacheSpec((FULL, FULL)), total_blocks, prefix_store=store), store


def in_memory(store: TieredStore) -> int:
    return store.warm.stats()[0].n_blocks


def reader_of(world: World) -> ReadAhead:
    ahead = world.engine._ahead
    assert ahead is not None
    ahead._thread = threading.current_thread()
    return ahead


def test_an_agent_that_said_when_it_is_back_is_restored_from_memory() -> None:
    world, store = engine()
    ahead = reader_of(world)
    world.engine.expect("ann", 2.0)
    ahead.read_due()
    assert in_memory(store) == 3
    prompt = text_of(len("ann") + ord("a"), 700)
    done = world.run("ann", (*prompt, 9))
    assert done.match is not None
    assert (done.match.source, done.cached_tokens) == ("memory", 700)


def test_a_request_that_waits_for_blocks_is_read_ahead() -> None:
    world, store = engine(total_blocks=8)
    ahead = reader_of(world)
    first = text_of(5, 600)
    world.engine.submit("first", first, max_tokens=150)
    prompt = (*text_of(len("ben") + ord("b"), 700), 9)
    world.engine.submit("ben", prompt, max_tokens=4)
    assert world.engine.n_running == 1
    ahead.read_due()
    assert in_memory(store) == 3
    done = {one.agent_id: one for one in world.finish()}
    assert done["first"].tokens == expected(world.spec, first, 150).tokens
    assert done["ben"].tokens == expected(world.spec, prompt, 4).tokens
    assert done["ben"].match is not None
    assert done["ben"].match.source == "memory"


def test_a_hint_of_one_tenant_reads_nothing_of_another() -> None:
    world, store = engine()
    ahead = reader_of(world)
    world.engine.expect("ann", 1.0, tenant="other")
    ahead.read_due()
    assert in_memory(store) == 0


def test_the_memory_tiers_quota_holds() -> None:
    world, store = engine(memory_bytes=60_000)
    ahead = reader_of(world)
    for agent in ("ann", "ben"):
        world.engine.expect(agent, 0.5)
    ahead.read_due()
    tier = store.warm.stats()[0]
    assert 0 < tier.n_blocks < 6
    assert tier.n_bytes <= tier.max_bytes


def test_the_hint_of_a_request_is_heeded_at_its_end() -> None:
    world, store = engine()
    ahead = reader_of(world)
    world.engine.enqueue(Submission("cy", text_of(4, 300), 3, hints=Hints(back_in=1.0)))
    world.finish()
    store.warm.close()  # drops everything
    ahead.expect(world.key("cy"), 1.0)
    ahead.read_due()
    assert in_memory(store) == 0  # it is in the pool
    assert world.store.evict()
    world.engine.enqueue(Submission("cy", text_of(4, 300), 3, hints=Hints(back_in=1.0)))
    world.finish()
    assert world.store.evict()
    store.warm.close()
    ahead.read_due()
    assert in_memory(store) == 2
