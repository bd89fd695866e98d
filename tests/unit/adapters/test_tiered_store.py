"""Two stores as one: which of them answers, and what happens when one does not keep a thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from semantic.adapters.stores.memory import MemoryStore
from semantic.adapters.stores.tiered import SharedTiers, TieredStore
from semantic.domain.block_hash import BlockKey, Part, Scope
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import BlockHeader, Found, Manifest, Place, Tier
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
)

SECRET = b"s" * 32
PLENTY = 1 << 24


class OnDisk(MemoryStore):
    """Says that it is a disk."""

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        return {key: Found(one.n_bytes, Tier.DISK) for key, one in super().find(keys).items()}

    def prefetch(self, header: BlockHeader) -> bool:  # noqa: ARG002
        return False


class World:
    def __init__(self, warm_bytes: int = PLENTY, cold_bytes: int = PLENTY) -> None:
        self.warm = MemoryStore(warm_bytes, secret=SECRET)
        self.cold = OnDisk(cold_bytes, secret=SECRET)
        self.store = TieredStore(self.warm, self.cold)


def test_stores_with_different_secrets_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="made with the cold store's secret"):
        TieredStore(MemoryStore(1), MemoryStore(1))


def test_its_secret_is_the_cold_ones() -> None:
    assert World().store.secret == SECRET


def test_a_page_of_agents_is_one_page_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for number in range(9):
        saved = replace(manifest(f"agent {number}", 0), saved_at=float(number))
        assert world.store.agents.save(saved)
    pages: list[int] = []
    page = MemoryStore.page

    def counted(
        store: MemoryStore, scope: Scope, limit: int, after: Place | None = None
    ) -> Sequence[Manifest]:
        pages.append(limit)
        return page(store, scope, limit, after)

    monkeypatch.setattr(MemoryStore, "page", counted)
    assert [one.agent_id for one in world.store.agents.page(SCOPE, 3)] == [
        "agent 8",
        "agent 7",
        "agent 6",
    ]
    assert pages == [3, 3], "one of the warm store and one of the cold"


def test_what_is_warm_is_found_warm() -> None:
    world = World()
    first, second, third = blocks(chain(768))
    world.cold.put(first)
    world.store.put(second)
    world.warm.put(third)
    found = world.store.find(keys(chain(768)))
    assert [found[key].tier for key in keys(chain(768))] == [Tier.DISK, Tier.MEMORY, Tier.MEMORY]


def test_each_block_is_read_where_it_is_and_not_copied() -> None:
    world = World()
    links = chain(3 * 256 + 1)
    first, second, third, _ = blocks(links)
    world.cold.put(first)
    world.cold.put(third)
    world.warm.put(second)
    rooms = [Room(header(link)) for link in links]
    assert world.store.read_into([room.read for room in rooms]) == [True, True, True, False]
    assert [room.body for room in rooms[:3]] == [first.body, second.body, third.body]
    assert world.store.read(first.header) == first.body
    assert world.warm.stats()[0].n_blocks == 1
    assert world.cold.stats()[0].counts["hits"] == 3


@pytest.mark.parametrize("part", Part)
def test_what_is_prefetched_is_warm_and_the_same(part: Part) -> None:
    world = World()
    given = blocks(chain(300), part)
    for one in given:
        world.cold.put(one)
        assert world.store.prefetch(one.header)
        assert world.store.prefetch(one.header), "and again, without reading it"
        assert world.warm.read(one.header) == one.body
    assert world.cold.stats()[0].counts["hits"] == 2
    assert world.store.find(keys(chain(300), part)) == world.warm.find(keys(chain(300), part))


def test_what_is_prefetched_takes_the_place_of_what_was_used_longest_ago() -> None:
    links = [chain(256, seed)[0] for seed in range(4)]
    first, second, third, fourth = (block(link) for link in links)
    world = World(warm_bytes=3 * 20_000)
    for one in (first, second, third):
        world.store.put(one)
    world.cold.put(fourth)
    assert world.store.prefetch(first.header)
    assert world.store.prefetch(fourth.header)
    assert [world.warm.read(one.header) is None for one in (first, second, third, fourth)] == [
        False,
        True,
        False,
        False,
    ]


def test_what_does_not_fit_or_is_nowhere_is_not_prefetched() -> None:
    given = block(chain(256)[0])
    world = World(warm_bytes=1)
    assert not world.store.prefetch(given.header)
    world.cold.put(given)
    assert not world.store.prefetch(given.header)
    assert world.store.read(given.header) == given.body


def test_what_the_cold_one_dropped_is_to_be_put_again() -> None:
    world = World()
    links = chain(3 * 256)
    first, second, _ = blocks(links)
    world.warm.put(first)
    world.store.put(second)
    assert world.store.lacking(keys(links)) == {keys(links)[0], keys(links)[2]}


def test_what_is_warm_is_not_read_from_the_cold_one() -> None:
    world = World()
    given = block(chain(256)[0])
    world.store.put(given)
    assert world.store.read(given.header) == given.body
    assert world.store.read_into([Room(given.header).read]) == [True]
    assert world.cold.stats()[0].counts["hits"] == 0
    assert world.cold.stats()[0].counts["misses"] == 0


@pytest.mark.parametrize(("warm", "cold"), [(PLENTY, 1), (1, PLENTY), (PLENTY, PLENTY), (1, 1)])
def test_one_that_keeps_it_is_enough(warm: int, cold: int) -> None:
    world = World(warm, cold)
    given = block(chain(256)[0])
    kept = warm + cold > 2
    assert world.store.put(given) is kept
    assert world.store.agents.save(manifest("a", 256)) is kept
    assert world.store.read(given.header) == (given.body if kept else None)
    assert (world.store.agents.manifest(SCOPE, "a") is not None) is kept
    assert world.store.agents.remove(SCOPE, "a") is kept
    assert saved_agents(world.store) == []


def test_children_of_both_are_listed_once() -> None:
    world = World()
    one, two, three = (blocks(chain(256, seed))[0] for seed in range(3))
    world.store.put(one)
    world.warm.put(two)
    world.cold.put(three)
    listed = world.store.children(SCOPE.root, Part.FULL)
    assert {child.key for child in listed} == {child.header.key for child in (one, two, three)}
    assert len(listed) == 3


def test_the_cold_manifest_counts_with_its_generation() -> None:
    world = World()
    for n_tokens in (10, 20):
        world.cold.save(manifest("a", n_tokens))
    world.store.agents.save(manifest("a", 30))
    kept = world.store.agents.manifest(SCOPE, "a")
    assert kept is not None
    assert (len(kept.token_ids), kept.generation) == (30, 3)
    assert saved_agents(world.store) == [kept]


def test_agents_of_both_are_listed_once() -> None:
    world = World()
    world.cold.save(manifest("before", 10))
    world.store.agents.save(manifest("a", 10))
    world.store.agents.save(manifest("b", 10))
    world.warm.save(manifest("only warm", 10))
    agents = sorted(one.agent_id for one in saved_agents(world.store))
    assert agents == ["a", "b", "before", "only warm"]


def test_the_cold_store_is_closed_even_when_the_warm_one_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.store.put(block(chain(256)[0]))

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(world.warm, "close", fail)
    with pytest.raises(ZeroDivisionError):
        world.store.close()
    assert world.cold.stats()[0].n_blocks == 0


def test_interim_blocks_stay_in_memory_while_writes_are_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    of_a_request, of_a_turn, later = blocks(chain(700))
    monkeypatch.setattr(OnDisk, "holds_back", property(lambda _: True))
    assert world.store.holds_back
    assert world.store.put(replace(of_a_request, interim=True))
    assert world.store.put(of_a_turn)
    monkeypatch.undo()
    assert world.store.put(replace(later, interim=True))
    tiers = {key.hash: one.tier for key, one in world.cold.find(keys(chain(700))).items()}
    assert tiers.keys() == {of_a_turn.header.key.hash, later.header.key.hash}
    assert len(world.warm.find(keys(chain(700)))) == 3


def test_what_is_read_from_a_shared_store_is_kept_on_this_machine() -> None:
    world = World()
    store = SharedTiers(world.warm, world.cold)
    links = chain(3 * 256 + 5)
    for one in blocks(links):
        world.cold.put(one)
    rooms = [Room(header(link)) for link in links]
    assert store.read_into([room.read for room in rooms]) == [True] * 4
    world.cold.put(block(links[0], Part.CHECKPOINT))
    assert store.read(header(links[0], Part.CHECKPOINT)) is not None
    world.cold.drop([*keys(links), links[0].key(Part.CHECKPOINT)])
    again = [Room(header(link)) for link in links]
    assert store.read_into([room.read for room in again]) == [True] * 4
    assert [room.body for room in again] == [one.body for one in blocks(links)]
    kept = store.read(header(links[0], Part.CHECKPOINT))
    assert kept == block(links[0], Part.CHECKPOINT).body
    world.warm.drop(keys(links))
    assert store.read_into([room.read for room in again]) == [False] * 4
    assert not world.warm.find(keys(links))
