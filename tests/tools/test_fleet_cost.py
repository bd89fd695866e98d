"""The simulation of fleets: requests as the remote tier makes them, and where blocks are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from obstore.store import MemoryStore as ObjectsInMemory
from typing_extensions import Buffer

from benchmarks.fleet_requests import (
    Replicas,
    Routing,
    Session,
    end_of_turn,
    look_up,
    moved,
    read,
    residence,
)
from semantic.domain.stored import BlockLayout
from semantic_fleet.objects import sealing
from semantic_fleet.objects.objects import Objects
from semantic_fleet.objects.remote_store import RemoteStore
from tests.support.store_blocks import LAYOUT, SCOPE, Room, block, chain, header, manifest

SECRET = bytes(range(32))


class Counted(Objects):
    """An object store whose requests for blocks and agents are counted by their method."""

    def __init__(self) -> None:
        super().__init__(ObjectsInMemory())
        self.requests: Counter[str] = Counter()

    def size(self, path: str) -> int | None:
        self._count("HEAD", path)
        return super().size(path)

    def get(self, path: str) -> Buffer:
        self._count("GET", path)
        return super().get(path)

    def read(self, path: str, start: int, stop: int) -> Buffer:
        self._count("GET", path)
        return super().read(path, start, stop)

    def create(self, path: str, data: Buffer) -> bool:
        self._count("PUT", path)
        return super().create(path, data)

    def listed(self, folder: str, most: int) -> list:  # type: ignore[type-arg]
        self._count("LIST", folder)
        return super().listed(folder, most)

    def delete(self, path: str) -> None:
        self._count("DELETE", path)
        super().delete(path)

    def delete_all(self, paths: Sequence[str]) -> None:
        self._count("DELETE", paths[0])
        super().delete_all(paths)

    def _count(self, method: str, path: str) -> None:
        if path.startswith(SCOPE.namespace.hex()):  # not those for keys, nor once a minute
            self.requests[method] += 1


@pytest.mark.parametrize(
    ("n_blocks", "start", "n_stored"), [(20, 0, 0), (20, 0, 20), (20, 7, 12), (100, 3, 4)]
)
def test_a_look_up_asks_as_often_as_the_remote_tier(
    n_blocks: int, start: int, n_stored: int
) -> None:
    objects, links = Counted(), chain(n_blocks * 256)
    writer, reader = RemoteStore(objects, SECRET), RemoteStore(objects, SECRET)
    for link in links[:n_stored]:
        writer.put(block(link))
    objects.requests.clear()
    reader.look_up_agent(SCOPE, "ann")
    reader.look_up(SCOPE, links, LAYOUT, start)
    assert objects.requests == look_up(n_blocks, start, n_stored)
    for store in (writer, reader):
        store.close()


def test_turns_moves_and_reads_ask_as_often_as_the_remote_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sealing, "CHUNK", 4096)
    objects, links = Counted(), chain(3 * 256 + 9)
    store, other = RemoteStore(objects, SECRET), RemoteStore(objects, SECRET)
    record = Counter(PUT=1)  # of the turn, by `Records`
    for is_first in (True, False):
        for link in links:
            store.put(block(link))
        store.agents.save(manifest("ann", 3 * 256 + 9))
        expected = end_of_turn(3 if is_first else 0, has_tail=is_first, is_first=is_first)
        assert objects.requests == +(expected - record)
        objects.requests.clear()
    later = chain(3 * 256 + 90)
    store.put(block(later[-1]))
    store.agents.save(manifest("ann", 3 * 256 + 90))
    expected = end_of_turn(0, has_tail=True, is_first=False, replaces_tail=True)
    assert objects.requests == +(expected - record)
    objects.requests.clear()
    other.look_up_agent(SCOPE, "ann")
    other.look_up(SCOPE, links, LAYOUT)
    assert objects.requests == look_up(3, 0, 3) + moved(n_turns=0)
    large = BlockLayout("20 chunks", full=(20 * 4096 // 256,))
    [other_link] = chain(256, seed=1)
    store.put(block(other_link, layout=large))
    objects.requests.clear()
    monkeypatch.setattr("benchmarks.fleet_requests.CHUNK", 4096)
    for link, layout in ((links[1], LAYOUT), (other_link, large)):
        room = Room(header(link, layout=layout), layout)
        store.read_into([room.read])
        assert objects.requests == read(1, len(block(link, layout=layout).body))
        objects.requests.clear()
    for one in (store, other):
        one.close()


FOUR: Session = [
    (0.0, "0/", (1, 2), 512),
    (10.0, "0/", (1, 2, 3), 768),
    (20.0, "0/", (1, 2, 3, 4), 1024),
    (100.0, "0/", (1, 2, 9), 768),
]
"""A session of four requests: when, of which agent, its blocks, its tokens."""


def replicas(routing: Routing, bucket_seconds: float = 1e6, uploaded: float = 1.0) -> Replicas:
    return Replicas(routing, 10_000, 0.0, 1e12, 1, bucket_seconds, uploaded, seed=1)


def test_blocks_are_found_where_they_were_used_or_in_the_bucket() -> None:
    home, anywhere = (replicas(one).run([FOUR], 1e6) for one in ("affinity", "random"))
    assert home.ceiling == anywhere.ceiling == 7
    assert (home.local, home.read, home.computed, home.uploaded) == (7, 0, 5, 5)
    assert (anywhere.local, anywhere.read, anywhere.computed, anywhere.uploaded) == (0, 7, 5, 5)
    assert anywhere.requests["GET"] == 7 + sum(2 + turns for turns in (1, 2, 3))
    alone = replicas("random", bucket_seconds=0).run([FOUR], 1e6)
    assert (alone.local, alone.read, alone.computed) == (0, 0, 12)
    assert replicas("affinity").run([FOUR], 15.0).local == 5
    assert replicas("random", uploaded=0.0).run([FOUR], 1e6).read == 0


def test_a_store_keeps_blocks_for_some_time_after_their_last_use() -> None:
    gaps = replicas("affinity").gaps([FOUR])
    assert sorted(gaps) == [(10.0, 5), (80.0, 2), (float("inf"), 5)]
    assert residence(gaps, 10.0) == 120
    assert residence(gaps, 100.0) == 50 + 160 + 500


def test_what_waits_to_be_uploaded_is_found_nowhere_else_and_is_lost_with_its_replica() -> None:
    late = Replicas("random", 10_000, 0.0, 1.0, 15, 1e6, seed=1).run([FOUR], 1e6)
    assert late.read == 2
    lost = Replicas("affinity", 1, 1e9, 1.0, 15, 1e6, seed=1).run([FOUR], 1e6)
    assert (lost.local, lost.read) == (0, 0)
    kept = Replicas("affinity", 1, 1e9, 1e12, 15, 1e6, seed=1).run([FOUR], 1e6)
    assert (kept.local, kept.read) == (0, 7)
