"""The remote tier: what it asks of an object store, what it does when that fails, and its keys."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.exceptions import GenericError
from obstore.store import LocalStore as ObjectsInFolder
from obstore.store import MemoryStore as ObjectsInMemory

from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.disk.entries import DamagedError, MismatchError
from semantic.application.cache.prefix_lookup import Discovery, window_links
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import require_shared, shared_place, shared_store
from semantic.domain.block_hash import Part, Scope, tenant_tag
from semantic.domain.errors import InvalidRequestError
from semantic.domain.prefix import ends_of_turn
from semantic.domain.stored import BlockLayout
from semantic_fleet.fleet_store import FleetStore, require_objects
from semantic_fleet.objects import sealing
from semantic_fleet.objects.objects import Objects, SharedFolder, UnavailableError
from semantic_fleet.objects.remote_store import RemoteStore
from semantic_fleet.objects.sealing import (
    CHUNK,
    SealingMemory,
    Vault,
    contents_bytes,
    seal,
    sealed_bytes,
    unsealed,
)
from semantic_fleet.objects.uses import EVICTED
from tests.support.fake_backend import FakeBackend
from tests.support.fake_clock import FakeClock
from tests.support.paged_sequences import spec_of
from tests.support.store_blocks import (
    LAYOUT,
    SCOPE,
    Room,
    block,
    chain,
    header,
    keys,
    manifest,
    scope_of,
    text,
)

pytestmark = pytest.mark.process

if TYPE_CHECKING:
    from typing_extensions import Buffer

SECRET, KEY, NAME = bytes(range(32)), bytes(range(1, 33)), b"i" * 32


class Counted(Objects):
    """An object store in memory whose calls are counted, and fail from a call on."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        super().__init__(ObjectsInMemory(), clock=clock or FakeClock())
        self.calls: Counter[str] = Counter()
        self.threads: set[threading.Thread] = set()
        self.fails: Exception | None = None

    def size(self, path: str) -> int | None:
        self._called("size")
        return super().size(path)

    def listed(self, folder: str, most: int) -> list:  # type: ignore[type-arg]
        if folder != EVICTED:  # asked for once a minute
            self._called("listed")
        return super().listed(folder, most)

    def get(self, path: str) -> Buffer:
        self._called("get")
        return super().get(path)

    def read(self, path: str, start: int, stop: int) -> Buffer:
        self._called("read")
        return super().read(path, start, stop)

    def delete(self, path: str) -> None:
        self._called("delete")
        super().delete(path)

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        self.threads.add(threading.current_thread())
        if self.fails is not None:
            with self._attempt():
                self.calls["failed"] += 1
                raise self.fails


# Looking up


@pytest.mark.parametrize("n_stored", [0, 1, 2, 199, 390, 391])
def test_the_end_of_a_chain_of_100k_tokens_is_found_with_ten_look_ups(n_stored: int) -> None:
    objects = Counted()
    writer = RemoteStore(objects, SECRET)
    links = chain(391 * 256)
    for link in links[:n_stored]:
        assert writer.put(block(link))
    reader = RemoteStore(objects, SECRET)
    objects.calls.clear()
    reader.look_up(SCOPE, links, LAYOUT)
    assert set(reader.find(keys(links))) == set(keys(links[:n_stored]))
    assert objects.calls["size"] <= 10
    assert objects.calls["listed"] <= 1
    reader.look_up(SCOPE, links, LAYOUT)
    assert objects.calls["size"] <= 11  # only what comes next is asked for again
    for store in (reader, writer):
        store.close()


def test_what_other_tiers_have_is_not_asked_for() -> None:
    objects, links = Counted(), chain(20 * 256)
    writer, reader = RemoteStore(objects, SECRET), RemoteStore(objects, SECRET)
    for link in links[:12]:
        writer.put(block(link))
    objects.calls.clear()
    reader.look_up(SCOPE, links, LAYOUT, start=11)
    assert set(reader.find(keys(links))) == {links[11].key(Part.FULL)}
    for store in (reader, writer):
        store.close()


STATES = BlockLayout(LAYOUT.name, LAYOUT.full, LAYOUT.window, 512, needs_checkpoint=True)


@pytest.mark.parametrize(
    ("n_blocks", "at", "is_found"),
    [(20, 256 * 18 + 3, True), (20, 700, False), (60, 4096, True), (391, 4096, True)],
)
def test_tails_checkpoints_and_windows_are_found_by_the_block_before(
    n_blocks: int, at: int, *, is_found: bool
) -> None:
    """A checkpoint up to some blocks before the end of what is stored too, and further back those
    of the grid."""
    objects, links = Counted(), chain(n_blocks * 256)
    writer, reader = RemoteStore(objects, SECRET), RemoteStore(objects, SECRET)
    tail = chain(at)[-1]
    for link in (*links, tail):
        assert writer.put(block(link))
    assert writer.put(block(tail, Part.CHECKPOINT))
    window = window_links(STATES, chain(at))
    for link in window:
        assert writer.put(block(link, Part.WINDOW))
    objects.calls.clear()
    reader.look_up(SCOPE, links, STATES)
    found = reader.find([link.key(Part.WINDOW) for link in window])
    assert len(found) == (len(window) if is_found else 0)
    assert [one.key for one in reader.nearest(tail.parent, Part.CHECKPOINT, tail.tokens)] == (
        [tail.key(Part.CHECKPOINT)] if is_found else []
    )
    assert objects.calls["listed"] <= 17 + n_blocks // 16
    for store in (reader, writer):
        store.close()


def test_of_many_that_follow_a_block_those_that_the_prompt_begins_with_are_looked_at() -> None:
    """Agents that share a beginning each store what follows it; none of theirs hides an older
    checkpoint that the prompt can resume at."""
    objects, own = Counted(), chain(3 * 256 + 200)
    writer, reader = RemoteStore(objects, SECRET), RemoteStore(objects, SECRET)
    for link in own[:3]:
        assert writer.put(block(link))
    for seed in range(1, 61):
        other = [*SCOPE.chain((*text(768), *text(100, seed)))][-1]
        assert writer.put(block(other))
        assert writer.put(block(other, Part.CHECKPOINT))
    before = chain(3 * 256)[-1]
    junction = chain(3 * 256 + 90)[-1]
    for link in (before, junction):
        assert writer.put(block(link, Part.CHECKPOINT))
    objects.calls.clear()
    reader.look_up(SCOPE, own, STATES)
    found = reader.children(junction.parent, Part.CHECKPOINT)
    assert [one.key for one in found] == [junction.key(Part.CHECKPOINT)]
    assert objects.calls["get"] <= 10
    assert objects.calls["listed"] == 1
    writer.drop([junction.key(Part.CHECKPOINT)])
    writer.flush()
    fresh = RemoteStore(objects, SECRET)
    fresh.look_up(SCOPE, own, STATES)
    assert fresh.find([before.key(Part.CHECKPOINT)])
    for store in (reader, writer, fresh):
        store.close()


# Reading


@pytest.mark.parametrize("n_bodies", [1, 2, 8])
def test_eight_parts_are_read_at_once(n_bodies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one large body as of many."""
    monkeypatch.setattr(sealing, "CHUNK", 4096)
    monkeypatch.setattr(sealing, "READ_CHUNKS", 1)
    objects = Counted()
    store = RemoteStore(objects, SECRET)
    layout = BlockLayout("8 parts", full=(8 * 4096 // 256,))
    links = chain(n_bodies * 256)
    for link in links:
        assert store.put(block(link, layout=layout))
    at_once = threading.Barrier(8, timeout=60)

    def read(path: str, start: int, stop: int) -> Buffer:
        at_once.wait()
        return Objects.read(objects, path, start, stop)

    objects.read = read  # type: ignore[method-assign]
    rooms = [Room(header(link, layout=layout), layout) for link in links]
    assert store.read_into([room.read for room in rooms]) == [True] * n_bodies
    assert [room.body for room in rooms] == [block(link, layout=layout).body for link in links]
    store.close()


# What is known here and not true there


def flipped(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut by a byte": lambda data: data[:-1],
    "cut by many": lambda data: data[:-200],
    "cut to its frame": lambda data: data[:64],
    "flipped": flipped,
}


@pytest.mark.parametrize("damage", [*DAMAGES, "gone", "another block's"])
@pytest.mark.parametrize("at", [0, 5, 11, 12])  # the first, one, the last full block, the tail
def test_what_is_not_there_as_it_is_known_is_missed_once_and_written_again(
    damage: str, at: int
) -> None:
    """By who knew it, and by who looks it up now."""
    objects, links = Counted(), chain(12 * 256 + 30)
    writer, reader, fresh = (RemoteStore(objects, SECRET) for _ in range(3))
    for link in links:
        assert writer.put(block(link))
    reader.look_up(SCOPE, links, LAYOUT)
    assert set(reader.find(keys(links))) == set(keys(links))
    [path] = [one for one in paths(objects) if links[at].hash.hex() in one and "after" not in one]
    [other] = [one for one in paths(objects) if links[3].hash.hex() in one]
    if damage == "gone":
        objects.delete(path)
    elif damage in DAMAGES:
        objects.replace(path, DAMAGES[damage](bytes(objects.get(path))))
    else:
        objects.replace(path, objects.get(other))
    rooms = [Room(header(link)) for link in links]
    read = reader.read_into([room.read for room in rooms])
    assert [number for number, good in enumerate(read) if not good] == [at]
    for link, room, good in zip(links, rooms, read, strict=True):
        assert not good or room.body == block(link).body
    assert reader.lacking(keys(links)) == frozenset(keys(links[at : at + 1]))
    assert reader.put(block(links[at]))
    fresh.look_up(SCOPE, links, LAYOUT)
    for store in (reader, writer, fresh):
        assert [store.read(header(link)) for link in links] == [block(one).body for one in links]
        store.close()


def test_a_large_body_that_was_cut_is_damaged_and_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some of its parts begin behind the end of the object."""
    monkeypatch.setattr(sealing, "CHUNK", 4096)
    monkeypatch.setattr(sealing, "READ_CHUNKS", 1)
    objects, layout, [link] = Counted(), BlockLayout("8 parts", full=(8 * 4096 // 256,)), chain(256)
    store = RemoteStore(objects, SECRET)
    assert store.put(block(link, layout=layout))
    [path] = paths(objects)
    objects.replace(path, bytes(objects.get(path))[: 64 + 3 * (4096 + 16)])
    for _ in range(2):
        assert store.read(header(link, layout=layout)) is None
    [stats] = store.stats()
    assert stats.counts["damaged"] == 1
    assert not {"unavailable", "breaks"} & {name for name, n in stats.counts.items() if n}
    assert store.put(block(link, layout=layout))
    assert store.read(header(link, layout=layout)) == block(link, layout=layout).body
    store.close()


def test_a_store_that_hangs_costs_one_deadline_however_much_is_known() -> None:
    clock = FakeClock()
    objects, links = Counted(clock), chain(100 * 256)
    store = RemoteStore(objects, SECRET, clock=clock)
    for link in links:
        assert store.put(block(link))
    objects.fails = TimeoutError("operation timed out")
    objects.calls.clear()
    rooms = [Room(header(link)) for link in links]
    assert not any(store.read_into([room.read for room in rooms]))
    assert objects.calls["failed"] <= 8  # at once
    assert not any(store.read_into([room.read for room in rooms]))
    assert objects.calls["failed"] <= 8
    objects.fails = None
    clock.advance(2.0)
    assert all(store.read_into([room.read for room in rooms]))
    store.close()


def test_what_follows_a_block_that_is_gone_is_known_no_more() -> None:
    """Also when nothing was announced, as by an expiry of the bucket's own."""
    objects, links = Counted(), chain(100 * 256)
    store = RemoteStore(objects, SECRET)
    for link in links:
        assert store.put(block(link))
    for path in paths(objects):
        if any(link.hash.hex() in path for link in links[40:]):
            objects.delete(path)
    assert [store.read(header(link)) is not None for link in links[39:42]] == [True, False, False]
    assert len(store.lacking(keys(links))) == 2
    store.look_up(SCOPE, links, LAYOUT)
    assert store.lacking(keys(links)) == frozenset(keys(links[40:]))
    store.close()


# Failures


def test_one_timeout_opens_the_breaker_and_a_probe_closes_it() -> None:
    clock = FakeClock()
    objects = Counted(clock)
    store = RemoteStore(objects, SECRET)
    [link] = chain(256)
    assert store.put(block(link))
    objects.fails = TimeoutError("operation timed out")
    store.look_up(SCOPE, chain(256, 1), LAYOUT)
    assert objects.is_open
    objects.calls.clear()
    store.look_up(SCOPE, chain(512, 2), LAYOUT)
    store.look_up_agent(SCOPE, "ann")
    assert objects.calls["size"] <= 1
    assert store.read(header(link)) is None  # at once, though it is there
    assert store.lacking(keys(chain(256, 1))) == frozenset()
    assert not store.put(block(chain(256, 3)[0]))
    objects.fails = None
    clock.now += 2.0
    assert not objects.is_open
    assert store.read(header(link)) == block(link).body
    [stats] = store.stats()
    assert stats.counts["breaks"] == 1
    assert stats.counts["unavailable"] >= 2
    assert stats.counts["write_errors"] == 1
    store.close()


def test_what_cannot_be_reached_is_no_store() -> None:
    objects = Counted()
    store = RemoteStore(objects, SECRET)
    objects.fails = ConnectionRefusedError("refused")
    room = Room(header(chain(256)[0]))
    assert not store.put(block(chain(256)[0]))
    assert store.read_into([room.read]) == [False]
    assert not store.agents.save(manifest("a", 300))
    assert store.agents.manifest(SCOPE, "a") is None
    assert not store.agents.remove(SCOPE, "a")
    store.drop(keys(chain(256)))
    store.close()


def test_two_that_save_at_once_get_a_generation_each() -> None:
    objects = Counted()
    one, other = RemoteStore(objects, SECRET), RemoteStore(objects, SECRET)
    assert one.agents.save(manifest("a", 300))
    listed = objects.listed
    objects.listed = lambda *_: []  # type: ignore[method-assign]  # it has not seen the other's
    assert other.agents.save(manifest("a", 512))
    objects.listed = listed  # type: ignore[method-assign]
    found = other.agents.manifest(SCOPE, "a")
    assert found is not None
    assert found.generation == 2
    one.look_up_agent(SCOPE, "a")
    assert one.agents.manifest(SCOPE, "a") == found
    other.agents.remove(SCOPE, "a")
    other.flush()
    one.look_up_agent(SCOPE, "a")
    assert one.agents.manifest(SCOPE, "a") is None
    for store in (one, other):
        store.close()


def test_what_is_forgotten_is_deleted_on_another_thread() -> None:
    """Also what is being written at that moment."""
    objects = Counted()
    store = RemoteStore(objects, SECRET)
    queue = BackgroundStore(store, 1 << 20, forgets_at_once=True)
    first, second = chain(512)
    queue.put(block(first))
    queue.agents.save(manifest("ann", 256))
    queue.flush()
    n_before = len(paths(objects))
    objects.threads.clear()
    entered, goes_on, create = threading.Event(), threading.Event(), objects.create

    def held(path: str, data: Buffer) -> bool:
        entered.set()
        assert goes_on.wait(60)
        return create(path, data)

    objects.create = held  # type: ignore[method-assign]
    queue.put(block(second))
    assert entered.wait(60)
    queue.drop(keys([first, second]))
    assert queue.agents.remove(SCOPE, "ann")
    assert not queue.find(keys([first]))
    assert store.read(block(first).header) is None  # though it is still there
    assert queue.agents.manifest(SCOPE, "ann") is None
    store.look_up_agent(SCOPE, "ann")
    assert queue.agents.manifest(SCOPE, "ann") is None
    goes_on.set()
    queue.flush()
    assert threading.current_thread() not in objects.threads
    assert not queue.find(keys([first, second]))
    assert len(paths(objects)) == n_before - 2
    assert queue.put(block(first))
    assert queue.agents.save(manifest("ann", 256))
    queue.flush()
    assert len(paths(objects)) == n_before
    queue.close()


def paths(objects: Objects) -> list[str]:
    return [one.path for one in objects.listed(SCOPE.namespace.hex(), 999)]


def test_missing_credentials_are_said_with_the_variables_that_give_them() -> None:
    url = "http://169.254.169.254/latest/api/token"
    error = GenericError(f"Error performing PUT {url} in 1ms - Server returned code: 403 Forbidden")

    class Refused(Counted):
        def size(self, path: str) -> int | None:  # noqa: ARG002
            with self._attempt():
                raise error

    with pytest.raises(UnavailableError, match=r"no credentials.*AWS_ACCESS_KEY_ID"):
        Refused().size("x")


# What turns end with


def take_turn(store: RemoteStore, agent: str, n_tokens: int, prompt: int, seed: int = 0) -> None:
    """Put what a turn of a model with windows and states ends with, and save the agent."""
    own = replace(manifest(agent, n_tokens, seed), prompt_tokens=prompt)
    links = list(own.scope.chain(own.token_ids))
    for link in links:
        assert store.put(block(link))
    for link in {one.hash: one for one in (*ends_of_turn(own), links[-1])}.values():
        for part in (Part.WINDOW, Part.CHECKPOINT):
            assert store.put(block(link, part))
    assert store.agents.save(own)


def partial_objects(objects: Objects) -> int:
    """Bodies of partial blocks, and what these and checkpoints are found by."""
    full = {link.hash.hex() for link in chain(40 * 256)}
    names = (path.rsplit("/", 1)[-1] for path in paths(objects) if "/agents/" not in path)
    return sum(name.split(".")[0] not in full for name in names)


@pytest.mark.parametrize("moves", [False, True])
def test_what_the_turn_before_ended_with_is_deleted(*, moves: bool) -> None:
    """Also if another replica has served it, which has looked it up."""
    objects = Counted()
    stores = [RemoteStore(objects, SECRET) for _ in range(2)]
    seen = set()
    for turn in range(1, 41):
        store = stores[turn % 2 if moves else 0]
        n_tokens = 190 * turn
        store.look_up_agent(SCOPE, "ann")
        store.look_up(SCOPE, chain(n_tokens), STATES)
        take_turn(store, "ann", n_tokens, n_tokens - 90)
        seen.add(partial_objects(objects))
        assert store.find([chain(n_tokens)[-1].key(part) for part in Part]).keys() == {
            chain(n_tokens)[-1].key(part) for part in Part
        }
    assert max(seen) <= 10  # a turn's end, and its prompt's
    for store in stores:
        store.close()


def test_what_turns_of_several_agents_end_with_stays() -> None:
    """As agents of other processes do, of which this one knows nothing."""
    objects = Counted()
    one, other, third = (RemoteStore(objects, SECRET) for _ in range(3))
    take_turn(one, "ann", 300, 290)
    take_turn(other, "bob", 300, 290)
    take_turn(one, "ann", 400, 390)
    third.look_up(SCOPE, chain(300), STATES)
    [tail] = chain(300)[1:]
    assert third.find([tail.key(Part.FULL), tail.key(Part.CHECKPOINT)])
    assert third.read(header(tail)) == block(tail).body
    for store in (one, other, third):
        store.close()


def test_an_agent_that_knew_a_deleted_end_misses_it_and_can_write_it_again() -> None:
    objects = Counted()
    one, other = RemoteStore(objects, SECRET), RemoteStore(objects, SECRET)
    take_turn(one, "ann", 300, 290)
    other.look_up(SCOPE, chain(300), STATES)
    [tail] = chain(300)[1:]
    assert other.find([tail.key(Part.FULL)])
    take_turn(one, "ann", 600, 590)
    assert other.read(header(tail)) is None
    assert not other.find([tail.key(Part.FULL)])
    assert other.put(block(tail))
    assert other.read(header(tail)) == block(tail).body
    for store in (one, other):
        store.close()


def test_what_an_agent_may_return_to_or_has_nothing_newer_for_stays() -> None:
    """After a compaction; after a turn whose blocks were not stored, as the queue was full."""
    objects = Counted()
    store = RemoteStore(objects, SECRET)
    take_turn(store, "ann", 300, 290)
    take_turn(store, "ann", 280, 270, seed=1)
    [tail] = chain(300)[1:]
    assert store.read(header(tail)) == block(tail).body
    take_turn(store, "bob", 400, 390, seed=2)
    [end] = chain(400, seed=2)[1:]
    assert store.agents.save(replace(manifest("bob", 600, 2), prompt_tokens=590))
    for part in Part:
        assert store.read(header(end, part)) == block(end, part).body
    store.close()


def test_a_store_that_deletes_nothing_takes_the_next_turn() -> None:
    objects = Counted()
    store = RemoteStore(objects, SECRET)
    take_turn(store, "ann", 300, 290)

    def refuse(paths: Sequence[str]) -> None:  # noqa: ARG001
        raise UnavailableError

    objects.delete_all = refuse  # type: ignore[method-assign]
    take_turn(store, "ann", 600, 590)
    found = store.agents.manifest(SCOPE, "ann")
    assert found is not None
    assert found.generation == 2
    store.close()


# Keys


def test_a_tenant_whose_key_is_deleted_cannot_be_read_and_begins_anew() -> None:
    objects = Counted()
    store = RemoteStore(objects, SECRET)
    mine, others = chain(256), chain(256, scope=scope_of(tenant="other"))
    for links in (mine, others):
        assert store.put(block(links[0]))
    store.close()
    assert Vault(objects, SECRET).erase(SCOPE.tenant) == 1
    store = RemoteStore(objects, SECRET)
    fresh = RemoteStore(objects, SECRET)
    for one in (store, fresh):
        assert one.read(header(mine[0])) is None
        assert one.read(header(others[0])) == block(others[0]).body
    assert fresh.put(block(mine[0]))
    assert fresh.read(header(mine[0])) == block(mine[0]).body
    for one in (store, fresh):
        one.close()


def test_replicas_agree_on_a_key_and_learn_that_it_was_deleted() -> None:
    objects, clock = Counted(), FakeClock()
    one, other = (Vault(objects, SECRET, clock=clock) for _ in range(2))
    tag = tenant_tag(SECRET, "tenant")
    assert one.tenant(tag) == other.tenant(tag)
    assert one.tenant(tag) != one.tenant(tenant_tag(SECRET, "another"))
    before = one.tenant(tag)
    one.forget(tag)
    assert other.tenant(tag) == before
    clock.now += sealing.SALT_SECONDS
    assert other.tenant(tag) != before
    assert one.tenant(tag) == other.tenant(tag)
    assert Vault(objects, KEY).tenant(tag) != one.tenant(tag)
    assert before.key.hex() not in repr(before)


def test_a_damaged_salt_is_replaced() -> None:
    objects, tag = Counted(), tenant_tag(SECRET, "tenant")
    before = Vault(objects, SECRET).tenant(tag)
    [salt] = objects.listed("tenants", 9)
    objects.replace(salt.path, bytes(48))
    after = Vault(objects, SECRET).tenant(tag)
    assert after != before
    assert Vault(objects, SECRET).tenant(tag) == after


def test_small_objects_that_are_not_small_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = Counted()
    store = RemoteStore(objects, SECRET)
    store.put(block(chain(300)[1]))
    store.agents.save(manifest("ada", 300))
    store.close()
    monkeypatch.setattr("semantic_fleet.objects.objects._MOST_BYTES", 1 << 14)
    for page in list(objects.pages()):
        for one in page:
            objects.replace(one.path, bytes(1 << 20))
            assert bytes(objects.get(one.path)) == b""
    again = RemoteStore(objects, SECRET)
    again.look_up_agent(SCOPE, "ada")
    again.look_up(SCOPE, chain(300), LAYOUT)
    assert again.agents.manifest(SCOPE, "ada") is None
    assert again.lacking(keys(chain(300))) == frozenset(keys(chain(300)))
    again.close()


def test_objects_reveal_no_token_and_no_name() -> None:
    objects = Counted()
    store = RemoteStore(objects, SECRET)
    link = chain(300)[1]
    store.put(block(link))
    store.agents.save(manifest("the-agent", 300))
    folders = "tenants", SCOPE.namespace.hex()
    paths = [one.path for folder in folders for one in objects.listed(folder, 99)]
    assert len(paths) == 4
    for path in paths:
        data = bytes(objects.get(path))
        assert SCOPE.tenant.hex() not in path
        assert not any(secret in data for secret in (b"the-agent", SCOPE.tenant, SECRET))
        assert bytes(block(link).data())[:16] not in data
    store.close()


# Sealing


@pytest.mark.parametrize("n_bytes", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 9 * CHUNK + 5])
def test_what_is_sealed_comes_back(n_bytes: int) -> None:
    contents = bytes(range(251)) * (n_bytes // 251 + 1)
    sealed = seal(KEY, NAME, contents[:n_bytes])
    assert len(sealed) == sealed_bytes(n_bytes)
    assert contents_bytes(len(sealed)) == n_bytes
    assert unsealed(KEY, NAME, sealed) == contents[:n_bytes]
    assert sealed != seal(KEY, NAME, contents[:n_bytes])


@given(st.integers(0, sealed_bytes(300) - 1), st.integers(0, 7))
def test_no_bit_can_be_changed(at: int, bit: int) -> None:
    sealed = bytearray(seal(KEY, NAME, bytes(300)))
    sealed[at] ^= 1 << bit
    with pytest.raises(DamagedError):
        unsealed(KEY, NAME, sealed)


@pytest.mark.parametrize(("key", "name"), [(bytes(32), NAME), (KEY, bytes(32))])
def test_another_key_or_name_opens_nothing(key: bytes, name: bytes) -> None:
    with pytest.raises(MismatchError):
        unsealed(key, name, seal(KEY, NAME, bytes(300)))


def test_chunks_cannot_be_moved_or_left_out() -> None:
    sealed = bytes(seal(KEY, NAME, bytes(2 * CHUNK)))
    step = CHUNK + 16
    for changed in (
        sealed[:64] + sealed[64 + step :] + sealed[64 : 64 + step],
        sealed[: 64 + step],
        sealed[:64] + sealed[64 + step :],
    ):
        with pytest.raises((DamagedError, MismatchError)):
            unsealed(KEY, NAME, changed)


@pytest.fixture
def memory() -> Iterator[SealingMemory]:
    sealing_memory = SealingMemory()
    yield sealing_memory
    sealing_memory.close()
    assert not sealing_memory.n_bytes


def test_a_body_is_sealed_into_memory_that_another_one_was_in(memory: SealingMemory) -> None:
    for n_bytes in (9000, 300, 9000):
        contents = bytes([n_bytes % 251]) * n_bytes
        with memory.piece(sealed_bytes(n_bytes)) as piece:
            assert unsealed(KEY, NAME, seal(KEY, NAME, contents, piece)) == contents
        assert memory.n_bytes == sealed_bytes(9000)


def test_there_is_no_more_memory_than_was_used_at_once(memory: SealingMemory) -> None:
    for n_bytes in (100, 200, 400, 300):
        with memory.piece(n_bytes), memory.piece(n_bytes):
            pass
    assert memory.n_bytes == 2 * 400


def test_memory_is_not_used_again_after_an_error_or_while_something_refers_to_it(
    memory: SealingMemory,
) -> None:
    with pytest.raises(UnavailableError), memory.piece(100):
        raise UnavailableError  # a connection may still send from it
    assert not memory.n_bytes
    with memory.piece(100) as piece:
        held = memoryview(piece)
    assert not memory.n_bytes
    held.release()


def test_memory_for_sealing_is_given_back_when_nothing_is_sealed(memory: SealingMemory) -> None:
    with memory.piece(100):
        pass
    with memory.piece(100):
        pass
    memory.give_back_unused()
    assert memory.n_bytes == 100
    memory.give_back_unused()
    assert not memory.n_bytes


def test_what_an_object_store_in_this_process_holds_is_not_written_over() -> None:
    store, links = RemoteStore(Counted(), SECRET), chain(4 * 256)
    for link in links:
        assert store.put(block(link))
    for link in links:
        assert store.read(header(link)) == block(link).body
    store.close()


# Objects


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_all_objects_are_listed_in_pages_and_deleted_in_batches(kind: str, tmp_path: Path) -> None:
    in_folder = kind == "folder"
    objects = Objects.open(tmp_path.as_uri()) if in_folder else Objects(ObjectsInMemory())
    paths = [f"{folder}/x/{number}" for folder in ("a", "ab") for number in range(3)]
    for path in paths:
        assert objects.create(path, b"1234")
    assert sorted(one.path for page in objects.pages() for one in page) == sorted(paths)
    found = [one for page in objects.pages("a") for one in page]
    assert sorted(one.path for one in found) == sorted(paths[:3])
    assert {one.n_bytes for one in found} == {4}
    assert sorted(objects.folders()) == ["a", "ab"]
    assert objects.folders("a") == ["a/x"]
    assert bytes(objects.read(paths[0], 2, 9)) == b"34"
    assert bytes(objects.read(paths[0], 4, 9)) == b""
    with pytest.raises(FileNotFoundError):
        objects.read("a/x/none", 4, 9)
    assert not objects.breaks
    objects.delete_all([paths[0], "a/x/none", *paths[1:3]])
    assert sorted(one.path for page in objects.pages() for one in page) == sorted(paths[3:])
    assert list(objects.pages("none")) in ([], [[]])


# Settings


@pytest.fixture
def fleet(tmp_path: Path) -> Settings:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET * 2)
    secret.chmod(0o600)
    (tmp_path / "bucket").mkdir()
    return Settings(fleet_secret=secret, remote=(tmp_path / "bucket").as_uri())


def test_a_remote_store_needs_the_fleets_secret_and_a_url(fleet: Settings, tmp_path: Path) -> None:
    seconds, keeps_versions = require_shared(fleet).try_out()
    assert seconds > 0
    assert not keeps_versions
    assert not list((tmp_path / "bucket").rglob("*.*"))
    with pytest.raises(InvalidRequestError, match="fleet_secret_file"):
        shared_store(Settings(remote=fleet.remote))
    with pytest.raises(InvalidRequestError, match="remote_gb"):
        shared_store(Settings(remote_bytes=1))
    for url in ("bucket", "ftp://host/x", "http://host/x", ""):
        with pytest.raises(InvalidRequestError, match="remote_store"):
            shared_store(Settings(fleet_secret=fleet.fleet_secret, remote=url))


def test_stores_share_a_connection_to_one_place_as_one_user(
    fleet: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = shared_place(fleet)
    assert place is not None
    first, again = FleetStore(*place), FleetStore(*place)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://elsewhere.test")
    elsewhere = FleetStore(*place)
    assert first.objects is again.objects
    assert first.objects is not elsewhere.objects
    own = require_objects(fleet)[0]
    assert own not in (first.objects, elsewhere.objects)


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_folder_that_is_not_there_is_refused_and_not_made(
    kind: str, fleet: Settings, tmp_path: Path
) -> None:
    """As that of a network file system which is not mounted yet."""
    bucket = (tmp_path / "bucket").rename(tmp_path / "shared folder")
    if kind == "a file":
        (tmp_path / "bucket").touch()
    for opens in (shared_store, require_objects):
        with pytest.raises(
            InvalidRequestError, match=r"remote_store: .*bucket is not a folder; mount"
        ):
            opens(fleet)
    assert not (tmp_path / "bucket").is_dir()
    assert require_shared(replace(fleet, remote=bucket.as_uri())).try_out()[0] > 0  # with %20 in it
    for url in ("file://host/bucket", "file:bucket"):
        with pytest.raises(InvalidRequestError, match="remote_store: "):
            shared_store(replace(fleet, remote=url))


@pytest.mark.parametrize("how", ["gone", "not mounted"])
def test_a_mount_that_ends_is_missed_and_not_replaced_by_a_folder(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, mounted, clock, reports = tmp_path / "bucket", True, FakeClock(), list[str]()
    bucket.mkdir()
    monkeypatch.setattr(
        os.path, "ismount", lambda at: at == tmp_path.parent or (mounted and at == tmp_path)
    )
    local = ObjectsInFolder(bucket)
    folder = SharedFolder(bucket)
    store = RemoteStore(Objects(local, folder=folder, notify=reports.append, clock=clock), SECRET)
    first, second = chain(512)
    assert store.put(block(first))
    if how == "gone":
        bucket.rename(tmp_path / "elsewhere")
    else:  # the folder that it was mounted on is there, and empty
        mounted = False
        shutil.copytree(bucket, tmp_path / "elsewhere")
        shutil.rmtree(bucket)
        bucket.mkdir()
    assert store.read(header(first)) is None
    assert not store.put(block(second))
    assert not store.agents.save(manifest("ann", 256))
    assert not list(tmp_path.glob("bucket/*"))
    assert bucket.exists() == (how == "not mounted")
    assert [one.split(": ")[0] for one in reports] == [
        "the object store fails, so prefill replaces its blocks"
    ]
    if bucket.exists():
        bucket.rmdir()
    (tmp_path / "elsewhere").rename(bucket)
    mounted = True
    clock.advance(60)
    assert store.read(header(first)) == block(first).body
    assert store.put(block(second))
    assert reports[1:] == ["the object store answers again"]
    store.close()


def test_an_object_store_that_is_not_there_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any-secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    objects = Objects.open("s3://bucket/prefix")
    with pytest.raises(UnavailableError, match="Connection refused") as failed:
        objects.size("x")
    assert "\n" not in str(failed.value)
    assert "any-secret" not in str(failed.value)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """An S3 server that answers with the last of these: a status, and an error's code or, with 200,
    the version of an object."""
    answers: list[tuple[int, str]] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_PUT()

        def do_POST(self) -> None:
            self.do_PUT()

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, code = answers[-1]
            error = f"<?xml?>\n<Error><Code>{code}</Code><Message>so</Message></Error>"
            said = (
                error
                if status != 200
                else "<DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>"
            ).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(said)))
            self.send_header("etag", "1")
            if status == 200 and code:
                self.send_header("x-amz-version-id", code)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any-secret")
        yield answers
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "SignatureDoesNotMatch"),
        (403, "RequestTimeTooSkewed"),
        (400, "ExpiredToken"),
        (404, "NoSuchBucket"),
        (503, "SlowDown"),
    ],
)
def test_the_reason_of_a_server_is_in_the_error(
    refusing: list[tuple[int, str]], status: int, code: str
) -> None:
    refusing.append((status, code))
    objects = Objects.open("s3://bucket/prefix")
    for write in (objects.create, objects.replace):
        with pytest.raises(UnavailableError, match=f"{code}: so") as failed:
            write("x", b"data")
        assert "\n" not in str(failed.value)


def test_an_object_in_a_bucket_that_is_not_there_is_a_failure(
    refusing: list[tuple[int, str]],
) -> None:
    objects = Objects.open("s3://bucket/prefix")
    refusing.append((404, "NoSuchKey"))
    with pytest.raises(FileNotFoundError):
        objects.get("x")
    refusing.append((404, "NoSuchBucket"))
    with pytest.raises(UnavailableError, match="NoSuchBucket: so"):
        objects.get("x")


@pytest.mark.parametrize(
    ("version", "is_kept"), [("", False), ("null", False), ("3sL4kqtJlcpXroDTDmJ", True)]
)
def test_a_bucket_that_keeps_old_versions_is_known(
    refusing: list[tuple[int, str]], version: str, *, is_kept: bool
) -> None:
    refusing.append((200, version))
    assert Objects.open("s3://bucket/prefix").keeps_versions() is is_kept


@pytest.mark.parametrize(
    ("refused", "report"),
    [
        (lambda objects: objects.listed("x", 1), "cannot list"),
        (lambda objects: list(objects.pages("x")), "cannot list"),
        (lambda objects: objects.folders("x"), "cannot list"),
        (lambda objects: objects.delete("x"), "cannot delete"),
        (lambda objects: objects.delete_all(["x", "y"]), "cannot delete"),
    ],
)
def test_credentials_that_may_not_list_or_delete_are_reported_beside_writes_that_succeed(
    refusing: list[tuple[int, str]], refused: Callable[[Objects], object], report: str
) -> None:
    reports: list[str] = []
    objects = Objects.open("s3://bucket/prefix", reports.append)
    for _ in range(4):
        refusing.append((403, "AccessDenied"))
        with pytest.raises(UnavailableError, match="AccessDenied"):
            refused(objects)
        refusing.append((200, ""))
        objects.replace("x", b"data")
    (said,) = reports
    assert said.startswith(f"{report} ")
    assert "403 Forbidden: AccessDenied: so" in said
    if report == "cannot delete":
        refused(objects)
        assert reports[1:] == ["the object store deletes again"]


def test_an_outage_is_reported_at_most_once_a_minute_and_its_end_too() -> None:
    reports: list[str] = []
    clock = FakeClock()
    objects = Objects(ObjectsInMemory(), notify=reports.append, clock=clock)
    for n_reports in (2, 2, 4):
        for _ in range(9):
            with pytest.raises(UnavailableError), objects._attempt():
                raise OSError("out of order")
        clock.now += 31.0
        objects.replace("x", b"data")
        assert len(reports) == n_reports
    assert reports[-2:] == [
        "the object store fails, so prefill replaces its blocks: out of order",
        "the object store answers again",
    ]


def test_a_store_that_is_read_but_not_written_is_reported_too() -> None:
    """Reads go on: each closes the breaker."""
    reports: list[str] = []
    objects = Objects(ObjectsInMemory(), notify=reports.append, clock=FakeClock())
    for _ in range(5):
        with pytest.raises(UnavailableError), objects._attempt(writes=True):
            raise OSError("it is full")
        assert objects.size("x") is None
    assert reports == ["the object store accepts no writes: it is full"]
    objects.replace("x", b"data")
    assert reports[1:] == ["the object store accepts writes again"]


class Late:
    """A `LookUpPort` that answers when it is let."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = threading.Event()

    def look_up_agent(self, scope: Scope, agent_id: str) -> None:  # noqa: ARG002
        self.asked.append(agent_id)
        assert self.may_answer.wait(60)

    def look_up(self, *_: object) -> None:
        self.asked.append("blocks")


def test_a_request_does_not_wait_for_a_look_up_that_is_late() -> None:
    late, store = Late(), RemoteStore(Counted(), SECRET)
    discovery = Discovery(FakeBackend(spec_of(None)), store, late, seconds=0.01)
    asyncio.run(discovery.wait("ann", "", range(1024)))
    assert late.asked == ["ann"]
    late.may_answer.set()
    discovery.close()
    assert late.asked == ["ann", "blocks"]  # for later requests
    store.close()


def test_a_stop_does_not_wait_for_a_long_queue_of_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not uploaded in time is dropped: this machine has it."""
    clock, stopping = FakeClock(), threading.Event()

    class Slow(Counted):
        def create(self, path: str, data: Buffer) -> bool:
            assert stopping.wait(60)  # nothing is uploaded before the stop
            clock.now += 1.0
            return super().create(path, data)

    store, links = RemoteStore(Slow(), SECRET), chain(40 * 256)
    queue = BackgroundStore(store, 1 << 24, clock=clock, forgets_at_once=True, close_seconds=5.0)
    for link in links:
        assert queue.put(block(link))
    drain = queue._queue.drain

    def draining() -> None:
        stopping.set()
        drain()

    monkeypatch.setattr(queue._queue, "drain", draining)
    queue.close()
    counts = queue.stats()[0].counts
    assert 0 < counts["dropped"] < 40
    assert clock.now < 15.0
