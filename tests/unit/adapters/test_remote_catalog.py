"""What a process knows of an object store: how much fits, what is forgotten, what asking costs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import pytest
from obstore.store import MemoryStore as ObjectsInMemory

from semantic.domain.block_hash import BlockHash, BlockLink, Part
from semantic.domain.identity import digest
from semantic.domain.stored import BlockHeader
from semantic_fleet.objects import catalog
from semantic_fleet.objects.catalog import (
    CATALOG_BYTES,
    ENTRY_BYTES,
    GENERATIONS,
    BodyTable,
    Catalog,
)
from semantic_fleet.objects.names import name_of_body
from semantic_fleet.objects.objects import Objects
from semantic_fleet.objects.remote_store import RemoteStore
from tests.support.file_memory import traced
from tests.support.store_blocks import LAYOUT, SCOPE, block, chain, header, keys, manifest, scope_of

SECRET = bytes(range(32))
BODY = 32 << 20


@functools.cache
def headers(n: int) -> list[BlockHeader]:
    """A chain of blocks with the tokens of none."""
    names = [
        SCOPE.root,
        *(BlockHash(digest("made up", bytes([i & 255, i >> 8]))) for i in range(n)),
    ]
    links = (BlockLink(SCOPE, names[i + 1], names[i], 256 * i, (1,)) for i in range(n))
    return [BlockHeader(link, Part.WINDOW, LAYOUT.name) for link in links]


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> Counter[str]:
    """Counts the calls of a function or method."""
    calls: Counter[str] = Counter()
    inner: Callable[..., object] = getattr(owner, name)

    def call(*given: object) -> object:
        calls[name] += 1
        return inner(*given)

    monkeypatch.setattr(owner, name, call)
    return calls


def known(n_blocks: int) -> Catalog:
    """A catalog with room for twice as many bodies and the headers of a few, and what it knows."""
    found = Catalog(2 * n_blocks * ENTRY_BYTES, SECRET, lambda _: False)
    for link in chain(256 * n_blocks):
        found.learn(header(link), BODY)
    return found


@pytest.mark.parametrize("n", [5461, 5462])  # before and after a dictionary grows
def test_a_body_costs_no_more_than_it_is_counted_for(n: int) -> None:
    made = headers(5462)[:n]
    with traced(__file__) as taken:
        table = BodyTable(CATALOG_BYTES)
        for one in made:
            table.add(one, BODY)
        n_bytes = taken()
    assert len(table) == n
    assert n * ENTRY_BYTES / 2 < n_bytes < n * ENTRY_BYTES


def test_a_million_bodies_fit() -> None:
    table = Catalog(CATALOG_BYTES, SECRET, lambda _: False)._table
    assert table._most * GENERATIONS >= 1_000_000
    assert table._most * GENERATIONS * ENTRY_BYTES <= CATALOG_BYTES * 5 // 8


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    most = 20 * GENERATIONS
    table = BodyTable(most * ENTRY_BYTES)
    made = headers(10 * most)
    used = made[0].key
    for number, one in enumerate(made, 1):
        table.add(one, number)
        table.use([used])
        assert len(table) <= most
        assert len(table) >= min(number, most - 20 - GENERATIONS)
    there = [one.key for one in made if table.get(one.key) is not None]
    assert there == [used, *(one.key for one in made[1 - len(table) :])]
    newest = table.get(made[-1].key)
    assert newest is not None
    assert (newest.n_bytes, newest.scope) == (len(made), SCOPE)


def test_no_body_is_taken_for_another_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "name_of_body", lambda _: 7)
    table, (one, other) = BodyTable(1 << 20), headers(2)
    table.add(one, 1)
    assert table.get(one.key) is not None
    assert table.get(other.key) is None
    table.add(other, 2)
    assert len(table) == 1
    assert table.get(one.key) is None


def test_bodies_of_too_many_scopes_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_MOST_SCOPES", 2)
    table = BodyTable(1 << 20)
    first = [header(chain(256, scope=scope_of(tenant=name))[0]) for name in "abca"]
    for one in first:
        table.add(one, 1)
    assert [table.get(one.key) is not None for one in first] == [True, True, False, True]


def test_hearing_of_evictions_costs_what_was_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many bodies are known."""
    found, links = known(2000), chain(256 * 2000)
    n_recent = len(found._recent.headers())
    assert n_recent < 10
    names = counted(monkeypatch, catalog, "name_of_body")
    drops = counted(monkeypatch, found._table, "drop")
    gone = frozenset(name_of_body(one) for one in keys(links[-3:]))
    found.drop_named(gone)
    assert names.total() <= n_recent
    assert drops.total() == 3
    assert found.lacking(keys(links)) == frozenset(keys(links[-3:]))
    found.drop_named(None)
    assert not found.find(keys(links))
    assert found.stats().n_blocks == 0


def test_recording_uses_of_a_chain_costs_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its end alone too; and no block is gone back to further than to one that is recorded."""
    store, links = RemoteStore(Objects(ObjectsInMemory()), SECRET), chain(256 * 400)
    for link in links:
        store._catalog.learn(header(link), BODY)
    steps = counted(monkeypatch, store._catalog, "_named")
    store.touch(keys(links[-1:]))
    assert steps.total() == 401
    store.touch(keys(links))
    assert steps.total() <= 401 + 2 * 400
    store.agents.save(manifest("ann", 256 * 400))  # three parts of each
    assert steps.total() <= 401 + 2 * 400 + 3 * 2 * 400
    store.close()


def test_what_is_known_by_its_size_is_found_read_and_deleted() -> None:
    """Long after its header was forgotten."""
    objects = Objects(ObjectsInMemory())
    store, links = RemoteStore(objects, SECRET, catalog_bytes=200_000), chain(256 * 100)
    for link in links:
        assert store.put(block(link))
    assert len(store.children(links[-1].parent, Part.FULL)) == 0
    assert set(store.find(keys(links))) == set(keys(links))
    [stats] = store.stats()
    assert stats.n_blocks == 100
    assert stats.n_bytes <= stats.max_bytes == 200_000
    assert store.read(header(links[-1])) == block(links[-1]).body
    store.drop(keys(links[-1:]))
    store.flush()
    assert not store.find(keys(links[-1:]))
    fresh = RemoteStore(objects, SECRET)
    assert fresh.read(header(links[-1])) is None
    for one in (store, fresh):
        one.close()
