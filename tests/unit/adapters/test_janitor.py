"""The janitor of an object store: its lease, what it evicts, and what processes learn of that."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.composition.engine_settings import Settings
from semantic.domain.block_hash import BlockLink, Part, Scope
from semantic_fleet.fleet_store import evict_remote
from semantic_fleet.objects import janitor as janitor_module
from semantic_fleet.objects import uses
from semantic_fleet.objects.janitor import (
    OBJECT_BYTES,
    BackgroundJanitor,
    Janitor,
    Report,
    seconds_to_fill,
)
from semantic_fleet.objects.lease import PERIOD, Lease, LostLeaseError
from semantic_fleet.objects.objects import Listed, Objects, UnavailableError
from semantic_fleet.objects.remote_records import Records
from semantic_fleet.objects.remote_store import RemoteStore
from semantic_fleet.objects.sealing import SALT_SECONDS, Vault
from semantic_fleet.objects.uses import LOG_SECONDS, Numbers, UseLog, UseTable, name_of
from tests.support.bucket import Bucket, Process
from tests.support.fake_clock import FakeClock
from tests.support.own_process import in_own_process
from tests.support.store_blocks import (
    LAYOUT,
    SCOPE,
    block,
    chain,
    header,
    keys,
    manifest,
    saved_agents,
    scope_of,
)

SECRET = bytes(range(32))
BODY = 3664
"""Bytes of the object of a full block."""


class World:
    """A bucket, and processes that use it."""

    def __init__(self, stack: ExitStack) -> None:
        self.bucket = Bucket()
        self._stack = stack

    @property
    def clock(self) -> FakeClock:
        return self.bucket.clock

    def replica(self) -> RemoteStore:
        store = RemoteStore(self.bucket.objects(), SECRET, clock=self.clock)
        self._stack.callback(store.close)
        return store

    def janitor(self, max_bytes: int, objects: Process | None = None) -> Janitor:
        """One that has the lease."""
        objects = objects or self.bucket.objects()
        lease = Lease(objects, clock=FakeClock())
        assert lease.acquire()
        return Janitor(objects, SECRET, lease, max_bytes)

    def evict(self, max_bytes: int) -> Report:
        """One pass."""
        janitor = self.janitor(max_bytes)
        try:
            return janitor.run()
        finally:
            janitor._lease.release()

    def lose(self, folder: str) -> None:
        """Delete all that is in a folder, unannounced."""
        objects = self.bucket.objects()
        for path in self.bucket.paths():
            if path.startswith(folder):
                objects.delete(path)

    def stored(self, links: list[BlockLink], part: Part = Part.FULL) -> list[bool]:
        """Which of the bodies are in the bucket."""
        paths = self.bucket.paths()
        names = {path.rsplit("/", 1)[-1] for path in paths}
        return [f"{link.hash.hex()}.{part}" in names for link in links]


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack)


def save(store: RemoteStore, n_tokens: int, seed: int, scope: Scope = SCOPE) -> list[BlockLink]:
    """Store an agent with full blocks."""
    links = chain(n_tokens, seed, scope)
    for link in links:
        assert store.put(block(link))
    assert store.agents.save(manifest(f"agent{seed}", n_tokens, seed, scope=scope))
    store.flush()
    return links


# The lease


def test_one_process_has_the_lease_and_others_take_it_over_when_it_is_dead() -> None:
    bucket, hours = Bucket(), 7 * 3600.0
    mine, theirs = FakeClock(), FakeClock()
    theirs.now = hours  # no machine's clock is that of another
    one, other = Lease(bucket.objects(), clock=mine), Lease(bucket.objects(), clock=theirs)
    assert one.acquire()
    assert not other.acquire()
    for _ in range(5):
        theirs.advance(PERIOD - 1)
        assert one.acquire()  # renewed
        assert not other.acquire()
    theirs.advance(PERIOD)
    assert other.acquire()
    with pytest.raises(LostLeaseError):
        one.renew()
    assert not one.acquire()
    mine.advance(PERIOD)
    assert one.acquire()
    assert not other.acquire()
    assert len(bucket.paths("janitor/lease")) == 1


def test_a_lease_that_is_released_is_free_at_once() -> None:
    bucket = Bucket()
    one, other = (Lease(bucket.objects(), clock=FakeClock()) for _ in range(2))
    assert one.acquire()
    assert not other.acquire()
    one.release()
    assert other.acquire()
    assert not one.acquire()


@pytest.mark.parametrize("asleep_before", ["create", "listed"])
def test_who_sleeps_in_the_middle_of_a_renewal_has_lost_the_lease(asleep_before: str) -> None:
    """Also when the number that it creates was created and deleted by others meanwhile."""
    bucket, clock = Bucket(), FakeClock()
    objects = bucket.objects()
    one, other = Lease(objects, clock=FakeClock()), Lease(bucket.objects(), clock=clock)
    assert one.acquire()

    def sleep(called: str) -> None:
        if called == asleep_before:
            objects.before = lambda _: None
            other.acquire()
            clock.advance(PERIOD)
            assert other.acquire()
            other.renew()
            other.renew()

    objects.before = sleep
    with pytest.raises(LostLeaseError):
        one.renew()
    other.renew()
    with pytest.raises(LostLeaseError):
        one.renew()


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["acquire", "renew", "sleep", "release"])),
        max_size=40,
    )
)
def test_never_do_two_processes_act(steps: list[tuple[int, str]]) -> None:
    """Of two that have renewed the lease the later one has the higher number, and the earlier one
    cannot renew it again without waiting."""
    bucket = Bucket()
    clocks = [FakeClock() for _ in range(3)]
    leases = [Lease(bucket.objects(), clock=clock) for clock in clocks]
    holder: int | None = None
    last = 0
    for who, step in steps:
        lease = leases[who]
        if step == "sleep":
            clocks[who].advance(PERIOD)
        elif step == "release":
            lease.release()
            holder = None if holder == who else holder
        elif step == "acquire" and lease.acquire():
            assert lease.number > last
            last, holder = lease.number, who
        elif step == "renew":
            try:
                lease.renew()
            except LostLeaseError:
                assert holder != who
            else:
                assert holder == who
                last = lease.number


# What is evicted


def test_what_was_not_used_for_longest_goes_first_and_of_a_chain_its_end(world: World) -> None:
    """An agent's manifest before the blocks that it names."""
    store = world.replica()
    old = save(store, 8 * 256, 1)
    world.clock.advance(3600)
    new = save(store, 8 * 256, 2)
    report = world.evict(world.bucket.bytes_of() - 1)
    assert report.evicted == {"manifests": 1}
    assert world.stored(old) == [True] * 8
    before = world.bucket.bytes_of()
    report = world.evict(before - 3 * BODY)
    n_left = 8 - report.evicted["blocks"]
    assert 2 <= n_left <= 5
    assert world.stored(old) == [True] * n_left + [False] * (8 - n_left)
    assert world.stored(new) == [True] * 8
    assert report.n_bytes <= before - 3 * BODY
    assert len(world.bucket.paths("/agents/")) == 1


def test_batches_are_deleted_in_the_order_of_uses(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any time the beginning of a chain is left, as at the end of the pass."""
    monkeypatch.setattr(janitor_module, "PAGE", 2)
    links = save(world.replica(), 9 * 256, 1)
    objects, left = world.bucket.objects(), list[list[bool]]()
    janitor = world.janitor(1, objects)
    objects.before = lambda called: left.append(world.stored(links)) if "all" in called else None
    janitor.run()
    assert len(left) > 4
    assert all(one == sorted(one, reverse=True) for one in left)


def test_a_use_by_any_process_counts_and_so_does_what_the_block_follows(world: World) -> None:
    writer = world.replica()
    first, second = save(writer, 4 * 256, 1), save(writer, 4 * 256, 2)
    world.clock.advance(3600)
    reader = world.replica()
    reader.look_up(SCOPE, first, LAYOUT)
    reader.touch([first[-1].key(Part.FULL)])  # of its end alone
    reader.flush()
    world.evict(5 * BODY)
    assert world.stored(first) == [True] * 4
    assert world.stored(second) == [False] * 4


def test_of_two_logs_of_one_moment_neither_lets_a_block_go_before_what_follows_it(
    world: World,
) -> None:
    store, reader = world.replica(), world.replica()
    links = save(store, 8 * 256, 1)
    world.evict(1 << 30)
    world.clock.advance(10)
    for n_blocks in (8, 2, 1):
        reader.look_up(SCOPE, links, LAYOUT)
        reader.touch(keys(links[:n_blocks]))
        reader.flush()
    before = world.bucket.bytes_of()
    world.evict(before - 4 * BODY)
    left = world.stored(links)
    assert left == sorted(left, reverse=True)
    assert 0 < sum(left) < 8


def test_uses_are_remembered_when_their_logs_are_gone(world: World) -> None:
    writer = world.replica()
    first, second = save(writer, 4 * 256, 1), save(writer, 4 * 256, 2)
    world.clock.advance(3600)
    writer.touch(keys(first))
    writer.flush()
    world.evict(1 << 30)
    assert not world.bucket.paths("uses/") - world.bucket.paths("janitor/")
    world.evict(5 * BODY)
    assert world.stored(first) == [True] * 4
    assert world.stored(second) == [False] * 4
    world.evict(1)
    [table] = world.bucket.paths("janitor/uses")
    listed = next(one for one in world.bucket.objects().listed("janitor/uses", 9))
    assert table == listed.path
    assert len(Numbers(world.bucket.objects(), SECRET).read(listed)) <= 2 * 5  # what is left


def test_tails_go_with_what_they_are_found_by(world: World) -> None:
    store = world.replica()
    tail = chain(700, 1)[-1]
    for part in (Part.FULL, Part.CHECKPOINT):
        assert store.put(block(tail, part))
    world.clock.advance(3600)
    save(store, 8 * 256, 2)
    world.evict(8 * BODY)
    assert not world.bucket.paths("/after/")
    assert world.stored([tail]) == [False]


def test_no_tenant_loses_anything_while_it_has_less_than_an_equal_part(world: World) -> None:
    store, (small, large) = world.replica(), (scope_of(tenant=name) for name in "ab")
    mine = save(store, 4 * 256, 1, small)
    world.clock.advance(3600)
    theirs = save(store, 30 * 256, 2, large)
    world.evict(20 * BODY)
    assert world.stored(mine) == [True] * 4
    left = world.stored(theirs)
    assert left == sorted(left, reverse=True)
    assert 11 <= sum(left) <= 15


def test_records_have_a_part_of_their_own_and_the_oldest_go(world: World) -> None:
    objects = world.bucket.objects()
    turns = Records(objects, SECRET, "turns")
    tag = turns.tag(b"owner")
    for number in range(60):
        world.clock.advance(1)
        turns.put(tag, bytes([number]) * 32, bytes(400))
    save(world.replica(), 40 * 256, 1)
    world.evict(40 * BODY)
    found = [turns.get(tag, bytes([number]) * 32) is not None for number in range(60)]
    assert found == sorted(found)
    assert 10 < sum(found) < 20  # a sixteenth of 38 bodies
    assert world.bucket.bytes_of("/") <= 40 * BODY
    assert not world.evict(40 * BODY).evicted


def test_records_have_what_blocks_leave(world: World) -> None:
    turns = Records(world.bucket.objects(), SECRET, "turns")
    for number in range(50):
        world.clock.advance(1)
        turns.put(turns.tag(b"owner"), bytes([number]) * 32, bytes(400))
    save(world.replica(), 512, 1)
    before = world.bucket.bytes_of()
    report = world.evict(before - 1)
    assert report.evicted.keys() == {"records"}
    assert report.n_bytes > before * 0.9


def test_what_is_not_the_fleets_is_neither_counted_nor_deleted(world: World) -> None:
    objects = world.bucket.objects()
    for path in ("notes.txt", "other/thing", "turns/none", f"{'a' * 64}/x/y"):
        objects.create(path, bytes(100_000))
    links = save(world.replica(), 4 * 256, 1)
    report = world.evict(8 * BODY)
    assert not report.evicted
    assert world.stored(links) == [True] * 4
    world.evict(1)
    assert len(world.bucket.paths()) >= 4
    assert {"notes.txt", "other/thing", "turns/none"} <= world.bucket.paths()


def test_what_deleted_tenants_had_goes_whatever_the_budget(world: World) -> None:
    store, objects = world.replica(), world.bucket.objects()
    mine, theirs = save(store, 512, 1), save(store, 512, 2, scope_of(tenant="b"))
    vault = Vault(objects, SECRET)
    vault.forget(SCOPE.tenant)
    save(store, 512, 3)  # it has not heard of it
    world.clock.advance(SALT_SECONDS)
    report = world.evict(1 << 30)
    assert report.evicted == {"blocks": 4, "manifests": 2}
    assert world.stored(mine) == [False] * 2
    assert world.stored(theirs) == [True] * 2
    fresh = world.replica()
    again = save(fresh, 512, 1)  # with a new key
    assert not world.evict(1 << 30).evicted
    vault.forget(SCOPE.tenant)
    newest = save(world.replica(), 512, 1)
    assert world.evict(1 << 30).evicted == {"blocks": 2, "manifests": 1}
    assert world.stored(newest) == [True] * 2
    assert again == newest


# What happens meanwhile


def test_what_is_used_or_written_during_a_pass_stays(world: World) -> None:
    store = world.replica()
    used, written, old = (save(store, 2 * 256, seed) for seed in (1, 2, 3))
    world.clock.advance(3600)
    objects = world.bucket.objects()
    janitor = world.janitor(BODY, objects)

    def meanwhile(called: str) -> None:
        if called == "pages of tenants":  # after all have been listed
            store.touch(keys(used))
            store.flush()
            other = world.replica()
            for link in written:
                for path in world.bucket.paths(link.hash.hex()):
                    world.bucket.objects().delete(path)
                assert other.put(block(link))

    objects.before = meanwhile
    janitor.run()
    assert world.stored(used) == [True] * 2
    assert world.stored(written) == [True] * 2
    assert world.stored(old) == [False] * 2


def test_a_janitor_that_slept_past_its_lease_deletes_nothing_more(world: World) -> None:
    store = world.replica()
    save(store, 4 * 256, 1)
    objects, clock = world.bucket.objects(), FakeClock()
    janitor = world.janitor(1, objects)
    other = Lease(world.bucket.objects(), clock=clock)

    def sleep(called: str) -> None:
        if called == "page":
            objects.before = lambda _: None
            other.acquire()
            clock.advance(PERIOD)
            assert other.acquire()

    objects.before = sleep
    before = world.bucket.paths("/")
    with pytest.raises(LostLeaseError):
        janitor.run()
    assert objects.calls["delete_all"] == 0
    assert {path for path in before if "lease" not in path} <= world.bucket.paths("/")


def test_a_janitor_that_slept_right_before_it_deletes_sends_nothing(world: World) -> None:
    """After it has renewed its lease and seen that no other has: then another takes it over."""
    store, clocks = world.replica(), (FakeClock(), FakeClock())
    links = save(store, 4 * 256, 1)
    objects = world.bucket.objects()
    own, other = Lease(objects, clock=clocks[0]), Lease(world.bucket.objects(), clock=clocks[1])
    assert own.acquire()
    assert not other.acquire()
    delete, slept = objects.delete, list[bool]()

    def deleted(path: str) -> None:
        """The last call of a renewal."""
        delete(path)
        if "-next" in "".join(world.bucket.paths("evicted/")) and not slept:
            assert not other.acquire()
            for clock in clocks:
                clock.advance(PERIOD)
            slept.append(other.acquire())

    objects.delete = deleted  # type: ignore[method-assign]
    with pytest.raises(LostLeaseError):
        Janitor(objects, SECRET, own, 1).run()
    assert slept == [True]
    assert objects.calls["delete_all"] == 0
    assert world.stored(links) == [True] * 4


def test_a_batch_that_is_deleted_too_late_is_missed_once_and_written_again(world: World) -> None:
    """Its request was on its way while another janitor worked and processes knew it again."""
    store = world.replica()
    links = save(store, 4 * 256, 1)
    store.look_up(SCOPE, links, LAYOUT)
    objects = world.bucket.objects()
    janitor = world.janitor(1, objects)

    def late(called: str) -> None:
        if called == "delete_all":
            objects.before = lambda _: None
            world.clock.advance(LOG_SECONDS)
            store.look_up(SCOPE, links, LAYOUT)  # it was announced, and is still there
            assert set(store.find(keys(links))) == set(keys(links))

    objects.before = late
    janitor.run()
    assert world.stored(links) == [False] * 4
    world.clock.advance(1)
    assert store.read(header(links[0])) is None
    assert store.lacking(keys(links)) == frozenset(keys(links))
    for link in links:
        assert store.put(block(link))
    assert world.stored(links) == [True] * 4


def test_a_block_that_is_gone_from_the_middle_is_a_shorter_prefix_and_is_written_again(
    world: World,
) -> None:
    writer, reader = world.replica(), world.replica()
    links = save(writer, 4 * 256, 1)
    reader.look_up(SCOPE, links, LAYOUT)
    for path in world.bucket.paths(links[1].hash.hex()):
        world.bucket.objects().delete(path)
    read = [reader.read(header(link)) is not None for link in links]
    assert read == [True, False, True, True]
    assert set(reader.lacking(keys(links))) == {links[1].key(Part.FULL)}
    assert reader.put(block(links[1]))
    assert reader.read(header(links[1])) == block(links[1]).body


# What processes learn


@pytest.mark.parametrize("by", ["look_up", "save"])
def test_a_process_learns_what_is_gone_and_writes_it_again(by: str, world: World) -> None:
    store = world.replica()
    old = save(store, 4 * 256, 1)
    world.clock.advance(3600)
    new = save(store, 4 * 256, 2)
    store.look_up(SCOPE, old, LAYOUT)
    world.evict(6 * BODY)
    gone = [link for link, stored in zip(old, world.stored(old), strict=True) if not stored]
    assert gone
    assert store.lacking(keys(gone)) == frozenset()  # it has not asked yet
    world.clock.advance(LOG_SECONDS)
    if by == "look_up":
        store.look_up(SCOPE, chain(256, 9), LAYOUT)
    else:
        assert store.agents.save(manifest("agent2", 4 * 256, 2))
    assert store.lacking(keys([*old, *new])) == frozenset(keys(gone))
    for link in gone:
        assert store.put(block(link))
    assert world.stored(old) == [True] * 4


def test_who_misses_a_block_learns_at_once_what_else_is_gone(world: World) -> None:
    """Which the request that has missed it then writes again, with the block."""
    store = world.replica()
    old = save(store, 20 * 256, 1)
    world.clock.advance(3600)
    save(store, 4 * 256, 2)
    store.look_up(SCOPE, old, LAYOUT)
    world.evict(14 * BODY)
    gone = [link for link, stored in zip(old, world.stored(old), strict=True) if not stored]
    assert 5 < len(gone) < 20
    world.clock.advance(1)
    assert store.read(header(gone[0])) is None
    assert store.lacking(keys(old)) == frozenset(keys(gone))


def test_a_process_that_missed_too_much_forgets_what_it_knows(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uses, "MOST_EVICTED", 5)
    store = world.replica()
    links = save(store, 4 * 256, 1)
    store.look_up(SCOPE, links, LAYOUT)
    for number in range(8):
        uses.announce(world.bucket.objects(), SECRET, f"{number:020}", [number])
    assert len(world.bucket.paths("evicted/")) == uses.MOST_EVICTED
    world.clock.advance(LOG_SECONDS)
    store.look_up(SCOPE, chain(256, 9), LAYOUT)
    assert store.lacking(keys(links)) == frozenset(keys(links))


@pytest.mark.parametrize("lost", ["janitor/lease", ""])
def test_evictions_are_heard_when_the_numbers_of_leases_begin_anew(lost: str, world: World) -> None:
    """After the lease was lost, or all of the bucket."""
    store = world.replica()
    save(store, 8 * 256, 1)
    for n_blocks in (6, 5, 4):
        world.evict(n_blocks * BODY)
    world.clock.advance(LOG_SECONDS)
    store.look_up(SCOPE, chain(256, 9), LAYOUT)
    world.lose(lost)
    world.clock.advance(LOG_SECONDS)
    links = save(store, 8 * 256, 2)
    world.clock.advance(LOG_SECONDS)
    store.look_up(SCOPE, links, LAYOUT)
    assert world.evict(2 * BODY).evicted["blocks"] >= 6
    world.clock.advance(LOG_SECONDS)
    store.look_up(SCOPE, chain(256, 9), LAYOUT)
    there = [one for one, stored in zip(keys(links), world.stored(links), strict=True) if stored]
    assert store.find(keys(links)).keys() == set(there)
    assert len(there) <= 2


@pytest.mark.parametrize("is_emptied", [False, True])
def test_what_a_tenant_had_under_another_key_is_written_again(
    world: World, *, is_emptied: bool
) -> None:
    """It was forgotten, or the bucket was deleted and made anew, while servers run."""
    store, other = world.replica(), scope_of(tenant="b")
    mine, theirs = save(store, 4 * 256, 1), save(store, 4 * 256, 2, other)
    tail = chain(300, 1)[-1]
    assert store.put(block(tail))
    if is_emptied:
        world.lose("")
    else:
        assert Vault(world.bucket.objects(), SECRET).erase(SCOPE.tenant)
    world.clock.advance(SALT_SECONDS)
    links = [*mine, tail]
    store.look_up(SCOPE, mine, LAYOUT)
    assert store.lacking(keys(links)) == frozenset(keys(links))
    assert [one.scope for one in saved_agents(store)] == [other]
    assert store.lacking(keys(theirs)) == frozenset()  # nothing was asked for it yet
    save(store, 4 * 256, 1)
    assert world.stored(mine) == [True] * 4
    store.look_up(other, theirs, LAYOUT)
    save(store, 4 * 256, 2, other)
    assert world.stored(theirs) == [True] * 4


def test_an_agent_whose_manifest_is_gone_goes_on_with_its_generations(world: World) -> None:
    store, other = world.replica(), world.replica()
    for _ in range(3):
        save(store, 256, 1)
    other.look_up_agent(SCOPE, "agent1")
    world.evict(1)
    assert not world.bucket.paths("/agents/")
    assert other.agents.save(manifest("agent1", 300, 1))
    store.look_up_agent(SCOPE, "agent1")
    found = store.agents.manifest(SCOPE, "agent1")
    assert found is not None
    assert found.generation == 4
    assert len(found.token_ids) == 300
    world.evict(1)
    assert world.replica().agents.save(manifest("agent1", 400, 1))  # one that knew none of them
    store.look_up_agent(SCOPE, "agent1")
    found = store.agents.manifest(SCOPE, "agent1")
    assert found is not None
    assert len(found.token_ids) == 400


def test_a_tail_that_is_gone_is_not_announced_for_ever(world: World) -> None:
    store, reader = world.replica(), world.replica()
    links = chain(300, 1)
    for link in links:
        assert store.put(block(link))
    [body] = [one for one in world.bucket.paths(links[1].hash.hex()) if "/after/" not in one]
    world.bucket.objects().delete(body)
    reader.look_up(SCOPE, links[:1], LAYOUT)
    assert reader.find(keys(links[1:]))
    assert reader.read(header(links[1])) is None
    assert not world.bucket.paths("/after/")


# Bounds


def test_a_process_without_a_janitor_leaves_a_bounded_number_of_logs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uses, "_MOST_LOGS", 6)
    bucket = Bucket()
    log = UseLog(bucket.objects(), SECRET)
    for number in range(10):
        log.add(number, 0)
        log.write()
    log.write()
    assert len(bucket.paths("uses/")) == uses._MOST_LOGS


def test_uses_that_could_not_be_logged_are_in_the_next_log() -> None:
    bucket = Bucket()
    objects = bucket.objects()
    log = UseLog(objects, SECRET)
    log.add(7, 0)

    def fail(_: str) -> None:
        raise UnavailableError

    objects.before = fail
    with pytest.raises(UnavailableError):
        log.write()
    objects.before = lambda _: None
    log.add(8, 1)
    log.write()
    [listed] = objects.listed("uses", 9)
    assert list(Numbers(objects, SECRET).read(listed)) == [8, 7]


def test_uses_are_logged_once_a_minute_however_many_there_are(world: World) -> None:
    store = world.replica()
    links = chain(40 * 256, 1)
    for link in links:
        store.put(block(link))
    assert len(world.bucket.paths("uses/")) == 1
    world.clock.advance(LOG_SECONDS)
    store.touch(keys(links))
    assert len(world.bucket.paths("uses/")) == 2


class Many(Process):
    """An object store of many objects, made up page by page."""

    n_objects = 0

    def pages(self, folder: str = "") -> Iterator[list[Listed]]:
        if folder:
            yield from super().pages(folder)
            return
        self.calls["pass"] += 1
        for start in range(0, self.n_objects, 100):
            yield [self.made_up(number) for number in range(start, start + 100)]

    def made_up(self, number: int) -> Listed:
        """The object of 1 MiB with a number, written in another order."""
        written = datetime.fromtimestamp(number * 37 % self.n_objects, UTC)
        path = f"{'0' * 64}/{'1' * 32}-{'2' * 16}/{number:064x}.full"
        return Listed(path, 1 << 20, written)


def many(n_objects: int) -> Many:
    """That many, of each of which a use is known."""
    objects = Many(Bucket())
    objects.n_objects = n_objects
    objects.create(f"tenants/{'1' * 32}", bytes(48))
    names = sorted(name_of(objects.made_up(number).path) for number in range(n_objects))
    table = array("Q", [*names, *[0] * n_objects])
    Numbers(objects, SECRET).create("janitor/uses/0", table)
    return objects


def held(objects: Many, max_bytes: int) -> Janitor:
    """A janitor that has the lease."""
    lease = Lease(objects, clock=FakeClock())
    assert lease.acquire()
    return Janitor(objects, SECRET, lease, max_bytes)


@pytest.mark.process
def test_memory_for_an_object_is_bounded() -> None:
    in_own_process("tests.unit.adapters.test_janitor:peaks_of_memory")


def peaks_of_memory() -> None:
    """Three thousand more objects raise the peak by no more than they are counted for."""
    janitor_module._CHUNK = 256  # of this process only
    peaks = []
    for n_objects in (1000, 4000):
        janitor = held(many(n_objects), n_objects << 20)
        tracemalloc.start()
        try:
            janitor.run()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] - peaks[0] <= 3000 * OBJECT_BYTES


def test_requests_for_many_objects_are_bounded() -> None:
    n_objects = 3000
    objects = many(n_objects)
    assert not held(objects, n_objects << 20).run().evicted
    assert objects.calls["pass"] == 1  # nothing to delete
    objects = many(n_objects)
    report = held(objects, (n_objects - 1000) << 20).run()
    assert report.evicted == {"blocks": 1000 + (n_objects - 1000) // 20}
    assert objects.calls["pass"] == 2
    assert objects.calls["delete_all"] <= 1100 // 1000 + 2


@pytest.mark.parametrize(
    ("grown", "left", "seconds"), [(100, 950, 300), (10, 950, 3000), (2000, 1000, 0), (-5, 10, inf)]
)
def test_the_next_pass_is_when_the_budget_will_be_reached(
    grown: int, left: int, seconds: float
) -> None:
    last = Report(9, 900, 1000)
    report = Report(9, left, 1000, freed_bytes=900 + grown - left)
    assert seconds_to_fill(400.0, last, report, 1000.0) == seconds


@given(
    st.dictionaries(st.integers(0, 30), st.integers(1, 19)),
    st.dictionaries(st.integers(0, 30), st.integers(1, 19)),
)
def test_a_table_has_the_latest_uses(old: dict[int, int], new: dict[int, int]) -> None:
    table = UseTable().merged(old).merged(new)
    right = {name: max(old.get(name, 0), new.get(name, 0)) for name in old.keys() | new.keys()}
    assert {name: table.mark(name) for name in range(31)} == {
        name: right.get(name, 0) for name in range(31)
    }
    again = UseTable.of(table.kept())
    assert dict(zip(again.names, again.used, strict=True)) == right
    nothing = UseTable.of(replaced(table).kept())
    assert len(nothing) == 0


def replaced(table: UseTable) -> UseTable:
    """One of which nothing was marked."""
    return UseTable(table.names, table.used)


# In a server


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A janitor of a server that waits for nothing between two pages."""
    monkeypatch.setattr(janitor_module, "_PAUSE", 0)


@pytest.mark.usefixtures("hurried")
def test_a_store_that_fails_is_reported_once_and_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However slow the machine is, the lease does not end on a clock that stands still.
    monkeypatch.setattr(janitor_module, "Lease", partial(Lease, clock=FakeClock()))
    objects, heard = Bucket().objects(), list[str]()

    def fail(_: str) -> None:
        raise UnavailableError("gone")

    objects.before = fail
    janitor = BackgroundJanitor(objects, SECRET, BODY, heard.append, lease_seconds=0.01)
    try:
        while janitor.counts().get("failed passes", 0) < 3:
            janitor._stop.wait(0.01)
        objects.before = lambda _: None
        while not janitor.counts().get("passes"):
            janitor._stop.wait(0.01)
    finally:
        janitor.close()
    assert len(heard) == 1
    assert "gone" in heard[0]


@pytest.mark.usefixtures("hurried")
def test_of_two_servers_one_keeps_the_budget_and_both_stop(world: World) -> None:
    store = world.replica()
    save(store, 8 * 256, 1)
    heard: list[str] = []
    janitors = [
        BackgroundJanitor(world.bucket.objects(), SECRET, 5 * BODY, heard.append) for _ in range(2)
    ]
    try:
        while not heard:
            janitors[0]._stop.wait(0.01)
    finally:
        for one in janitors:
            one.close()
    assert sorted(one.counts().get("passes", 0) for one in janitors) == [0, 1]
    assert world.bucket.bytes_of("/") <= 5 * BODY
    assert "evicted" in heard[0]


def test_what_is_small_is_not_reported_as_nothing() -> None:
    text = str(Report(3, 700, 2 << 20, freed_bytes=20 << 10, evicted={"blocks": 1}))
    assert text == "evicted 1 blocks, 20 KiB; 700 bytes of 2 MiB in 3 objects remain"


def test_a_command_says_at_once_that_another_process_has_the_lease(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(64)))
    secret.chmod(0o600)
    url = (tmp_path / "bucket").as_uri()
    settings = Settings(remote=url, fleet_secret=secret, remote_bytes=1 << 20)
    other, said = Lease(Objects.open(url)), list[str]()
    assert other.acquire()

    def wait(_: float) -> None:
        assert len(said) == 1
        other.renew()

    assert evict_remote(settings, wait, said.append) is None
    assert "lease" in said[0]
