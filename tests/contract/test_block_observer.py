"""What tiers report to a `BlockObserver`: whatever happens, exactly the blocks they can find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.disk import DiskStore
from semantic.adapters.stores.memory import MemoryStore
from semantic.adapters.stores.tiered import TieredStore
from semantic.domain.block_hash import BlockLink, Part
from semantic.domain.stored import BlockLayout, StoredBlock, Tier
from semantic.ports.store import StorePort
from tests.contract.test_cache_store import empty_disk_bytes
from tests.support.kv_subscriber import Mirror
from tests.support.store_blocks import SCOPE, block, chain, header, keys, manifest

BIG = BlockLayout("test: 16 KiB", full=(64,))
ROOM = 40 * 17_000
"""Of some 40 of its blocks: less than the chains below have."""
CHAINS = [chain(2000, seed) for seed in range(12)]

Make = Callable[[Path, Mirror], StorePort]


def memory(_folder: Path, mirror: Mirror) -> StorePort:
    return MemoryStore(ROOM, observer=mirror)


def disk(folder: Path, mirror: Mirror) -> DiskStore:
    return DiskStore.open(folder / "store", ROOM + empty_disk_bytes(), observer=mirror)


def both(folder: Path, mirror: Mirror) -> StorePort:
    cold = disk(folder, mirror)
    warm = MemoryStore(ROOM // 2, secret=cold.secret, observer=mirror)
    return TieredStore(warm, BackgroundStore(cold, 1 << 28))


TIERS: dict[str, Make] = {"memory": memory, "disk": disk, "both": both}


def body(link: BlockLink) -> StoredBlock:
    return StoredBlock(header(link, layout=BIG), bytes(BIG.body_bytes(Part.FULL, len(link.tokens))))


def found_in(store: StorePort) -> dict[Tier, set[bytes]]:
    """The whole blocks of `CHAINS` in each tier, as its own `find` has them."""
    tiers: list[StorePort] = [store]
    if isinstance(store, TieredStore):
        assert isinstance(store.cold, BackgroundStore)
        tiers = [store.warm, store.cold.inner]
    wanted = [key for links in CHAINS for key in keys([one for one in links if one.is_full])]
    found: dict[Tier, set[bytes]] = {Tier.MEMORY: set(), Tier.DISK: set()}
    for tier in tiers:
        for key, one in tier.find(wanted).items():
            found[one.tier].add(key.hash)
    return found


@pytest.mark.parametrize("make", TIERS.values(), ids=TIERS)
def test_an_observer_knows_what_each_tier_has(make: Make, tmp_path: Path) -> None:
    random, mirror = Random(5), Mirror()
    store = make(tmp_path, mirror)
    evicted = 0
    for step in range(60):
        links = random.choice(CHAINS)
        match random.randrange(6):
            case 0:
                store.drop(keys(links[random.randrange(8) :]))
            case 1:
                store.agents.save(manifest(f"agent {step % 3}", 2000, CHAINS.index(links)))
            case 2:
                store.touch(keys(links))
            case _:
                for link in links[: random.randint(1, len(links))]:
                    store.put(body(link))
        store.flush()
        assert mirror.names == found_in(store)
        evicted += len(mirror.names[Tier.DISK]) + len(mirror.names[Tier.MEMORY])
    assert any(one.counts["evicted"] for one in store.stats())
    assert evicted
    store.close()


def test_damage_and_a_new_index_are_seen(tmp_path: Path) -> None:
    mirror = Mirror()
    store = disk(tmp_path, mirror)
    links = CHAINS[0][:3]
    for link in links:
        store.put(body(link))
    path = next((tmp_path / "store" / "blocks").rglob(f"*{links[1].hash.hex()[:16]}*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    assert store.read(body(links[1]).header) is None
    assert mirror.names == found_in(store)
    assert links[1].hash not in mirror.names[Tier.DISK]
    listings = mirror.listings
    store.rebuild_index()
    assert mirror.listings == listings + 1
    store.close()


def test_what_belongs_to_no_whole_block_is_not_reported() -> None:
    mirror = Mirror()
    store = MemoryStore(1 << 20, observer=mirror)
    short, whole = chain(300)[1], chain(300)[0]
    for one in (block(short), block(whole, Part.CHECKPOINT), block(whole, Part.WINDOW)):
        store.put(one)
    store.drop(keys([short, whole], Part.CHECKPOINT) + keys([short, whole], Part.WINDOW))
    assert mirror.names[Tier.MEMORY] == set()


@pytest.mark.parametrize("make", [memory, disk], ids=["memory", "disk"])
def test_what_an_observer_cannot_take_is_counted(make: Make, tmp_path: Path) -> None:
    mirror = Mirror()
    store = make(tmp_path, mirror)
    mirror.is_full = True
    store.put(body(CHAINS[0][0]))
    store.drop(keys(CHAINS[0][:1]))
    assert store.stats()[0].counts["unpublished"] == 2
    store.close()


@pytest.mark.parametrize("make", [memory, disk], ids=["memory", "disk"])
def test_the_roots_of_a_namespace_are_those_of_its_chains(make: Make, tmp_path: Path) -> None:
    store = make(tmp_path, Mirror())
    assert isinstance(store, MemoryStore | DiskStore)
    for link in CHAINS[0][:2]:
        store.put(body(link))
    assert store.roots(SCOPE.namespace) == {SCOPE.root}
    assert store.roots(b"another") == frozenset()
    store.close()
