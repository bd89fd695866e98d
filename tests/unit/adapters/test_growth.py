"""What a call of a store costs does not depend on how many entries it has: counted, not timed."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.adapters.stores.memory import MemoryStore
from semantic.domain.block_hash import BlockLink, Part
from semantic.domain.stored import StoredBlock
from semantic.ports.store import StorePort
from tests.support.steps import steps_of
from tests.support.store_blocks import SCOPE, block, chain, keys, manifest, scope_of, text

FEW, MANY = 30, 300
PLENTY = 1 << 30
STORES = ("memory", "disk")
SLACK = 1.1
"""A tree of many rows is a level deeper."""

Call = Callable[[StorePort], object]


Stocked = Callable[[str, Path, int], StorePort]
"""Of a kind, in a folder: a store with so many agents."""


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Stocked:
    """Folders are filled once and copied."""
    root = tmp_path_factory.mktemp("stocked")
    for n in (FEW, MANY):
        with closing(opened(root, n)) as store:
            fill(store, n)

    def stock(kind: str, folder: Path, n: int) -> StorePort:
        if kind == "disk":
            shutil.copytree(root / f"disk {n}", folder / f"disk {n}")
            return opened(folder, n)
        store = MemoryStore(PLENTY)
        fill(store, n)
        return store

    return stock


def opened(folder: Path, n: int) -> DiskStore:
    return DiskStore.open(folder / f"disk {n}", PLENTY, durable=False)


@functools.cache
def blocks_of(tokens: tuple[int, ...]) -> list[StoredBlock]:
    """The blocks of a text, computed once for all stores."""
    return [block(link) for link in SCOPE.chain(tokens)]


def fill(store: StorePort, n: int) -> None:
    """With `n` agents that share a beginning, each with a block of its own."""
    for number in range(n):
        tokens = (*text(256), *text(20), number)
        for one in blocks_of(tokens):
            assert store.put(one)
        name = f"agent {number:04}"
        saved = replace(manifest(name, 0), token_ids=tokens, saved_at=number, parent="parent 1")
        assert store.agents.save(replace(saved, parent=f"parent {number}"))


def limit_to(store: StorePort, n_bytes: int) -> None:
    """Leave the store no room for more than `n_bytes`."""
    if isinstance(store, MemoryStore):
        store._order.max_bytes = n_bytes
    elif isinstance(store, DiskStore):
        store._store.quota.max_bytes = n_bytes


def steps(store: StorePort, call: Call) -> int:
    """The steps of `call`, those of SQLite included."""
    if not isinstance(store, DiskStore):
        return steps_of(lambda: call(store))
    index = store._store.index
    with index.reading() as reader, index.writing() as writer:
        databases = reader, writer
    return steps_of(lambda: call(store), *databases)


def steps_per_eviction(store: StorePort) -> float:
    """Of a put for which several blocks go."""
    [tier] = store.stats()
    limit_to(store, tier.n_bytes - 40_000)
    (link,) = chain(250, seed=10_000 + tier.counts["written"])
    n_steps = steps(store, lambda store: store.put(block(link)))
    assert store.find([link.key(Part.FULL)])
    n_evicted = store.stats()[0].counts["evicted"] - tier.counts["evicted"]
    assert n_evicted > 1
    return n_steps / n_evicted


def save_again(store: StorePort) -> None:
    assert store.agents.save(
        replace(manifest("agent 0003", 0), token_ids=(*text(256), *text(20), 3))
    )


def save_new(store: StorePort) -> None:
    assert store.agents.save(replace(manifest("new", 0), token_ids=(*text(256), *text(20), 10**6)))


def nearest(store: StorePort) -> None:
    parent = next(SCOPE.chain(text(256))).hash
    found = store.nearest(parent, Part.FULL, (*text(20), 3, 4))
    assert (*text(20), 3) in [one.link.tokens for one in found]


CALLS: dict[str, Call] = {
    "save a known agent": save_again,
    "save a new agent": save_new,
    "nearest": nearest,
    "find": lambda store: store.find(keys(chain(600))),
    "page": lambda store: store.agents.page(SCOPE, 5),
    "next page": lambda store: store.agents.page(SCOPE, 3, (10_000_000, b"agent 0010")),
    "scopes": lambda store: store.agents.scopes(),
    "children of an agent": lambda store: store.agents.child_agents(SCOPE, "parent 3"),
    "users": lambda store: store.agents.users([link.hash for link in chain(256)]),
    "manifest": lambda store: store.agents.manifest(SCOPE, "agent 0003"),
    "manifest of no agent": lambda store: store.agents.manifest(scope_of("other"), "x"),
    "stats": lambda store: store.stats(),
    "touch": lambda store: store.touch(keys(chain(256))),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", STORES)
def test_a_call(kind: str, name: str, tmp_path: Path, stocked: Stocked) -> None:
    with (
        closing(stocked(kind, tmp_path, FEW)) as few,
        closing(stocked(kind, tmp_path, MANY)) as many,
    ):
        for store in (few, many):
            CALLS[name](store)  # the first call may open or build something
        assert steps(many, CALLS[name]) <= SLACK * steps(few, CALLS[name])


@pytest.mark.parametrize("kind", STORES)
def test_an_eviction(kind: str, tmp_path: Path, stocked: Stocked) -> None:
    with (
        closing(stocked(kind, tmp_path, FEW)) as few,
        closing(stocked(kind, tmp_path, MANY)) as many,
    ):
        assert steps_per_eviction(many) <= SLACK * steps_per_eviction(few)


def put_block(store: StorePort, *, link: BlockLink) -> None:
    assert store.put(block(link))


@pytest.mark.parametrize("kind", STORES)
def test_an_eviction_for_another_tenant(kind: str, tmp_path: Path, stocked: Stocked) -> None:
    counts = []
    for n in (FEW, MANY):
        with closing(stocked(kind, tmp_path, n)) as store:
            pin(store, 0, n - 10)
            limit_to(store, store.stats()[0].n_bytes)
            (link,) = chain(250, scope=scope_of(tenant="another"))
            counts.append(steps(store, partial(put_block, link=link)))
            assert store.find([link.key(Part.FULL)])
    assert counts[1] <= SLACK * counts[0]


def pin(store: StorePort, first: int, n: int) -> None:
    for number in range(first, n):
        found = store.agents.manifest(SCOPE, f"agent {number:04}")
        assert found is not None
        assert store.agents.save(replace(found, pinned=True))


@pytest.mark.parametrize("kind", STORES)
def test_an_eviction_beside_pins(kind: str, tmp_path: Path, stocked: Stocked) -> None:
    """Pinned entries are not searched for victims."""
    counts = []
    for n in (FEW, MANY):
        with closing(stocked(kind, tmp_path, n)) as store:
            pin(store, 0, n)
            for seed in range(20):
                store.put(block(next(SCOPE.chain(text(250, seed=50 + seed)))))
            counts.append(steps_per_eviction(store))
    assert counts[1] <= SLACK * counts[0]


@pytest.mark.parametrize("kind", STORES)
def test_a_put_that_finds_no_room(kind: str, tmp_path: Path, stocked: Stocked) -> None:
    (link,) = chain(250, seed=9)
    counts = []
    for n in (FEW, MANY):
        with closing(stocked(kind, tmp_path, n)) as store:
            pin(store, 0, n)
            limit_to(store, store.stats()[0].n_bytes)
            counts.append(steps(store, lambda store: store.put(block(link))))
            assert not store.find([link.key(Part.FULL)])
    assert counts[1] <= SLACK * counts[0]


def test_a_new_index_costs_as_much_per_agent(tmp_path: Path, stocked: Stocked) -> None:
    counts = []
    for n in (FEW, MANY):
        stocked("disk", tmp_path, n).close()
        for path in (tmp_path / f"disk {n}").glob("index.sqlite*"):
            path.unlink()
        stores: list[DiskStore] = []
        n_steps = steps_of(partial(open_again, tmp_path, n, stores))
        counts.append(n_steps / n)
        assert stores[0].stats()[0].n_agents == n
        stores[0].close()
    assert counts[1] <= SLACK * counts[0]


def open_again(folder: Path, n: int, to: list[DiskStore]) -> None:
    to.append(opened(folder, n))
