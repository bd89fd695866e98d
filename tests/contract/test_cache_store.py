"""What every `StorePort` does: give back exactly what it was given, or nothing."""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from secrets import token_bytes

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from obstore.store import MemoryStore as ObjectsInMemory

from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.disk import DiskStore
from semantic.adapters.stores.memory import MemoryStore
from semantic.adapters.stores.tiered import SharedTiers, TieredStore
from semantic.composition.process_stores import remote_tier
from semantic.domain.block_hash import BlockHash, BlockKey, BlockLink, Part, Scope, begins_like
from semantic.domain.prefix import common_prefix
from semantic.domain.stored import BlockHeader, BlockLayout, Manifest, StoredBlock, Tier
from semantic.ports.store import StorePort
from semantic_fleet.objects.objects import Objects
from semantic_fleet.objects.remote_store import RemoteStore
from tests.support.lanes import examples
from tests.support.store_blocks import (
    LAYOUT,
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
    text,
)

Make = Callable[[Path, int], StorePort]

AMPLE = 1 << 28
BIG = BlockLayout("test: 64 KiB", full=(256,))
"""Its bodies are large beside what a store adds to them."""
BIG_BYTES = 80 * 1024
"""More than a store counts for a block of `BIG`, and less than twice its body."""


def background(inner: StorePort) -> StorePort:
    return BackgroundStore(inner, AMPLE)


def tiered(cold: StorePort, max_bytes: int) -> StorePort:
    return TieredStore(MemoryStore(max_bytes, secret=cold.secret), cold)


def memory(_folder: Path, max_bytes: int) -> StorePort:
    return MemoryStore(max_bytes)


@cache
def empty_disk_bytes() -> int:
    """What the folder of a store on disk takes before anything is in it."""
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore.open(Path(folder) / "store", AMPLE)
        [tier] = store.stats()
        store.close()
    return tier.n_bytes


def disk(folder: Path, max_bytes: int) -> StorePort:
    """With `max_bytes` for blocks and manifests, beside what an empty folder takes."""
    return DiskStore.open(folder / "store", max_bytes + empty_disk_bytes())


def disk_in_background(folder: Path, max_bytes: int) -> StorePort:
    return background(disk(folder, max_bytes))


VOLATILE: dict[str, Make] = {
    "memory": memory,
    "background(memory)": lambda folder, size: background(memory(folder, size)),
}
LASTING: dict[str, Make] = {
    "disk": disk,
    "background(disk)": disk_in_background,
    "tiered(memory, disk)": lambda folder, size: tiered(disk(folder, size), size),
    "tiered(memory, background(disk))": lambda folder, size: tiered(
        disk_in_background(folder, size), size
    ),
}


def secret_in(folder: Path) -> bytes:
    """A secret that stays with the folder, as an operator's does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fleet-secret"
    if not path.exists():
        path.write_bytes(token_bytes(32))
    return path.read_bytes()


def remote(folder: Path, _max_bytes: int) -> StorePort:
    return RemoteStore(Objects(ObjectsInMemory()), secret_in(folder))


def remote_in_a_folder(folder: Path, _max_bytes: int) -> StorePort:
    bucket = folder / "bucket"
    bucket.mkdir(parents=True, exist_ok=True)
    return RemoteStore(Objects.open(bucket.absolute().as_uri()), secret_in(folder))


def shared(folder: Path, max_bytes: int) -> StorePort:
    """All tiers of a replica."""
    secret = secret_in(folder)
    disk_tier = DiskStore.open(folder / "store", max_bytes + empty_disk_bytes(), secret=secret)
    own = TieredStore(MemoryStore(max_bytes, secret=secret), background(disk_tier))
    uploads = BackgroundStore(remote_in_a_folder(folder, max_bytes), AMPLE, forgets_at_once=True)
    return SharedTiers(own, uploads)


BOUNDED = VOLATILE | LASTING
"""Stores that keep a quota of their own."""
VOLATILE |= {"remote(memory)": remote}
LASTING |= {"remote(file)": remote_in_a_folder, "shared(tiered, background(remote))": shared}
STORES = VOLATILE | LASTING


@contextmanager
def opened(make: Make, folder: Path, max_bytes: int = AMPLE) -> Iterator[StorePort]:
    store = make(folder, max_bytes)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture(params=list(STORES))
def make(request: pytest.FixtureRequest) -> Make:
    return STORES[str(request.param)]


@pytest.fixture(params=list(BOUNDED))
def bounded(request: pytest.FixtureRequest) -> Make:
    return BOUNDED[str(request.param)]


@pytest.fixture
def store(make: Make, tmp_path: Path) -> Iterator[StorePort]:
    with opened(make, tmp_path) as one:
        yield one


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads change places after every few instructions."""
    kept = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(kept)


def total(store: StorePort, name: str) -> int:
    return sum(tier.counts.get(name, 0) for tier in store.stats())


def n_blocks(store: StorePort) -> int:
    return sum(tier.n_blocks for tier in store.stats())


def is_within_budget(store: StorePort) -> bool:
    return all(tier.n_bytes <= tier.max_bytes for tier in store.stats())


def put_all(store: StorePort, many: Sequence[StoredBlock]) -> None:
    kept = [store.put(one) for one in many]
    assert all(kept)


def n_found(store: StorePort, links: Sequence[BlockLink]) -> int:
    """How many of the chain are there, of which none may be behind a gap."""
    found = store.find(keys(links))
    there = [link.key(Part.FULL) in found for link in links]
    assert there == sorted(there, reverse=True)
    return sum(there)


def press(store: StorePort, seeds: Sequence[int]) -> None:
    """One large block of each of other chains, used once."""
    for seed in seeds:
        [link] = chain(256, seed)
        store.put(block(link, layout=BIG))
        store.touch(keys([link]))
        store.flush()
        assert is_within_budget(store)


# Blocks


def lengths_of(*parts: Part) -> list[object]:
    """Each length, in memory and flushed, of a part in turn; of all parts in the thorough lane."""
    found: list[object] = []
    lengths = itertools.product((1, 255, 256), (False, True))
    for i, (n_tokens, flushed) in enumerate(lengths):
        usual = parts[(i // 2 + i % 2) % len(parts)]
        for part in parts:
            marks = [] if part is usual else [pytest.mark.thorough]
            found.append(pytest.param(n_tokens, part, flushed, marks=marks))
    return found


def test_an_empty_store_has_nothing(store: StorePort) -> None:
    [link] = chain(256)
    assert store.find([link.key(Part.FULL)]) == {}
    assert store.children(SCOPE.root, Part.FULL) == []
    assert store.read(header(link)) is None
    assert store.read_into([Room(header(link)).read]) == [False]
    assert store.agents.manifest(SCOPE, "a") is None
    assert saved_agents(store) == []
    assert store.agents.remove(SCOPE, "a") is False
    assert n_blocks(store) == 0
    store.touch([link.key(Part.FULL)])
    store.flush()


@pytest.mark.parametrize(("n_tokens", "part", "flushed"), lengths_of(*Part))
def test_a_body_comes_back_byte_for_byte(
    store: StorePort, n_tokens: int, part: Part, flushed: bool
) -> None:
    [link] = chain(n_tokens)
    given = block(link, part)
    assert store.put(given)
    if flushed:
        store.flush()
    assert store.read(given.header) == given.body
    assert store.find([link.key(part)])[link.key(part)].n_bytes == len(given.body)


@pytest.mark.parametrize(("n_tokens", "part", "flushed"), lengths_of(Part.FULL, Part.WINDOW))
def test_a_body_is_read_into_the_front_of_its_targets(
    store: StorePort, n_tokens: int, part: Part, flushed: bool
) -> None:
    [link] = chain(n_tokens)
    given = block(link, part)
    assert store.put(given)
    if flushed:
        store.flush()
    room = Room(given.header)
    assert store.read_into([room.read]) == [True]
    assert room.body == given.body
    assert room.rest_is_untouched


def test_an_empty_body_is_a_body(store: StorePort) -> None:
    empty = BlockLayout("test: no full layers")
    [link] = chain(200)
    assert store.put(block(link, layout=empty))
    store.flush()
    assert store.find(keys([link]))[link.key(Part.FULL)].n_bytes == 0
    assert store.read(header(link, layout=empty)) == b""
    assert store.read_into([Room(header(link, layout=empty), empty).read]) == [True]


@pytest.mark.parametrize("n_tokens", [3, 256])
def test_a_body_may_have_many_segments(store: StorePort, n_tokens: int) -> None:
    many = BlockLayout("test: 1,300 segments", full=tuple(2 + i % 3 for i in range(1300)))
    [link] = chain(n_tokens)
    given = block(link, layout=many)
    assert store.put(given)
    store.flush()
    room = Room(given.header, many)
    assert store.read_into([room.read]) == [True]
    assert room.body == given.body
    assert room.rest_is_untouched


def test_many_reads_at_once_keep_their_order(store: StorePort) -> None:
    links = chain(20 * 256 + 7)
    there = [link for i, link in enumerate(links) if i % 3]
    put_all(store, blocks(there))
    store.flush()
    rooms = [Room(header(link)) for link in links]
    assert store.read_into([room.read for room in rooms]) == [i % 3 > 0 for i in range(len(links))]
    assert [rooms[link.start // 256].body for link in there] == [one.body for one in blocks(there)]


def test_the_parts_of_a_block_are_kept_apart(store: StorePort) -> None:
    [link] = chain(256)
    put_all(store, [block(link, Part.FULL), block(link, Part.CHECKPOINT)])
    store.flush()
    assert set(store.find([link.key(part) for part in Part])) == {
        link.key(Part.FULL),
        link.key(Part.CHECKPOINT),
    }
    assert store.read(header(link, Part.WINDOW)) is None
    assert store.read(header(link, Part.CHECKPOINT)) == block(link, Part.CHECKPOINT).body


def test_prefetching_changes_no_byte(store: StorePort) -> None:
    given = [*blocks(chain(300)), block(chain(300)[-1], Part.CHECKPOINT)]
    put_all(store, given)
    store.flush()
    memory = [one for one in store.stats() if one.tier is Tier.MEMORY]
    assert all(store.prefetch(one.header) == bool(memory) for one in given)
    assert [store.read(one.header) for one in given] == [one.body for one in given]
    assert not store.prefetch(header(chain(256, seed=9)[0]))


def test_what_is_lacking_is_what_was_not_put(store: StorePort) -> None:
    links = chain(4 * 256)
    asked = keys(links)
    assert store.lacking(asked) == frozenset(asked)
    put_all(store, blocks(links[:2]))
    assert store.lacking(asked) == frozenset(asked[2:])
    store.flush()
    assert store.lacking(asked) == frozenset(asked[2:])


def test_what_is_dropped_is_gone_and_can_be_put_again(store: StorePort) -> None:
    links = chain(4 * 256)
    put_all(store, blocks(links))
    for flushed in (False, True):
        if flushed:
            store.flush()
        store.drop(keys([links[1], links[1]]))
        assert set(store.find(keys(links))) == set(keys([links[0], *links[2:]]))
        assert store.read(header(links[1])) is None
        assert store.lacking(keys(links)) == frozenset(keys([links[1]]))
        assert list(store.children(links[0].hash, Part.FULL)) == []
        put_all(store, blocks([links[1]]))
        assert store.read(header(links[1])) == blocks([links[1]])[0].body
    store.drop(keys(chain(256, seed=9)))
    store.drop([])
    assert is_within_budget(store)


def test_a_pinned_agents_block_can_be_dropped(store: StorePort) -> None:
    links = chain(2 * 256)
    put_all(store, blocks(links))
    tokens = tuple(token for link in links for token in link.tokens)
    assert store.agents.save(Manifest(SCOPE, "ann", tokens, pinned=True))
    store.flush()
    store.drop(keys(links))
    assert store.find(keys(links)) == {}
    assert store.agents.manifest(SCOPE, "ann") is not None
    assert store.agents.remove(SCOPE, "ann")
    assert sum(tier.pinned_bytes for tier in store.stats()) == 0


def test_finding_says_what_is_there_in_any_order(store: StorePort) -> None:
    links = chain(4 * 256)
    put_all(store, blocks(links[:2]))
    asked = keys([links[3], links[1], links[0], links[1]])
    assert set(store.find(asked)) == set(keys(links[:2]))
    store.flush()
    assert set(store.find(asked)) == set(keys(links[:2]))
    assert store.find([]) == {}


WRONG: dict[str, Callable[[BlockLink], BlockLink]] = {
    "namespace": lambda link: replace(link, scope=Scope(b"n" * 32, SCOPE.tenant)),
    "tenant": lambda link: replace(link, scope=Scope(SCOPE.namespace, b"t" * 32)),
    "hash": lambda link: replace(link, hash=BlockHash(b"h" * 32)),
    "parent": lambda link: replace(link, parent=BlockHash(b"p" * 32)),
    "start": lambda link: replace(link, start=link.start + 256),
    "tokens": lambda link: replace(link, tokens=(*link.tokens[:-1], link.tokens[-1] ^ 1)),
    "fewer tokens": lambda link: replace(link, tokens=link.tokens[:-1]),
}
WRONG_HEADERS: dict[str, Callable[[BlockHeader], BlockHeader]] = {
    "part": lambda one: replace(one, part=Part.WINDOW),
    "layout": lambda one: replace(one, layout="test: another"),
}


def wrong_in(field: str, one: BlockHeader) -> BlockHeader:
    """The header with another value in one field, of its link or its own."""
    if field in WRONG:
        return replace(one, link=WRONG[field](one.link))
    return WRONG_HEADERS[field](one)


@pytest.mark.parametrize(
    ("field", "flushed"),
    [
        pytest.param(field, flushed, marks=[] if flushed == i % 2 else [pytest.mark.thorough])
        for i, field in enumerate((*WRONG, *WRONG_HEADERS))
        for flushed in (False, True)
    ],
)
def test_a_body_is_given_only_to_who_asks_for_it_in_every_field(
    store: StorePort, field: str, flushed: bool
) -> None:
    link = chain(2 * 256)[1]
    wide = BlockLayout(LAYOUT.name, full=LAYOUT.full, window=LAYOUT.full)
    given = block(link)
    assert store.put(given)
    if flushed:
        store.flush()
    wrong = wrong_in(field, given.header)
    assert wrong != given.header
    assert store.read(wrong) is None
    assert store.read_into([Room(wrong, wide).read]) == [False]
    assert total(store, "misses") > 0


@pytest.mark.parametrize("flushed", [False, True])
def test_what_was_asked_for_wrongly_is_still_there(store: StorePort, flushed: bool) -> None:
    given = block(chain(2 * 256)[1])
    assert store.put(given)
    if flushed:
        store.flush()
    same = BlockHeader(chain(2 * 256)[1], Part.FULL, LAYOUT.name)
    assert store.read(same) == given.body
    room = Room(same)
    assert store.read_into([room.read]) == [True]
    assert room.body == given.body
    assert total(store, "hits") == 2


@pytest.mark.parametrize("full", [(8, 2), (8, 2, 4, 1), (8, 2, 5)])
def test_targets_of_another_shape_are_a_miss(store: StorePort, full: tuple[int, ...]) -> None:
    given = block(chain(256)[0])
    assert store.put(given)
    store.flush()
    other = BlockLayout(LAYOUT.name, full=full)
    assert store.read_into([Room(given.header, other).read]) == [False]


def test_children_are_the_blocks_that_follow(store: StorePort) -> None:
    first, second = chain(300)
    [shorter] = SCOPE.chain(second.tokens[:20], parent=first.hash, start=256)
    [other] = chain(256, seed=1)
    put_all(store, blocks([first, second, shorter, other]))
    assert store.put(block(second, Part.CHECKPOINT))

    def following(parent: BlockHash, part: Part = Part.FULL) -> set[BlockKey]:
        return {one.key for one in store.children(parent, part)}

    for _ in range(2):
        assert following(SCOPE.root) == set(keys([first, other]))
        assert following(first.hash) == set(keys([second, shorter]))
        assert following(first.hash, Part.CHECKPOINT) == {second.key(Part.CHECKPOINT)}
        assert following(second.hash) == set()
        assert following(scope_of(tenant="other").root) == set()
        assert len(store.children(first.hash, Part.FULL)) == 2
        store.flush()
    assert header(second) in store.children(first.hash, Part.FULL)


@pytest.mark.parametrize("flushed", [False, True])
def test_children_can_be_asked_for_by_how_they_begin(store: StorePort, flushed: bool) -> None:
    numbers = [*range(100, 200)]
    variants = {
        "same": numbers,
        "shorter": numbers[:20],
        "few": numbers[:3],
        "differs late": [*numbers[:16], 1, *numbers[17:]],
        "differs early": [*numbers[:15], 1, *numbers[16:]],
        "few others": [numbers[0], 1],
    }
    links = {name: next(SCOPE.chain(tokens)) for name, tokens in variants.items()}
    put_all(store, blocks(list(links.values())))
    if flushed:
        store.flush()

    def found(like: Sequence[int]) -> set[str]:
        keys = {one.key for one in store.nearest(SCOPE.root, Part.FULL, like)}
        return {name for name, link in links.items() if link.key(Part.FULL) in keys}

    assert (
        {"same", "shorter", "few"} <= found(numbers) <= {"same", "shorter", "few", "differs late"}
    )
    assert "few" in found(numbers[:16])
    assert found(numbers[:16]) & {"same", "shorter", "differs late"}
    assert found(numbers[:1]) & set(variants)
    assert found([numbers[0], 2]) == set()
    assert found([]) == set()
    assert len(store.children(SCOPE.root, Part.FULL)) == len(links)


@pytest.mark.parametrize("wide", [0, 1 << 31])
def test_the_nearest_of_many_share_the_most_tokens(store: StorePort, wide: int) -> None:
    """Compared with a search of all: what `like` begins with, and what shares most with it."""
    random = Random(7)
    texts = {
        tuple(random.choice((5, 70_000)) for _ in range(random.choice((1, 5, 17, 40))))
        for _ in range(60)
    }
    known = {next(SCOPE.chain(tokens)).hash: tokens for tokens in texts}
    put_all(store, [block(next(SCOPE.chain(tokens))) for tokens in texts])
    put_all(store, [block(next(SCOPE.chain((5, wide, n)))) for n in range(3) if wide])
    for _ in range(40):
        like = [random.choice((5, 70_000)) for _ in range(random.choice((3, 16, 30, 60)))]
        found = [known[one.key.hash] for one in store.nearest(SCOPE.root, Part.FULL, like)]
        candidates = [one for one in texts if begins_like(one, like)]
        assert {one for one in candidates if tuple(like[: len(one)]) == one} <= set(found)
        assert set(found) <= set(candidates)
        most = max((common_prefix(one, like) for one in candidates), default=0)
        assert max((common_prefix(one, like) for one in found), default=0) == most


def test_a_block_that_is_there_is_not_written_again(store: StorePort) -> None:
    links = chain(600)
    put_all(store, blocks(links))
    store.flush()
    written, n_bytes = total(store, "written"), [tier.n_bytes for tier in store.stats()]
    assert written >= len(links)
    put_all(store, blocks(links))
    store.flush()
    assert total(store, "written") == written
    assert [tier.n_bytes for tier in store.stats()] == n_bytes


# Room


def test_of_a_chain_the_tail_goes_first(bounded: Make, tmp_path: Path) -> None:
    with opened(bounded, tmp_path, 8 * BIG_BYTES) as store:
        links = chain(4 * 256)
        put_all(store, [block(link, layout=BIG) for link in links])
        store.touch(keys(links))
        store.flush()
        assert n_found(store, links) == 4
        seen = []
        for seed in range(1, 30):
            press(store, [seed])
            seen.append(n_found(store, links))
        assert seen == sorted(seen, reverse=True)
        assert seen[0] == 4
        assert seen[-1] == 0
        assert total(store, "evicted") > 0


def test_what_was_used_last_stays(bounded: Make, tmp_path: Path) -> None:
    with opened(bounded, tmp_path, 8 * BIG_BYTES) as store:
        links = chain(3 * 256)
        put_all(store, [block(link, layout=BIG) for link in links])
        store.flush()
        for seed in range(1, 30):
            store.touch(keys(links))
            press(store, [seed])
            assert n_found(store, links) == 3
            assert n_found(store, chain(256, seed)) == 1


def test_what_an_agent_left_is_evicted_after_what_ended_long_ago_and_before_what_is_used(
    bounded: Make, tmp_path: Path
) -> None:
    with opened(bounded, tmp_path, 12 * BIG_BYTES) as store:
        ended, live, old = chain(2 * 256, 4), chain(2 * 256, 1), chain(4 * 256, 2)
        put_all(store, [block(link, layout=BIG) for link in (*ended, *live, *old)])
        assert store.agents.save(manifest("ended", 2 * 256, 4))
        assert store.agents.save(manifest("live", 2 * 256, 1))
        assert store.agents.save(manifest("a", 4 * 256, 2))
        for _ in range(20):
            store.touch(keys(live))
        store.touch(keys(old))
        store.flush()
        # Compacted: it begins with the first block alone. The live agent was used before it.
        kept = (*text(256, 2), *text(200, 3))
        new = list(SCOPE.chain(kept))
        put_all(store, [block(link, layout=BIG) for link in new])
        assert store.agents.save(replace(manifest("a", 0), token_ids=kept))
        store.flush()
        assert n_found(store, old) == 4, "it stays for as long as there is room"
        for seed in range(10, 30):
            press(store, [seed])
            assert n_found(store, live) == n_found(store, new) == 2
            if n_found(store, old) < 4:
                assert n_found(store, ended) == 0
            if n_found(store, old) == 1:  # the one that both begin with
                break
        assert n_found(store, old) == 1


def test_what_an_agent_returns_to_is_evicted_as_any_other(bounded: Make, tmp_path: Path) -> None:
    with opened(bounded, tmp_path, 10 * BIG_BYTES) as store:
        old, other = chain(4 * 256, 2), chain(3 * 256, 1)
        put_all(store, [block(link, layout=BIG) for link in (*other, *old)])
        assert store.agents.save(manifest("other", 3 * 256, 1))
        for seed, n_tokens in ((2, 4 * 256), (3, 0), (2, 4 * 256)):
            assert store.agents.save(manifest("a", n_tokens, seed))
            store.flush()
        for seed in range(10, 14):
            press(store, [seed])
        assert n_found(store, old) == 4
        assert n_found(store, other) < 3


def test_a_block_larger_than_the_budget_is_not_kept(bounded: Make, tmp_path: Path) -> None:
    with opened(bounded, tmp_path, 8 * BIG_BYTES) as store:
        small, large = chain(256, 1)[0], chain(256, 2)[0]
        assert store.put(block(small, layout=BIG))
        store.flush()
        store.put(StoredBlock(header(large, layout=BIG), bytes(10 * BIG_BYTES)))
        store.flush()
        assert store.read(header(large, layout=BIG)) is None
        assert n_found(store, [small]) == 1
        assert is_within_budget(store)


def test_pinned_agents_survive_pressure_until_they_are_unpinned(
    bounded: Make, tmp_path: Path
) -> None:
    with opened(bounded, tmp_path, 12 * BIG_BYTES) as store:
        links = chain(3 * 256)
        put_all(store, [block(link, layout=BIG) for link in links])
        put_all(store, [StoredBlock(header(links[-1], Part.CHECKPOINT, BIG), b"state")])
        assert store.agents.save(manifest("a", 3 * 256, pinned=True))
        store.flush()
        assert all(tier.pinned_bytes > 3 * 65536 for tier in store.stats() if tier.n_agents)
        press(store, range(1, 30))
        assert n_found(store, links) == 3
        assert store.read(header(links[-1], Part.CHECKPOINT, BIG)) == b"state"
        assert store.agents.manifest(SCOPE, "a") is not None
        assert store.agents.save(manifest("a", 3 * 256))
        store.flush()
        press(store, range(30, 60))
        assert n_found(store, links) == 0


def test_pins_may_leave_no_room_but_the_budget_holds(bounded: Make, tmp_path: Path) -> None:
    with opened(bounded, tmp_path, 8 * BIG_BYTES) as store:
        links = chain(20 * 256)
        for link in links:
            store.put(block(link, layout=BIG))
            store.flush()
        there = [link for link in links if link.key(Part.FULL) in store.find(keys(links))]
        store.agents.save(manifest("a", 20 * 256, pinned=True))
        store.flush()
        there = [link for link in there if link.key(Part.FULL) in store.find(keys(there))]
        press(store, range(1, 20))
        assert set(store.find(keys(links))) == set(keys(there))
        assert total(store, "dropped") > 0


# Agents


STRANGE = [
    "",
    " ",
    ".",
    "../../etc/passwd",
    "a/b\\c:d",
    "nul\0byte",
    "line\nbreak",
    "\ud800 half a pair",
    "é",
    "e\u0301",
    "A",
    "a",
    "🦜" * 300,
    "x" * 10_000,
]


def test_an_agent_is_kept_as_it_was_saved(store: StorePort) -> None:
    given = replace(manifest("a", 300, pinned=True, parent="b"), model="a model", saved_at=1234.5)
    assert store.agents.save(given)
    for _ in range(2):
        kept = store.agents.manifest(SCOPE, "a")
        assert kept is not None
        assert kept == replace(given, generation=kept.generation)
        assert kept.generation > 0
        assert saved_agents(store) == [kept]
        store.flush()


def test_generations_rise(store: StorePort) -> None:
    seen = []
    for n_tokens in (10, 300, 300, 20):
        assert store.agents.save(replace(manifest("a", n_tokens), generation=77))
        store.flush()
        kept = store.agents.manifest(SCOPE, "a")
        assert kept is not None
        assert len(kept.token_ids) == n_tokens
        seen.append(kept.generation)
    assert seen == list(range(seen[0], seen[0] + 4))


def test_the_newest_manifest_is_seen_at_once(store: StorePort) -> None:
    for n_tokens in range(1, 50):
        assert store.agents.save(manifest("a", n_tokens))
        kept = store.agents.manifest(SCOPE, "a")
        assert kept is not None
        assert len(kept.token_ids) == n_tokens
        assert [len(one.token_ids) for one in saved_agents(store)] == [n_tokens]


def test_agents_are_listed_last_saved_first(store: StorePort) -> None:
    for at, agent in enumerate(("a", "b", "c", "a")):
        assert store.agents.save(replace(manifest(agent, 10), saved_at=float(at)))
    assert [one.agent_id for one in saved_agents(store)] == ["a", "c", "b"]
    store.flush()
    assert [one.agent_id for one in saved_agents(store)] == ["a", "c", "b"]


def pages(store: StorePort, limit: int) -> list[list[tuple[str, int]]]:
    """All pages of the agents in `SCOPE`: names and generations."""
    found: list[list[tuple[str, int]]] = []
    after = None
    while page := store.agents.page(SCOPE, limit, after):
        found.append([(one.agent_id, one.generation) for one in page])
        after = page[-1].place
    return found


@pytest.mark.parametrize("flushed", [False, True])
def test_agents_are_listed_page_by_page(store: StorePort, flushed: bool) -> None:
    for at, agent in enumerate(("a", "b", "c", "\ud800", "e", "b", "a")):
        assert store.agents.save(replace(manifest(agent, 10 + at), saved_at=at // 2))
    other = replace(manifest("other", 10, scope=scope_of("other")), saved_at=9.0)
    assert store.agents.save(other)
    if flushed:
        store.flush()
    names = ["a", "e", "b", "\ud800", "c"]
    for limit in (1, 2, 3, 5, 9):
        listed = pages(store, limit)
        assert [name for page in listed for name, _ in page] == names
        assert all(len(page) == limit for page in listed[:-1])
    assert [one.agent_id for one in store.agents.page(other.scope, 5)] == ["other"]
    assert store.agents.remove(SCOPE, "e")
    assert [name for page in pages(store, 2) for name, _ in page] == ["a", "b", "\ud800", "c"]
    assert store.agents.page(scope_of("third"), 5) == []


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -1.0, 1e300])
def test_any_time_has_a_place(store: StorePort, time: float) -> None:
    for agent in ("a", "b"):
        assert store.agents.save(replace(manifest(agent, 10), saved_at=time))
    store.flush()
    assert [name for page in pages(store, 1) for name, _ in page] == ["b", "a"]


def test_the_children_of_an_agent_are_known(store: StorePort) -> None:
    for agent, parent in (("b", "a"), ("c", "a"), ("d", "b"), ("e", None)):
        assert store.agents.save(manifest(agent, 10, parent=parent))
    for flushed in (False, True):
        if flushed:
            store.flush()
        assert list(store.agents.child_agents(SCOPE, "a")) == ["b", "c"]
        assert list(store.agents.child_agents(SCOPE, "b")) == ["d"]
        assert list(store.agents.child_agents(SCOPE, "e")) == []
        assert list(store.agents.child_agents(scope_of("other"), "a")) == []
    assert store.agents.save(manifest("c", 20, parent="b"))
    store.agents.remove(SCOPE, "b")
    store.flush()
    assert list(store.agents.child_agents(SCOPE, "a")) == []
    assert list(store.agents.child_agents(SCOPE, "b")) == ["c", "d"]


def test_two_of_the_agents_that_need_a_block_are_known(store: StorePort) -> None:
    links = chain(600)
    for agent, n_tokens in (("a", 600), ("b", 512), ("c", 300)):
        assert store.agents.save(manifest(agent, n_tokens))
    store.flush()
    users = store.agents.users([link.hash for link in links])
    first, second, third = (users[link.hash] for link in links)
    assert len(first) >= 2
    assert first <= {(SCOPE, "a"), (SCOPE, "b"), (SCOPE, "c")}
    assert second == {(SCOPE, "a"), (SCOPE, "b")}
    assert third == {(SCOPE, "a")}
    store.agents.remove(SCOPE, "a")
    assert not store.agents.users([links[2].hash]).get(links[2].hash)


def test_a_removed_agent_is_gone_and_its_blocks_stay(store: StorePort) -> None:
    links = chain(300)
    put_all(store, blocks(links))
    for flushed in (False, True):
        assert store.agents.save(manifest("a", 300))
        assert store.agents.save(manifest("b", 300))
        if flushed:
            store.flush()
        assert store.agents.remove(SCOPE, "a") is True
        assert store.agents.remove(SCOPE, "a") is False
        assert store.agents.manifest(SCOPE, "a") is None
        store.flush()
        assert store.agents.manifest(SCOPE, "a") is None
        assert [one.agent_id for one in saved_agents(store)] == ["b"]
        assert n_found(store, links) == 2


def test_any_text_names_an_agent_and_no_two_are_one(store: StorePort) -> None:
    for i, agent in enumerate(STRANGE):
        assert store.agents.save(replace(manifest(agent, 10 + i), saved_at=float(i)))
    store.flush()
    assert [one.agent_id for one in saved_agents(store)] == STRANGE[::-1]
    for i, agent in enumerate(STRANGE):
        kept = store.agents.manifest(SCOPE, agent)
        assert kept is not None
        assert len(kept.token_ids) == 10 + i
    for i, agent in enumerate(STRANGE):
        assert store.agents.remove(SCOPE, agent)
        assert len(saved_agents(store)) == len(STRANGE) - i - 1


def test_models_and_tenants_do_not_see_each_other(store: StorePort) -> None:
    scopes = [scope_of(model, tenant) for model in "mn" for tenant in "tu"]
    for i, scope in enumerate(scopes):
        assert store.agents.save(manifest("a", 10 + i, scope=scope))
    [ours] = chain(256, scope=scopes[0])
    assert store.put(block(ours))
    store.flush()
    for i, scope in enumerate(scopes):
        kept = store.agents.manifest(scope, "a")
        assert kept is not None
        assert (kept.scope, len(kept.token_ids)) == (scope, 10 + i)
        assert bool(store.find(keys(chain(256, scope=scope)))) == (i == 0)
        assert bool(store.children(scope.root, Part.FULL)) == (i == 0)
    assert store.agents.remove(scopes[1], "a")
    assert store.agents.manifest(scopes[0], "a") is not None
    assert len(saved_agents(store)) == 3


def test_a_fork_stores_no_further_blocks(store: StorePort) -> None:
    put_all(store, blocks(chain(700)))
    assert store.agents.save(manifest("a", 700))
    store.flush()
    before = total(store, "written"), n_blocks(store)
    put_all(store, blocks(chain(700)))
    assert store.agents.save(manifest("b", 700, parent="a"))
    store.flush()
    assert (total(store, "written"), n_blocks(store)) == before
    forked = store.agents.manifest(SCOPE, "b")
    assert forked is not None
    assert forked.parent == "a"
    assert store.agents.remove(SCOPE, "a")
    store.flush()
    assert n_found(store, chain(700)) == 3


def test_a_tail_that_a_longer_one_replaces_is_dropped(store: StorePort) -> None:
    first, tail = chain(300)
    put_all(store, [*blocks([first, tail]), block(tail, Part.CHECKPOINT)])
    assert store.agents.save(manifest("a", 300))
    longer = chain(400)[1]
    assert store.put(block(longer))
    assert store.agents.save(manifest("a", 400))
    store.flush()
    assert set(store.find(keys([first, tail, longer]))) == set(keys([first, longer]))
    assert store.find([tail.key(Part.CHECKPOINT)])


def test_a_tail_that_another_agent_needs_is_kept(store: StorePort) -> None:
    first, tail = chain(300)
    longer, other = chain(400)[1], chain(400, seed=1)[1]
    [unlike] = SCOPE.chain(other.tokens, parent=first.hash, start=256)
    put_all(store, blocks([first, tail]))
    assert store.agents.save(manifest("a", 300))
    assert store.agents.save(manifest("b", 300))
    put_all(store, blocks([longer, unlike]))
    assert store.agents.save(manifest("a", 400))
    store.flush()
    assert len(store.find(keys([first, tail, longer, unlike]))) == 4
    assert store.agents.save(manifest("b", 400))
    store.flush()
    assert len(store.find(keys([first, tail, longer, unlike]))) == 3


# Life


def test_the_secret_stays_the_same(store: StorePort) -> None:
    assert len(store.secret) == 32
    assert store.secret == store.secret


def test_no_two_stores_have_the_same_secret(make: Make, tmp_path: Path) -> None:
    with opened(make, tmp_path / "a") as one, opened(make, tmp_path / "b") as other:
        assert one.secret != other.secret


def test_statistics_name_what_everybody_asks_for(store: StorePort) -> None:
    asked = {"hits", "misses", "dropped", "evicted", "damaged", "write_errors"}
    assert store.stats()
    for tier in store.stats():
        assert asked <= set(tier.counts)
        assert ("written" in tier.counts) == (tier.tier not in (Tier.QUEUE, Tier.UPLOADS))
        assert tier.max_bytes > 0


@pytest.mark.parametrize("name", list(LASTING))
def test_closing_keeps_all_that_was_accepted(name: str, tmp_path: Path) -> None:
    links = chain(30 * 256 + 5)
    with opened(LASTING[name], tmp_path) as store:
        secret = store.secret
        put_all(store, blocks(links))
        assert store.agents.save(manifest("a", 30 * 256 + 5))
    with opened(LASTING[name], tmp_path) as store:
        assert store.secret == secret
        tier = store if isinstance(store, RemoteStore) else remote_tier(store)
        if tier is not None:
            tier.look_up_agent(SCOPE, "a")
        kept = store.agents.manifest(SCOPE, "a")
        assert kept is not None
        assert kept.token_ids == text(30 * 256 + 5)
        assert [store.read(header(link)) for link in links] == [one.body for one in blocks(links)]


@pytest.mark.process
@pytest.mark.usefixtures("eager_threads")
def test_several_threads_may_use_it(store: StorePort) -> None:
    wrong: list[str] = []

    def use(number: int) -> None:
        random = Random(number)
        for turn in range(1, 12):
            links = chain(256 * random.randint(1, 4), seed=random.randrange(3))
            for link in links:
                store.put(block(link))
            rooms = [Room(header(link)) for link in links]
            done = store.read_into([room.read for room in rooms])
            for link, room, filled in zip(links, rooms, done, strict=True):
                if not filled or room.body != block(link).body:
                    wrong.append(f"thread {number}, turn {turn}: block {link.start}")
            store.touch(keys(links))
            store.agents.save(manifest(f"agent {number}", 10 * turn))
            kept = store.agents.manifest(SCOPE, f"agent {number}")
            if kept is None or len(kept.token_ids) != 10 * turn:
                wrong.append(f"thread {number}, turn {turn}: manifest")
            store.agents.remove(SCOPE, f"agent {(number + 10) % 13}")
            saved_agents(store)
            store.children(SCOPE.root, Part.FULL)
            store.stats()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    store.flush()
    assert len(saved_agents(store)) == 3
    assert is_within_budget(store)


# Anything in any order

LENGTHS = (1, 100, 256, 300, 512, 600)
links_of = st.builds(
    chain,
    st.sampled_from(LENGTHS),
    st.integers(0, 2),
    st.sampled_from([SCOPE, scope_of(tenant="other")]),
)
parts = st.sampled_from(list(Part))
agents = st.sampled_from(["a", "b", "\ud800"])


class StoreMachine(RuleBasedStateMachine):
    """A store against dictionaries of all that was ever put into it."""

    make: Make

    @initialize(max_bytes=st.sampled_from([25_000, 60_000, 150_000, AMPLE]))
    def open(self, max_bytes: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store = type(self).make(self.folder, max_bytes)
        self.is_ample = max_bytes == AMPLE
        self.known: dict[BlockKey, StoredBlock] = {}
        self.saved: dict[str, list[Manifest]] = {}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    def must_have(self, key: BlockKey) -> bool:
        """Whether the block cannot be missing; a tail that a longer one replaces may."""
        if not self.is_ample or key not in self.known:
            return False
        link = self.known[key].header.link
        others = [one.header.link for one in self.known.values() if one.header.part is key.part]
        return not any(
            other.parent == link.parent
            and len(other.tokens) > len(link.tokens)
            and other.tokens[: len(link.tokens)] == link.tokens
            for other in others
        )

    @rule(links=links_of, part=parts)
    def put(self, links: list[BlockLink], part: Part) -> None:
        for given in blocks(links, part):
            kept = self.store.put(given)
            if kept:
                self.known[given.header.key] = given
            assert kept or not self.is_ample

    @rule(links=links_of, part=parts)
    def read(self, links: list[BlockLink], part: Part) -> None:
        for link in links:
            body = self.store.read(header(link, part))
            assert body is None or body == self.known[link.key(part)].body
            assert body is not None or not self.must_have(link.key(part))

    @rule(links=links_of, part=st.sampled_from([Part.FULL, Part.WINDOW]))
    def read_into(self, links: list[BlockLink], part: Part) -> None:
        rooms = [Room(header(link, part)) for link in links]
        done = self.store.read_into([room.read for room in rooms])
        for link, room, filled in zip(links, rooms, done, strict=True):
            assert not filled or room.body == self.known[link.key(part)].body
            assert filled or not self.must_have(link.key(part))

    @rule(links=links_of, part=parts)
    def find(self, links: list[BlockLink], part: Part) -> None:
        found = self.store.find(keys(links, part))
        assert all(found[key].n_bytes == len(self.known[key].body) for key in found)
        assert all(key in found for key in keys(links, part) if self.must_have(key))

    @rule(links=links_of, part=parts)
    def children(self, links: list[BlockLink], part: Part) -> None:
        parent = links[-1].parent
        found = self.store.children(parent, part)
        assert all(one == self.known[one.key].header for one in found)
        assert all((one.link.parent, one.part) == (parent, part) for one in found)
        assert len({one.key for one in found}) == len(found)
        keys_there = {one.key for one in found}
        for key, one in self.known.items():
            if key.part is part and one.header.link.parent == parent and self.must_have(key):
                assert key in keys_there

    @rule(links=links_of, part=parts)
    def touch(self, links: list[BlockLink], part: Part) -> None:
        self.store.touch(keys(links, part))

    @rule(
        agent=agents,
        n_tokens=st.sampled_from(LENGTHS),
        seed=st.integers(0, 2),
        pinned=st.booleans(),
    )
    def save(self, agent: str, n_tokens: int, seed: int, pinned: bool) -> None:
        given = manifest(agent, n_tokens, seed, pinned=pinned)
        kept = self.store.agents.save(given)
        if kept:
            self.saved.setdefault(agent, []).append(given)
        assert kept or not self.is_ample

    @rule(agent=agents)
    def remove(self, agent: str) -> None:
        removed = self.store.agents.remove(SCOPE, agent)
        assert self.store.agents.manifest(SCOPE, agent) is None
        known = self.saved.pop(agent, None)
        assert known is not None or not removed
        assert removed or not (self.is_ample and known)

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @invariant()
    def budget_holds_and_agents_are_as_saved(self) -> None:
        if not hasattr(self, "store"):
            return
        assert is_within_budget(self.store)
        listed = [replace(one, generation=0) for one in saved_agents(self.store)]
        assert len({one.agent_id for one in listed}) == len(listed)
        assert all(one in self.saved[one.agent_id] for one in listed)
        if self.is_ample:
            newest = {agent: many[-1] for agent, many in self.saved.items()}
            assert {one.agent_id: one for one in listed} == newest


class MemoryMachine(StoreMachine):
    make = staticmethod(STORES["memory"])


class BackgroundMemoryMachine(StoreMachine):
    make = staticmethod(STORES["background(memory)"])


class DiskMachine(StoreMachine):
    make = staticmethod(STORES["disk"])


class BackgroundDiskMachine(StoreMachine):
    make = staticmethod(STORES["background(disk)"])


class TieredMachine(StoreMachine):
    make = staticmethod(STORES["tiered(memory, disk)"])


class TieredBackgroundMachine(StoreMachine):
    make = staticmethod(STORES["tiered(memory, background(disk))"])


class RemoteMachine(StoreMachine):
    make = staticmethod(STORES["remote(memory)"])


class SharedMachine(StoreMachine):
    make = staticmethod(STORES["shared(tiered, background(remote))"])


for machine in StoreMachine.__subclasses__():
    in_memory = machine in (MemoryMachine, BackgroundMemoryMachine)
    n_examples = examples(20, thorough=300) if in_memory else examples(6, thorough=60)
    machine.TestCase.settings = settings(max_examples=n_examples, stateful_step_count=30)

TestMemory = MemoryMachine.TestCase
TestBackgroundMemory = BackgroundMemoryMachine.TestCase
TestDisk = DiskMachine.TestCase
TestBackgroundDisk = BackgroundDiskMachine.TestCase
TestTiered = TieredMachine.TestCase
TestTieredBackground = TieredBackgroundMachine.TestCase
TestRemote = RemoteMachine.TestCase
TestShared = SharedMachine.TestCase
