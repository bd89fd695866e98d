"""A tenant loses nothing to others while it has less than they have, whatever they pin."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.adapters.stores.memory import MemoryStore
from semantic.domain.block_hash import PUBLIC_TENANT, Part, Scope, tenant_tag
from semantic.domain.stored import Manifest
from semantic.ports.store import StorePort
from tests.support.faulty_files import FaultyFiles
from tests.support.store_blocks import block, chain, keys, manifest, saved_agents, scope_of
from tests.unit.adapters.disk.support import NEVER

TOKENS = 512
BLOCKS = 2
A, B, C = (scope_of(tenant=tenant) for tenant in "abc")
AGENTS = 40
"""More than there is room for."""


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorePort]:
    """A store with room for some twenty or thirty agents."""
    found: StorePort = MemoryStore(1_200_000) if request.param == "memory" else disk_store(tmp_path)
    yield found
    found.close()


def disk_store(folder: Path) -> DiskStore:
    """One whose subfolders are counted already: each new one costs room."""
    found = DiskStore.open(folder, 64 << 20, files=FaultyFiles(errno.EIO, NEVER))
    shards = [(f"{kind}/{n:02x}",) for kind in ("blocks", "agents") for n in range(256)]
    with found._store.index.writing() as db:
        db.executemany("INSERT INTO shards VALUES (?)", shards)
        found._store.quota.max_bytes = found._store.quota.used(db) + 700_000
    return found


def turn(store: StorePort, scope: Scope, number: int, *, pinned: bool = False) -> bool:
    """One agent of two blocks; whether all of it is stored."""
    put = [store.put(block(link)) for link in chain(TOKENS, number, scope)]
    return store.agents.save(agent(scope, number, pinned=pinned)) and all(put)


def agent(scope: Scope, number: int, *, pinned: bool = False) -> Manifest:
    return manifest(f"agent {number}", TOKENS, number, scope=scope, pinned=pinned)


def n_blocks(store: StorePort, scope: Scope, number: int) -> int:
    """How many blocks of an agent are stored; its manifest is, if any."""
    return len(store.find(keys(chain(TOKENS, number, scope))))


def parts(store: StorePort) -> dict[bytes, int]:
    """The bytes of each tenant."""
    if isinstance(store, MemoryStore):
        return {tag: one.n_bytes for tag, one in store._order.tenants.items()}
    assert isinstance(store, DiskStore)
    with store._store.index.reading() as db:
        return dict(db.execute("SELECT tag, bytes FROM tenants WHERE bytes > 0"))


def flood(store: StorePort, scope: Scope, *, pinned: bool) -> None:
    for number in range(AGENTS):
        turn(store, scope, number, pinned=pinned)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_tenant_takes_nothing_from_one_that_has_less(store: StorePort, pinned: bool) -> None:
    assert turn(store, B, 0)
    assert turn(store, B, 1)
    flood(store, A, pinned=pinned)
    assert [n_blocks(store, B, number) for number in (0, 1)] == [BLOCKS, BLOCKS]
    names = {one.agent_id for one in saved_agents(store) if one.scope == B}
    assert names == {"agent 0", "agent 1"}


@pytest.mark.parametrize("pinned", [True, False])
def test_a_new_tenant_gets_an_equal_part_of_a_full_store(store: StorePort, pinned: bool) -> None:
    flood(store, A, pinned=pinned)
    (alone,) = parts(store).values()
    assert turn(store, B, 0)
    assert n_blocks(store, B, 0) == BLOCKS
    flood(store, B, pinned=False)
    assert n_blocks(store, B, AGENTS - 1) == BLOCKS
    assert all(0.4 * alone < n_bytes < 0.6 * alone for n_bytes in parts(store).values())
    flood(store, C, pinned=True)
    assert all(0.25 * alone < n_bytes < 0.4 * alone for n_bytes in parts(store).values())
    assert len(parts(store)) == 3


def test_alone_a_tenant_may_pin_all_of_it(store: StorePort) -> None:
    flood(store, A, pinned=True)
    first = [n_blocks(store, A, number) for number in range(5)]
    assert first == [BLOCKS] * 5
    assert not all(store.put(block(link)) for link in chain(TOKENS, 99, A))


def test_public_prefixes_are_nobodys_part(store: StorePort) -> None:
    public = replace(A, tenant=tenant_tag(store.secret, PUBLIC_TENANT))
    assert turn(store, public, 0, pinned=True)
    flood(store, A, pinned=True)
    assert store.agents.pinned(A.tenant).max_bytes is None
    held = [n_blocks(store, A, number) for number in range(AGENTS)]
    assert held[:5] == [BLOCKS] * 5
    assert not turn(store, public, 1, pinned=True)
    assert [n_blocks(store, A, number) for number in range(AGENTS)] == held
    assert n_blocks(store, public, 0) == BLOCKS
    assert turn(store, B, 0)
    [tier] = store.stats()
    assert store.agents.pinned(A.tenant).max_bytes == tier.max_bytes // 2
    assert turn(store, public, 1, pinned=True)


def test_what_is_pinned_goes_last_and_what_was_used_last_stays(store: StorePort) -> None:
    """Beside one other tenant it is less than an equal part, beside two it is more."""
    n_pinned = 10 if isinstance(store, MemoryStore) else 12
    for number in range(n_pinned):
        assert turn(store, A, number, pinned=True)
    for number in range(n_pinned, AGENTS):
        turn(store, A, number)
    assert store.agents.save(agent(A, 0, pinned=True))
    flood(store, B, pinned=False)
    assert [n_blocks(store, A, number) for number in range(n_pinned)] == [BLOCKS] * n_pinned
    flood(store, C, pinned=False)
    left = [n_blocks(store, A, number) for number in range(n_pinned)]
    assert 0 < sum(left) < BLOCKS * n_pinned
    assert (left[0], left[1]) == (BLOCKS, 0)


def test_manifests_count_too_and_do_not_displace_anothers_blocks(store: StorePort) -> None:
    assert turn(store, B, 0)
    for number in range(250):
        assert store.agents.save(replace(agent(A, 0), agent_id=f"agent {number}"))
    assert n_blocks(store, B, 0) == BLOCKS
    assert store.agents.manifest(B, "agent 0") is not None


def test_the_bytes_of_tenants_are_counted_right_whatever_happens(tmp_path: Path) -> None:
    with_pins = disk_store(tmp_path)
    flood(with_pins, A, pinned=True)
    flood(with_pins, B, pinned=False)
    for number in range(AGENTS):
        with_pins.save(agent(A, number, pinned=number % 2 == 0))
        with_pins.remove(B, f"agent {number}") if number % 3 == 0 else None
    (link, *_) = chain(TOKENS, AGENTS - 1, B)
    with_pins.put(block(link, Part.CHECKPOINT))
    counted = _tenants(with_pins)
    with_pins.rebuild_index()
    assert _tenants(with_pins) == counted
    with_pins.close()


def _tenants(store: DiskStore) -> list[object]:
    with store._store.index.reading() as db:
        sql = "SELECT tag, n_agents, bytes, pinned FROM tenants WHERE bytes > 0 ORDER BY tag"
        return db.execute(sql).fetchall()


def test_a_tenants_part_is_what_its_pins_are_sure_of(store: StorePort) -> None:
    assert turn(store, A, 0, pinned=True)
    assert turn(store, A, 1)
    alone = store.agents.pinned(A.tenant)
    assert (alone.n_bytes > 0, alone.max_bytes) == (True, None)
    [tier] = store.stats()
    assert store.agents.pinned(B.tenant).max_bytes == tier.max_bytes // 2
    assert turn(store, B, 0)
    turn(store, C, 0, pinned=True)
    assert store.agents.pinned(A.tenant) == replace(alone, max_bytes=tier.max_bytes // 3)
    assert store.agents.pinned(B.tenant).n_bytes == 0
