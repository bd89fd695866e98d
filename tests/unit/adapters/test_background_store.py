"""The thread that writes for others: what it drops, in which order it writes, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import pytest

from semantic.adapters.stores.background import MAX_TOUCHES, QUEUED_BLOCK_BYTES, BackgroundStore
from semantic.adapters.stores.memory import MemoryStore
from semantic.adapters.stores.write_order import LINGER, UploadPace
from semantic.adapters.stores.write_queue import FAILURES, FIRST_PAUSE, MAX_PAUSE
from semantic.domain.block_hash import PUBLIC_TENANT, BlockKey, Part, tenant_tag
from semantic.domain.errors import IntegrityError, InvalidRequestError
from semantic.domain.stored import Manifest, StoredBlock, Tier
from tests.support.fake_clock import FakeClock
from tests.support.http_server import until
from tests.support.store_blocks import (
    SCOPE,
    Room,
    block,
    blocks,
    chain,
    header,
    keys,
    manifest,
    saved_agents,
    scope_of,
)

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which a thread that has not answered counts as locked up."""
BLOCK = 256 * 14 + QUEUED_BLOCK_BYTES
"""What a full block counts in the queue."""
PLENTY = 1 << 28


class Slow(MemoryStore):
    """Remembers its calls, waits at its gate before each write, and fails when the test says so."""

    def __init__(self) -> None:
        super().__init__(PLENTY)
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.told: list[str] = []
        self.fails = False
        self.bug: Exception | None = None
        self.is_closed = False

    def write(self, what: str, inner: Callable[[], T], failed: T) -> T:
        self.entered.release()
        assert self.open.wait(PATIENCE)
        if self.bug is not None:
            raise self.bug
        self.told.append(what)
        return failed if self.fails else inner()

    def put(self, block: StoredBlock) -> bool:
        name = f"put {block.header.link.start // 256}"
        return self.write(name, lambda: super(Slow, self).put(block), failed=False)

    def save(self, manifest: Manifest) -> bool:
        name = f"save {manifest.agent_id} {len(manifest.token_ids)}"
        return self.write(name, lambda: super(Slow, self).save(manifest), failed=False)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self.write(f"touch {len(keys)}", lambda: super(Slow, self).touch(keys), failed=None)

    def close(self) -> None:
        self.is_closed = True


class World:
    """A store with its writer at the gate of a slow one."""

    def __init__(self, max_queued_bytes: int = PLENTY, pace: UploadPace | None = None) -> None:
        self.inner = Slow()
        self.clock = FakeClock()
        self.store = BackgroundStore(self.inner, max_queued_bytes, clock=self.clock, pace=pace)

    def stall(self) -> None:
        """Let the writer stand at the gate, with one touch in its hands."""
        self.inner.open.clear()
        self.store.touch([])
        assert self.inner.entered.acquire(timeout=PATIENCE)

    def count(self, name: str) -> int:
        return self.store.stats()[0].counts[name]

    def write(self, n_blocks: int, seed: int) -> list[bool]:
        """Put blocks one at a time, each written or refused before the next."""
        kept = []
        for one in blocks(chain(256 * n_blocks, seed)):
            kept.append(self.store.put(one))
            self.store.flush()
        return kept


@pytest.fixture
def world() -> Iterator[World]:
    one = World()
    yield one
    one.inner.open.set()
    if one.inner.bug is None:
        one.store.close()


def in_time(call: Callable[[], object]) -> None:
    """`call` in a thread of its own, which must come back."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


# Back-pressure


def test_a_part_of_the_queue_is_kept_for_other_tenants() -> None:
    world = World(16 * BLOCK)
    other = blocks(chain(4 * 256, scope=scope_of(tenant="other")))
    world.store.put(other[0])
    world.store.flush()
    world.stall()
    queued = [world.store.put(one) for one in blocks(chain(20 * 256))]
    assert queued == [True] * 14 + [False] * 6
    assert [world.store.put(one) for one in other[1:]] == [True, True, False]
    world.inner.open.set()
    world.store.flush()
    world.stall()
    assert [world.store.put(one) for one in blocks(chain(20 * 256, seed=1))].count(True) == 14
    world.inner.open.set()
    world.store.close()


def test_public_prefixes_are_no_tenant_to_keep_a_part_of_the_queue_for() -> None:
    world = World(16 * BLOCK)
    public = replace(SCOPE, tenant=tenant_tag(world.store.secret, PUBLIC_TENANT))
    assert all(world.store.put(one) for one in blocks(chain(2 * 256, scope=public)))
    world.store.flush()
    world.stall()
    assert [world.store.put(one) for one in blocks(chain(20 * 256))].count(True) == 16
    world.inner.open.set()
    world.store.close()


def test_what_the_queue_has_no_room_for_is_dropped_and_counted() -> None:
    world = World(3 * BLOCK)
    world.stall()
    given = blocks(chain(5 * 256))
    assert [world.store.put(one) for one in given] == [True, True, True, False, False]
    assert world.count("dropped") == 2
    queue = world.store.stats()[0]
    assert (queue.n_blocks, queue.n_bytes, queue.max_bytes) == (3, 3 * BLOCK, 3 * BLOCK)
    assert world.store.put(given[0])
    world.inner.open.set()
    world.store.flush()
    assert world.store.stats()[0].n_bytes == 0
    assert world.store.put(given[3])
    world.store.close()
    assert world.inner.told == ["touch 0", "put 0", "put 1", "put 2", "put 3"]


def test_a_block_counts_until_it_is_written() -> None:
    world = World(BLOCK)
    world.inner.open.clear()
    first, second = blocks(chain(2 * 256))
    assert world.store.put(first)
    assert world.inner.entered.acquire(timeout=PATIENCE)
    assert not world.store.put(second)
    assert world.store.read(first.header) == first.body
    world.inner.open.set()
    world.store.close()


@pytest.mark.process
def test_writing_never_waits_for_the_slow_store(world: World) -> None:
    world.stall()

    def use() -> None:
        for one in blocks(chain(4 * 256)):
            world.store.put(one)
        world.store.agents.save(manifest("a", 4 * 256))
        world.store.touch(keys(chain(4 * 256)))

    in_time(use)
    assert world.inner.told == []


def test_touches_do_not_queue_without_end(world: World) -> None:
    world.stall()
    for _ in range(2 * MAX_TOUCHES):
        world.store.touch([])
    world.inner.open.set()
    world.store.flush()
    assert world.inner.told == ["touch 0"] * MAX_TOUCHES


@pytest.mark.parametrize("bound", [0, -1])
def test_a_queue_without_room_is_refused(bound: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"max_queued_bytes must be at least 1.*{bound}"):
        BackgroundStore(MemoryStore(1), bound)


# What is queued is there


def test_a_queued_block_is_found_and_read_in_memory(world: World) -> None:
    world.stall()
    link = chain(300)[1]
    given = block(link)
    assert world.store.put(given)
    found = world.store.find([link.key(Part.FULL)])[link.key(Part.FULL)]
    assert (found.n_bytes, found.tier) == (len(given.body), Tier.QUEUE)
    assert world.store.read(given.header) == given.body
    room = Room(given.header)
    assert world.store.read_into([room.read]) == [True]
    assert room.body == given.body
    assert list(world.store.children(link.parent, Part.FULL)) == [given.header]
    assert world.count("hits") == 2
    assert world.inner.stats()[0].n_blocks == 0


def test_queued_and_written_blocks_are_read_together(world: World) -> None:
    links = chain(4 * 256)
    for one in blocks(links[:2]):
        world.store.put(one)
    world.store.flush()
    world.stall()
    for one in blocks(links[1:3]):
        world.store.put(one)
    rooms = [Room(header(link)) for link in reversed(links)]
    assert world.store.read_into([room.read for room in rooms]) == [False, True, True, True]
    assert [room.body for room in rooms[1:]] == [one.body for one in blocks(links[2::-1])]
    assert len(world.store.children(links[1].parent, Part.FULL)) == 1


def test_a_queued_manifest_is_seen_with_the_generation_it_will_have(world: World) -> None:
    world.store.agents.save(manifest("a", 10))
    world.store.agents.save(manifest("b", 10))
    world.store.flush()
    world.stall()
    world.store.agents.save(manifest("a", 20))
    promised = world.store.agents.manifest(SCOPE, "a")
    assert promised is not None
    assert (len(promised.token_ids), promised.generation) == (20, 2)
    assert {one.agent_id for one in saved_agents(world.store)} == {"a", "b"}
    world.inner.open.set()
    world.store.flush()
    assert world.inner.manifest(SCOPE, "a") == promised


def test_a_manifest_that_is_just_being_written_has_its_generation_already(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, leave = threading.Event(), threading.Event()
    save = world.inner.save

    def save_and_wait(manifest: Manifest) -> bool:
        kept = save(manifest)
        written.set()
        assert leave.wait(PATIENCE)
        return kept

    monkeypatch.setattr(world.inner, "save", save_and_wait)
    world.store.agents.save(manifest("a", 10))
    assert written.wait(PATIENCE)
    seen = world.store.agents.manifest(SCOPE, "a"), saved_agents(world.store)
    leave.set()
    world.store.flush()
    kept = world.store.agents.manifest(SCOPE, "a")
    assert kept is not None
    assert kept.generation == 1
    assert seen == (kept, [kept])


def test_removing_forgets_what_is_queued(world: World) -> None:
    world.stall()
    world.store.agents.save(manifest("a", 10))
    world.inner.open.set()
    assert world.store.agents.remove(SCOPE, "a")
    assert world.store.agents.manifest(SCOPE, "a") is None
    world.store.flush()
    assert world.inner.manifest(SCOPE, "a") is None


@pytest.mark.process
def test_removing_waits_for_the_save_under_way(world: World) -> None:
    world.inner.open.clear()
    world.store.agents.save(manifest("a", 10))
    assert world.inner.entered.acquire(timeout=PATIENCE)
    removed: list[bool] = []
    thread = threading.Thread(target=lambda: removed.append(world.store.agents.remove(SCOPE, "a")))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    world.inner.open.set()
    thread.join(PATIENCE)
    assert removed == [True]
    world.store.flush()
    assert world.store.agents.manifest(SCOPE, "a") is None
    assert world.inner.told == ["save a 10"]


@pytest.mark.process
def test_removing_does_not_wait_for_other_writes(world: World) -> None:
    world.inner.open.clear()
    world.store.put(blocks(chain(256))[0])
    world.store.agents.save(manifest("a", 10))
    assert world.inner.entered.acquire(timeout=PATIENCE)
    in_time(lambda: world.store.agents.remove(SCOPE, "a"))
    assert world.store.agents.manifest(SCOPE, "a") is None


# Order


def test_writes_keep_their_order_and_only_the_newest_manifest_waits(world: World) -> None:
    world.stall()
    first, second, third = blocks(chain(3 * 256))
    world.store.put(first)
    world.store.agents.save(manifest("a", 256))
    world.store.agents.save(manifest("b", 1))
    world.store.put(second)
    world.store.agents.save(manifest("a", 512))
    world.store.touch([first.header.key])
    world.store.put(third)
    world.store.agents.save(manifest("a", 768))
    world.inner.open.set()
    world.store.flush()
    assert world.inner.told == [
        "touch 0",
        "put 0",
        "save b 1",
        "put 1",
        "touch 1",
        "put 2",
        "save a 768",
    ]


@pytest.mark.process
def test_flushing_waits_for_the_manifest_that_was_saved_before(world: World) -> None:
    world.stall()
    world.store.agents.save(manifest("a", 10))
    flushed = threading.Thread(target=world.store.flush)
    flushed.start()
    while not world.store._queue.is_flushing:
        flushed.join(0.001)
    world.store.agents.save(manifest("a", 20))
    world.inner.open.set()
    flushed.join(PATIENCE)
    assert not flushed.is_alive()
    assert "save a 10" in world.inner.told
    world.store.flush()
    assert world.inner.told == ["touch 0", "save a 10", "save a 20"]


# Back-off


def test_single_failures_change_nothing(world: World) -> None:
    for seed in range(5):
        world.inner.fails = True
        assert world.write(FAILURES - 1, 10 + seed) == [True] * (FAILURES - 1)
        world.inner.fails = False
        assert world.write(1, 20 + seed) == [True]
    assert world.count("back-offs") == 0
    assert world.count("dropped") == 0


def test_after_several_failures_nothing_is_written_for_a_while(world: World) -> None:
    world.inner.fails = True
    assert world.write(FAILURES, 1) == [True] * FAILURES
    told = list(world.inner.told)
    assert world.write(4, 2) == [False] * 4
    assert not world.store.agents.save(manifest("a", 10))
    assert world.inner.told == told
    assert (world.count("dropped"), world.count("dropped manifests")) == (4, 1)
    assert world.store.agents.manifest(SCOPE, "a") is None
    world.clock.advance(FIRST_PAUSE)
    world.inner.fails = False
    assert world.write(2, 3) == [True, True]
    assert world.store.agents.save(manifest("a", 10))
    world.store.flush()
    assert len(world.inner.told) == len(told) + 3
    assert world.count("back-offs") == 1


def test_the_pause_doubles_to_its_limit_and_a_success_ends_it(world: World) -> None:
    world.inner.fails = True
    world.write(FAILURES, 1)
    pause = FIRST_PAUSE
    for seed in range(2, 20):
        world.clock.advance(pause * 0.99)
        assert world.write(1, seed) == [False]
        world.clock.advance(pause * 0.01)
        assert world.write(2, seed) == [True, False]
        pause = min(2 * pause, MAX_PAUSE)
    assert pause == MAX_PAUSE
    world.clock.advance(pause)
    world.inner.fails = False
    assert world.write(2, 50) == [True, True]
    world.inner.fails = True
    assert world.write(FAILURES, 51) == [True] * FAILURES
    world.clock.advance(FIRST_PAUSE)
    assert world.write(1, 52) == [True]


def test_what_waits_when_the_writes_begin_to_fail_is_dropped(world: World) -> None:
    world.stall()
    world.inner.fails = True
    for one in blocks(chain((FAILURES + 4) * 256)):
        assert world.store.put(one)
    world.store.agents.save(manifest("a", 10))
    world.inner.open.set()
    world.store.flush()
    assert len(world.inner.told) == 1 + FAILURES
    assert (world.count("dropped"), world.count("dropped manifests")) == (4, 1)
    assert world.store.agents.manifest(SCOPE, "a") is None
    assert world.store.stats()[0].n_bytes == 0


def test_reading_goes_on_while_writes_are_refused(world: World) -> None:
    assert world.write(1, 1) == [True]
    world.inner.fails = True
    world.write(FAILURES, 2)
    [given] = blocks(chain(256, 1))
    assert world.store.read(given.header) == given.body
    world.store.touch([given.header.key])
    world.store.flush()
    assert world.inner.told[-1] == "touch 1"


# The end


@pytest.mark.process
def test_closing_writes_all_and_ends_the_thread(world: World) -> None:
    world.stall()
    for one in blocks(chain(50 * 256)):
        assert world.store.put(one)
    world.store.agents.save(manifest("a", 50 * 256))
    threading.Timer(0.05, world.inner.open.set).start()
    world.store.close()
    assert world.inner.told[1:] == [*(f"put {i}" for i in range(50)), f"save a {50 * 256}"]
    assert world.inner.is_closed
    assert not any(one.is_alive() for one in world.store._queue._threads)


def test_the_thread_does_not_keep_a_process_alive(world: World) -> None:
    assert all(one.daemon for one in world.store._queue._threads)


def test_flushing_flushes_the_inner_store(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[list[str]] = []
    monkeypatch.setattr(world.inner, "flush", lambda: flushed.append(list(world.inner.told)))
    world.store.touch([])
    world.store.flush()
    assert flushed == [["touch 0"]]


@pytest.mark.process
def test_a_thread_that_dies_of_a_bug_hangs_nobody(world: World) -> None:
    world.stall()
    assert world.store.put(blocks(chain(256))[0])
    world.inner.bug = ZeroDivisionError("a bug")
    world.inner.open.set()
    for end in (world.store.flush, world.store.flush, world.store.close):
        caught: list[IntegrityError] = []

        def call(end: Callable[[], None] = end, caught: list[IntegrityError] = caught) -> None:
            with pytest.raises(IntegrityError, match=r"died: ZeroDivisionError\('a bug'\)") as info:
                end()
            caught.append(info.value)

        in_time(call)
        assert [type(one.__cause__) for one in caught] == [ZeroDivisionError]
    assert world.inner.is_closed
    assert not any(one.is_alive() for one in world.store._queue._threads)


@pytest.mark.process
def test_after_its_thread_has_died_a_store_still_reads_but_takes_no_more(world: World) -> None:
    assert world.write(1, 1) == [True]
    world.stall()
    first, second = blocks(chain(2 * 256, 2))
    world.store.put(first)
    world.inner.bug = ZeroDivisionError("a bug")
    world.inner.open.set()
    with pytest.raises(IntegrityError):
        world.store.flush()
    [written] = blocks(chain(256, 1))
    assert world.store.read(written.header) == written.body
    assert world.store.read(first.header) == first.body
    assert not world.store.put(second)
    assert not world.store.agents.save(manifest("a", 10))
    world.store.touch([written.header.key])
    in_time(lambda: world.store.agents.remove(SCOPE, "a"))
    assert (world.count("dropped"), world.count("dropped manifests")) == (1, 1)


@pytest.mark.process
def test_a_block_waits_for_the_rest_of_its_pace_unless_it_is_flushed() -> None:
    """Time stands still: without the flush the second block would never come."""
    inner, clock = Slow(), FakeClock()
    pace = UploadPace(clock)
    pace.new_observer().stepped(0.1, 1, prefilled=False)
    inner.open.clear()
    store = BackgroundStore(inner, PLENTY, clock=clock, pace=pace)
    for one in blocks(chain(2 * 256)):
        assert store.put(one)
    assert inner.entered.acquire(timeout=PATIENCE)
    clock.advance(0.1)
    inner.open.set()
    until(lambda: store.stats()[0].n_blocks == 1)
    assert not inner.entered.acquire(timeout=0.01)
    store.flush()
    assert inner.told == ["put 0", "put 1"]
    store.close()


def checkpoint(n_tokens: int, *, interim: bool = True) -> StoredBlock:
    """The states after so many tokens."""
    (*_, last) = chain(n_tokens)
    return replace(block(last, Part.CHECKPOINT), interim=interim)


def paced(max_queued_bytes: int = PLENTY) -> World:
    """A world whose queue has the pace of uploads, stalled."""
    world = World(max_queued_bytes, UploadPace(FakeClock()))
    world.stall()
    return world


def test_what_the_next_turn_continues_from_is_uploaded_before_checkpoints_on_the_way() -> None:
    world = paced()
    for one in blocks(chain(3 * 256)):
        assert world.store.put(replace(one, interim=True))
    for n_tokens in (256, 512):
        assert world.store.put(checkpoint(n_tokens))
    assert world.store.put(checkpoint(768, interim=False))
    assert world.store.agents.save(manifest("a", 768))
    world.inner.open.set()
    world.store.flush()
    full = ["put 0", "put 1", "put 2"]
    assert world.inner.told == ["touch 0", *full, "put 2", "save a 768", "put 0", "put 1"]


def test_a_checkpoint_at_which_a_turn_ends_gives_way_no_longer() -> None:
    world = paced()
    for n_tokens in (256, 512):
        assert world.store.put(checkpoint(n_tokens))
    key = checkpoint(512).header.key
    assert world.store.lacking([key]) == {key}
    assert world.store.put(checkpoint(512, interim=False))
    assert not world.store.lacking([key])
    world.inner.open.set()
    world.store.flush()
    assert world.inner.told == ["touch 0", "put 1", "put 0"]


def test_of_a_queue_that_is_half_full_the_oldest_checkpoints_are_dropped() -> None:
    size = QUEUED_BLOCK_BYTES + len(checkpoint(256).body)
    world = paced(4 * size)
    assert world.store.put(checkpoint(256, interim=False))
    for n_tokens in (512, 768, 1024):
        assert world.store.put(checkpoint(n_tokens))
    assert world.count("dropped") == 2
    world.inner.open.set()
    world.store.flush()
    assert world.inner.told == ["touch 0", "put 0", "put 3"]


def test_without_a_pace_everything_is_written_in_its_order(world: World) -> None:
    world.stall()
    for n_tokens in (256, 512):
        assert world.store.put(checkpoint(n_tokens, interim=n_tokens == 256))
    world.inner.open.set()
    world.store.flush()
    assert world.inner.told == ["touch 0", "put 0", "put 1"]


def test_of_several_threads_each_writes_a_block_and_a_manifest_waits_for_all_of_them() -> None:
    inner = Slow()
    inner.open.clear()
    store = BackgroundStore(inner, PLENTY, threads=3)
    for one in blocks(chain(3 * 256)):
        assert store.put(one)
    assert store.agents.save(manifest("a", 3 * 256))
    for _ in range(3):
        assert inner.entered.acquire(timeout=PATIENCE)
    assert not inner.entered.acquire(timeout=0.01)
    inner.open.set()
    store.flush()
    assert sorted(inner.told[:3]) == ["put 0", "put 1", "put 2"]
    assert inner.told[3:] == [f"save a {3 * 256}"]
    store.close()


# What a longer block is to take the place of


def interim(n_tokens: int) -> StoredBlock:
    """The last, partial block of a checkpoint on the way."""
    return replace(blocks(chain(n_tokens))[-1], interim=True)


@pytest.fixture
def lingering(world: World) -> World:
    """A queue with an interim block of 100 tokens."""
    assert world.store.put(interim(100))
    return world


@pytest.mark.parametrize("n_tokens", [101, 256, 300])
def test_a_part_of_a_block_is_not_written_before_a_longer_one(
    lingering: World, n_tokens: int
) -> None:
    world = lingering
    (key,) = keys(chain(100))
    assert world.store.find([key])
    assert world.store.put(block(chain(n_tokens)[0]))
    assert not world.store.find([key])
    world.store.flush()
    assert world.inner.told == ["put 0"]
    assert world.inner.find(keys(chain(n_tokens))[:1])
    assert world.count("superseded") == 1


@pytest.mark.process
def test_it_lingers_no_longer_than_its_time(lingering: World) -> None:
    world = lingering
    world.store.put(block(chain(300, seed=1)[1]))
    world.store.agents.save(manifest("a", 300, seed=1))
    until(lambda: world.inner.told == ["put 1", "save a 300"])
    world.clock.advance(LINGER)
    world.store.touch([])
    until(lambda: world.inner.told == ["put 1", "save a 300", "put 0", "touch 0"])


@pytest.mark.parametrize(
    "other",
    [
        block(chain(100, seed=1)[0]),
        block(chain(300)[1]),
        block(chain(101)[0], Part.WINDOW),
        block(chain(99)[0]),
    ],
    ids=["other tokens", "a later one", "another part", "a shorter one"],
)
def test_another_block_does_not_take_its_place(lingering: World, other: StoredBlock) -> None:
    world = lingering
    assert world.store.put(other)
    world.store.flush()
    assert len(world.inner.told) == 2
    assert world.inner.find(keys(chain(100)))


@pytest.mark.process
def test_the_end_of_a_turn_is_written_at_once(lingering: World) -> None:
    world = lingering
    assert world.store.lacking(keys(chain(100))) == frozenset(keys(chain(100)))
    assert world.store.put(replace(interim(100), interim=False))
    until(lambda: world.inner.told == ["put 0"])
    assert world.store.put(interim(100))
    assert world.store.find(keys(chain(100)))


@pytest.mark.process
def test_a_queue_that_is_half_full_waits_for_nothing() -> None:
    size = QUEUED_BLOCK_BYTES + 100 * 14
    world = World(2 * size - 1)
    assert world.store.put(interim(100))
    until(lambda: world.inner.told == ["put 0"])
    world.store.close()


@contextmanager
def under_way(inner: Slow, write: Callable[[], object]) -> Iterator[None]:
    """Within, a thread has taken the write from the queue and waits at the gate of `inner`."""
    inner.open.clear()
    write()
    assert inner.entered.acquire(timeout=PATIENCE)
    yield
    inner.open.set()


def test_what_is_dropped_while_it_is_written_is_not_found_and_can_be_put_again() -> None:
    inner = Slow()
    store = BackgroundStore(inner, PLENTY, forgets_at_once=True)
    links = chain(256)
    with under_way(inner, lambda: store.put(block(links[0]))):
        store.drop(keys(links))
        assert store.find(keys(links)) == {}
        assert list(store.children(links[0].parent, Part.FULL)) == []
        assert store.stats()[0].n_bytes == 0
        store.put(block(links[0]))
    store.flush()
    assert store.stats()[0].n_bytes == 0
    assert [*store.find(keys(links))] == keys(links)
    store.close()


def test_what_is_dropped_before_its_write_begins_does_not_come_back() -> None:
    inner = Slow()
    store = BackgroundStore(inner, PLENTY, forgets_at_once=True)
    links = chain(256)
    with under_way(inner, lambda: store.put(block(links[0]))):
        store.drop(keys(links))
    store.flush()
    assert store.find(keys(links)) == {}
    with under_way(inner, lambda: store.agents.save(manifest("ann", 300))):
        assert store.agents.remove(SCOPE, "ann")
    store.flush()
    assert store.agents.manifest(SCOPE, "ann") is None
    store.close()


class SlowFirst(MemoryStore):
    """Holds the first write of a block until `go`."""

    def __init__(self) -> None:
        super().__init__(PLENTY)
        self.entered, self.go = threading.Event(), threading.Event()

    def put(self, block: StoredBlock) -> bool:
        if not self.entered.is_set():
            self.entered.set()
            assert self.go.wait(PATIENCE)
        return super().put(block)


@pytest.mark.process
@pytest.mark.parametrize("n_drops", [1, 2])
def test_of_two_writes_of_a_block_at_once_the_last_call_decides(n_drops: int) -> None:
    inner = SlowFirst()
    store = BackgroundStore(inner, PLENTY, threads=2, forgets_at_once=True)
    links = chain(256)
    store.put(block(links[0]))
    assert inner.entered.wait(PATIENCE)
    store.drop(keys(links))
    store.put(block(links[0]))
    until(lambda: bool(inner.find(keys(links))))
    if n_drops == 2:
        store.drop(keys(links))
    inner.go.set()
    store.flush()
    assert [*inner.find(keys(links))] == (keys(links) if n_drops == 1 else [])
    store.close()
