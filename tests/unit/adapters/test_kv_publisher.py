"""KV cache events on a real socket: a reader of vLLM's events knows what the store has."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.adapters.stores.memory import MemoryStore
from semantic.composition.process_stores import open_events
from semantic.domain.block_hash import BlockHash, BlockLink
from semantic.domain.errors import InvalidRequestError, OperatorError
from semantic.domain.stored import Tier
from semantic_fleet import kv_publisher
from semantic_fleet.kv_publisher import (
    Change,
    KVPublisher,
    Removed,
    Stored,
    events_of,
    replay_endpoint,
)
from tests.support.kv_subscriber import AllBlocksCleared, BlockRemoved, BlockStored, Subscriber
from tests.support.ports import free_port
from tests.support.store_blocks import SCOPE, block, blocks, chain, header, keys, scope_of

pytestmark = pytest.mark.process

LINKS = chain(4 * 256)
NAMESPACE = SCOPE.namespace


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path has at most 107 bytes
        yield f"ipc://{folder}/events"


@contextmanager
def subscribed(endpoint: str, topic: str = "") -> Iterator[Subscriber]:
    reader = Subscriber(endpoint, topic)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def publishing(endpoint: str, topic: str = "", most_waiting: int = 100) -> Iterator[KVPublisher]:
    publisher = KVPublisher(endpoint, topic, most_waiting=most_waiting)
    try:
        yield publisher
    finally:
        publisher.close()


def ids(links: list[BlockLink]) -> set[int]:
    return {int.from_bytes(link.hash[-8:], "big") for link in links}


def holding(memory: list[BlockLink], disk: list[BlockLink]) -> dict[str, set[int]]:
    return {"CPU": ids(memory), "STORAGE": ids(disk)}


def begin(publisher: KVPublisher, tiers: dict[Tier, MemoryStore | DiskStore]) -> None:
    """Begin once the router has come: what is sent before does not reach it."""
    assert publisher._publishes.poll(10_000)
    publisher.begin(NAMESPACE, tiers)


def test_it_begins_with_what_is_stored_and_follows_every_change(
    endpoint: str, tmp_path: Path
) -> None:
    """After a restart the disk has blocks: a router that knew more forgets it first."""
    with publishing(endpoint) as publisher, subscribed(endpoint) as router:
        disk = DiskStore.open(tmp_path / "store", 1 << 24, observer=publisher)
        memory = MemoryStore(1 << 24, secret=disk.secret, observer=publisher)
        for one in blocks(LINKS[:3]):
            disk.put(one)
        begin(publisher, {Tier.MEMORY: memory, Tier.DISK: disk})
        router.read(until=holding([], LINKS[:3]))
        assert router.events[0] == AllBlocksCleared()
        first = router.events[1]
        assert isinstance(first, BlockStored)
        assert first.parent_block_hash is None
        assert tuple(first.token_ids) == tuple(t for link in LINKS[:3] for t in link.tokens)
        assert first.block_size == 256
        for one in blocks(LINKS):
            memory.put(one)
        router.read(until=holding(LINKS, LINKS[:3]))
        last = router.events[-1]
        assert isinstance(last, BlockStored)
        disk.drop(keys(LINKS[2:3]))
        router.read(until=holding(LINKS, LINKS[:2]))
        [gone] = ids(LINKS[2:3])
        assert router.events[-1] == BlockRemoved([gone], "STORAGE")
        memory.release(1 << 24)
        router.read(until=holding([], LINKS[:2]))
        assert router.numbers == list(range(len(router.numbers)))
        disk.close()


def test_a_router_that_comes_later_learns_all_that_is_stored(endpoint: str) -> None:
    with publishing(endpoint, topic="kv") as publisher:
        memory = MemoryStore(1 << 24, observer=publisher)
        publisher.begin(NAMESPACE, {Tier.MEMORY: memory})
        with subscribed(endpoint, "kv") as early:
            for one in blocks(LINKS):
                memory.put(one)
            early.read(until=holding(LINKS, []))
            with subscribed(endpoint, "kv") as late:
                late.read(until=holding(LINKS, []))
                assert AllBlocksCleared() not in late.events


def test_branches_and_another_tiers_gaps_are_all_listed(endpoint: str, tmp_path: Path) -> None:
    with publishing(endpoint) as publisher, subscribed(endpoint) as router:
        disk = DiskStore.open(tmp_path / "store", 1 << 24)
        memory = MemoryStore(1 << 24, secret=disk.secret)
        branch = list(SCOPE.chain(LINKS[3].tokens, parent=LINKS[1].hash, start=512))
        for one in blocks([*LINKS[1:2], *branch]):
            memory.put(one)
        for one in blocks([*LINKS[:1], *LINKS[2:]]):
            disk.put(one)
        begin(publisher, {Tier.MEMORY: memory, Tier.DISK: disk})
        expected = holding([*LINKS[1:2], *branch], [*LINKS[:1], *LINKS[2:]])
        router.read(until=expected)
        assert known_before_followed(router)
        disk.close()


def known_before_followed(router: Subscriber) -> bool:
    """Whether each block's parent was published before it."""
    known: set[int | bytes | None] = {None}
    for event in router.events:
        if isinstance(event, BlockStored):
            if event.parent_block_hash not in known:
                return False
            known.update(event.block_hashes)
    return True


class SlowTier(MemoryStore):
    """A tier whose listing waits."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.may_list = threading.Event()

    def roots(self, namespace: bytes) -> frozenset[BlockHash]:
        assert self.may_list.wait(60)
        return super().roots(namespace)


def test_what_the_queue_cannot_take_is_listed_later_and_nothing_waits(endpoint: str) -> None:
    with publishing(endpoint, most_waiting=2) as publisher, subscribed(endpoint) as router:
        tier = SlowTier()
        begin(publisher, {Tier.MEMORY: tier})  # its thread waits in the listing
        while publisher._begins_anew:
            time.sleep(0.001)
        taken = []
        for one in blocks(LINKS):
            tier.put(one)
            taken.append(publisher.stored(one.header, Tier.MEMORY))
        tier.drop(keys(LINKS[3:]))
        taken.append(publisher.removed(LINKS[3].hash, Tier.MEMORY))
        assert taken == [True, True, False, False, False]
        tier.may_list.set()
        router.read(until=holding(LINKS[:3], []))
        while router.events.count(AllBlocksCleared()) < 2:
            router.read()
        router.read(until=holding(LINKS[:3], []))


def test_missed_messages_are_sent_again(endpoint: str) -> None:
    with publishing(endpoint, "topic") as publisher, subscribed(endpoint, "topic") as router:
        memory = MemoryStore(1 << 24, observer=publisher)
        begin(publisher, {Tier.MEMORY: memory})
        for n, one in enumerate(blocks(LINKS), 1):
            memory.put(one)
            router.read(until=holding(LINKS[:n], []))
        again = router.replayed(replay_endpoint(endpoint), 2)
        assert [number for number, _ in again] == router.numbers[2:]
        assert [one for _, batch in again for one in batch.events] == router.events[2:]
        assert router.replayed(replay_endpoint(endpoint), 1000) == []


class Unread:
    """A socket whose clients each ask for everything and read nothing."""

    def __init__(self, n_clients: int) -> None:
        self.n_clients = n_clients
        self.sent: list[tuple[object, bool]] = []

    def recv_multipart(self) -> list[bytes]:
        self.n_clients -= 1
        return [b"client %d" % self.n_clients, b"", bytes(8)]

    def send_multipart(self, parts: tuple[object, ...], _: int = 0, *, copy: bool = True) -> None:
        self.sent.append((parts[-1], copy))


def test_clients_that_read_no_replay_share_one_copy_of_it(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread = Unread(3)
    with publishing(endpoint) as publisher:
        for n in range(2):
            publisher._send([kv_publisher.BlockRemoved([n], "CPU")])
        monkeypatch.setattr(publisher, "_replays", unread)
        for _ in range(3):
            publisher._answer_replay()
        monkeypatch.undo()
    payloads = [one for one in unread.sent if one[0] != b""]
    assert len(payloads) == 3 * 2
    assert len({id(payload) for payload, _ in payloads}) == 2
    assert not any(copy for _, copy in payloads)


def test_another_models_blocks_are_not_published(endpoint: str) -> None:
    with publishing(endpoint) as publisher, subscribed(endpoint) as router:
        memory = MemoryStore(1 << 24, observer=publisher)
        for one in blocks(chain(256, scope=scope_of(model="other"))):
            memory.put(one)
        begin(publisher, {Tier.MEMORY: memory})
        for one in blocks([*chain(256, scope=scope_of(model="other")), LINKS[0]]):
            memory.put(one)
        router.read(until=holding(LINKS[:1], []))
        assert sum(isinstance(one, BlockStored) for one in router.events) == 1


def test_equal_prompts_of_two_tenants_have_other_names() -> None:
    ours, theirs = (chain(256, scope=scope_of(tenant=one))[0] for one in ("a", "b"))
    events = events_of([Stored(header(one), Tier.MEMORY) for one in (ours, theirs)])
    names = [one.block_hashes for one in events if isinstance(one, kv_publisher.BlockStored)]
    assert names[0] != names[1]


def test_runs_become_one_event_and_others_do_not() -> None:
    heads = [header(link) for link in LINKS]
    changes: list[Change] = [
        Stored(heads[0], Tier.MEMORY),
        Stored(heads[1], Tier.MEMORY),
        Stored(heads[2], Tier.DISK),
        Stored(heads[0], Tier.DISK),
        Removed(LINKS[1].hash, Tier.DISK),
        Removed(LINKS[0].hash, Tier.DISK),
        Removed(LINKS[0].hash, Tier.MEMORY),
    ]
    events = [
        one for one in events_of(changes) if not isinstance(one, kv_publisher.AllBlocksCleared)
    ]
    assert [len(one.block_hashes) for one in events] == [2, 1, 1, 2, 1]


def test_nothing_is_taken_before_the_beginning_and_after_the_end(endpoint: str) -> None:
    publisher = KVPublisher(endpoint)
    one = block(LINKS[0])
    assert publisher.stored(one.header, Tier.MEMORY)
    publisher.close()
    assert publisher.removed(LINKS[0].hash, Tier.MEMORY)
    publisher.listed_anew()
    with publishing(endpoint):
        """The address is free again."""


@pytest.mark.parametrize(
    "given",
    ["5557", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65535", "udp://h:1", "ipc://",
     "tcp://a b:1", "tcp://127.0.0.1:1;tcp://0.0.0.0:2"],
)  # fmt: skip
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(InvalidRequestError, match="must be tcp://HOST:PORT or ipc://PATH"):
        KVPublisher(given)


@pytest.mark.parametrize(
    ("given", "second"),
    [("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"), ("tcp://[::1]:7", "tcp://[::1]:8"),
     ("ipc:///a/b", "ipc:///a/b-replay")],
)  # fmt: skip
def test_the_second_address_follows_from_the_first(given: str, second: str) -> None:
    assert replay_endpoint(given) == second


def test_an_address_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OperatorError, match=f"kv_events: cannot bind tcp://127.0.0.1:{port}"):
            KVPublisher(f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_address_that_others_reach_is_warned_of(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    open_events(f"tcp://{host}:{free_port(2)}", "").close()
    assert ("every prompt" in caplog.text) == (host == "0.0.0.0")
