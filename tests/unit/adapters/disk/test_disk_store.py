"""What the disk store keeps, beyond what every store does: over restarts, and on the drive."""

from __future__ import annotations

import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.stores.disk import DiskStore, writing
from semantic.adapters.stores.disk.entries import Entries
from semantic.adapters.stores.disk.manifest_file import FiledManifest, ManifestFile, read_manifest
from semantic.domain.block_hash import Part
from semantic.domain.errors import InvalidRequestError
from semantic.domain.match import MatchEnd, MatchReport
from semantic.domain.stored import BlockRead, StoredBlock, Tier
from tests.support import store_blocks as make
from tests.support.open_files import open_files
from tests.support.store_blocks import saved_agents
from tests.unit.adapters.disk.support import (
    block_files,
    count,
    is_read,
    manifest_files,
    opened,
    path_of,
    put_all,
)

ODD_NAMES = [
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a\0b",
    "agent",
    "AGENT",
    "Agent",
    "🤖" * 50,
    "e\u0301",
    "\u00e9",
    "\ud800 lone",
    "x" * 10_000,
    "con.txt",
    "a\nb",
    "%2e%2e%2f",
    "-rf",
    "~root",
]


def test_everything_is_there_after_a_restart(root: Path) -> None:
    links = make.chain(1000)
    saved = replace(
        make.manifest("a", 1000, pinned=True, parent="b"),
        note="hi",
        match=MatchReport(5, 3, MatchEnd.DIVERGED, "pool", 3, 1, 2, 0.5),
    )
    with opened(root) as store:
        secret = store.secret
        put_all(store, links)
        put_all(store, links[1:2], Part.WINDOW)
        put_all(store, links[3:], Part.CHECKPOINT)
        assert store.save(saved)
        found = store.find(make.keys(links))
    with opened(root) as store:
        assert store.secret == secret
        assert store.find(make.keys(links)) == found
        assert {one.tier for one in found.values()} == {Tier.DISK}
        assert all(is_read(store, link) for link in links)
        assert is_read(store, links[1], Part.WINDOW)
        body = store.read(make.header(links[3], Part.CHECKPOINT))
        assert body == make.block(links[3], Part.CHECKPOINT).body
        assert store.manifest(make.SCOPE, "a") == replace(saved, generation=1)
        assert store.children(links[0].hash, Part.FULL) == [make.header(links[1])]
        assert store.check(read_data=True).is_clean


def test_files_and_folders_are_the_owners_alone(root: Path, store: DiskStore) -> None:
    put_all(store, make.chain(600))
    store.save(make.manifest("a", 600))
    for path in [root, *root.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_body_of_no_bytes_is_kept(store: DiskStore) -> None:
    header = replace(make.header(make.chain(5)[0]), layout="nothing")
    assert store.put(StoredBlock(header, b""))
    assert list(store.read_into([BlockRead(header, [])])) == [True]
    assert store.read(header) == b""


def test_many_segments_and_large_ones_are_read(store: DiskStore) -> None:
    layout = replace(make.LAYOUT, full=(1,) * 1500 + (12_000,))
    (link,) = make.chain(200)
    block = make.block(link, layout=layout)
    store.put(block)
    room = make.Room(make.header(link), layout)
    assert list(store.read_into([room.read])) == [True]
    assert room.body == block.body
    assert room.rest_is_untouched


def test_targets_of_another_size_are_a_miss(store: DiskStore) -> None:
    (link,) = make.chain(256)
    store.put(make.block(link))
    room = make.Room(make.header(link))
    assert list(store.read_into([BlockRead(make.header(link), room.read.targets[:-1])])) == [False]
    assert count(store, "mismatches: size") == 1
    assert is_read(store, link)


def test_a_wrong_question_does_not_cost_a_sound_file(store: DiskStore) -> None:
    (link,) = make.chain(256)
    store.put(make.block(link))
    wrong = replace(make.header(link), layout="another")
    assert store.read(wrong) is None
    assert count(store, "mismatches: layout") == 1
    assert count(store, "damaged") == 0
    assert is_read(store, link)


def test_what_is_there_is_not_written_again(root: Path, store: DiskStore) -> None:
    (link,) = make.chain(256)
    store.put(make.block(link))
    before = path_of(root, link.key(Part.FULL)).stat()
    assert store.put(make.block(link))
    assert path_of(root, link.key(Part.FULL)).stat() == before
    assert count(store, "written") == 1


def test_a_file_that_somebody_deleted_is_a_miss_and_can_be_put_again(
    root: Path, store: DiskStore
) -> None:
    (link,) = make.chain(256)
    store.put(make.block(link))
    path_of(root, link.key(Part.FULL)).unlink()
    assert store.find([link.key(Part.FULL)])
    assert not is_read(store, link)
    assert not store.find([link.key(Part.FULL)])
    assert store.put(make.block(link))
    path_of(root, link.key(Part.FULL)).unlink()
    assert store.put(make.block(link))
    assert is_read(store, link)


@pytest.mark.parametrize("name", ODD_NAMES, ids=lambda name: ascii(name)[:20])
def test_any_name_is_an_agents(root: Path, store: DiskStore, name: str) -> None:
    assert store.save(make.manifest(name, 10))
    found = store.manifest(make.SCOPE, name)
    assert found is not None
    assert found.agent_id == name
    assert all(len(path.name) < 100 and path.name.isascii() for path in root.rglob("*"))


def test_no_two_odd_names_are_the_same_agent(root: Path) -> None:
    with opened(root) as store:
        for i, name in enumerate(ODD_NAMES):
            assert store.save(make.manifest(name, i + 1))
    with opened(root) as store:
        for i, name in enumerate(ODD_NAMES):
            found = store.manifest(make.SCOPE, name)
            assert found is not None
            assert len(found.token_ids) == i + 1
        names = [manifest.agent_id for manifest in saved_agents(store)]
        assert sorted(names) == sorted(ODD_NAMES)
        assert all(store.remove(make.SCOPE, name) for name in ODD_NAMES)
        assert saved_agents(store) == []
    assert manifest_files(root) == []


def test_the_newest_generation_counts_and_one_older_is_kept(root: Path, store: DiskStore) -> None:
    for n_tokens in (10, 20, 30):
        store.save(make.manifest("a", n_tokens))
    found = store.manifest(make.SCOPE, "a")
    assert found is not None
    assert (found.generation, len(found.token_ids)) == (3, 30)
    assert [path.suffix for path in manifest_files(root)] == [f".{2:020}", f".{3:020}"]


def test_a_tail_that_a_longer_block_begins_with_goes(root: Path, store: DiskStore) -> None:
    short, long, full = (make.chain(n)[1] for n in (300, 400, 512))
    put_all(store, make.chain(300))
    put_all(store, [short], Part.CHECKPOINT)
    store.save(make.manifest("a", 300))
    put_all(store, [long])
    store.save(make.manifest("a", 400))
    assert set(store.find(make.keys([short, long]))) == {long.key(Part.FULL)}
    assert store.find([short.key(Part.CHECKPOINT)])
    store.save(make.manifest("b", 400))
    put_all(store, [full])
    store.save(make.manifest("a", 512))
    assert is_read(store, long), "b still needs it"
    store.save(make.manifest("b", 512))
    assert not path_of(root, long.key(Part.FULL)).exists()
    assert count(store, "superseded") == 2


@pytest.mark.parametrize("large", [True, False])
def test_large_checkpoints_of_turns_before_the_last_two_go(store: DiskStore, large: bool) -> None:
    lengths = (300, 400, 500, 600)
    ends = [make.chain(n)[-1] for n in lengths]
    grid = make.chain(512)[-1]
    size = 1 + len(make.block(make.chain(512)[0], Part.FULL).body) if large else 1
    for number, (end, n) in enumerate(zip(ends, lengths, strict=True)):
        put_all(store, make.chain(n))
        for link in (end, grid):
            assert store.put(StoredBlock(make.header(link, Part.CHECKPOINT), bytes(size)))
        put_all(store, [end], Part.WINDOW)
        store.save(make.manifest("a", n))
        if number == 1:
            store.save(make.manifest("b", n))  # goes on from there
    every = [link.key(part) for link in ends for part in (Part.CHECKPOINT, Part.WINDOW)]
    found = store.find([*every, grid.key(Part.CHECKPOINT)])
    assert set(found) == {*every[2 if large else 0 :], grid.key(Part.CHECKPOINT)}


def test_a_turn_without_checkpoints_reads_no_older_manifest(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def recorded(
        entries: Entries, key: bytes, generation: int
    ) -> tuple[FiledManifest, ManifestFile]:
        read.append(generation)
        return read_manifest(entries, key, generation)

    monkeypatch.setattr(writing, "read_manifest", recorded)
    for n in (300, 400, 500, 600):
        put_all(store, make.chain(n))
        store.save(make.manifest("a", n))
    assert not read
    put_all(store, make.chain(700)[-1:], Part.CHECKPOINT)
    store.save(make.manifest("a", 700))
    assert read == [3, 4], "what is deleted, and whether the next one goes on from it"


def test_checkpoints_of_a_history_that_was_left_stay(store: DiskStore) -> None:
    histories = [(300, 1), (400, 1), (300, 2), (400, 2), (500, 2), (600, 2)]
    size = 1 + len(make.block(make.chain(512)[0], Part.FULL).body)
    for n, seed in histories:
        links = make.chain(n, seed)
        put_all(store, links)
        assert store.put(StoredBlock(make.header(links[-1], Part.CHECKPOINT), bytes(size)))
        store.save(replace(make.manifest("a", n, seed), prompt_tokens=n))
    ends = [make.chain(n, seed)[-1].key(Part.CHECKPOINT) for n, seed in histories]
    assert set(store.find(ends)) == {ends[1], *ends[4:]}


def test_a_tail_that_went_another_way_stays(store: DiskStore) -> None:
    mine, other = make.chain(100, seed=1)[0], make.chain(200, seed=2)[0]
    put_all(store, [mine, other])
    store.save(make.manifest("a", 200, seed=2))
    assert is_read(store, mine)


def test_collecting_says_what_goes_and_then_deletes_just_that(root: Path) -> None:
    needed, needless = make.chain(600, seed=1), make.chain(600, seed=2)
    with opened(root) as store:
        put_all(store, [*needed, *needless])
        store.save(make.manifest("a", 600, seed=1))
        path_of(root, needless[0].key(Part.FULL)).write_bytes(b"junk")
        assert not is_read(store, needless[0])
        before = sorted(root.rglob("*"))
        said = store.gc(dry_run=True)
        assert sorted(root.rglob("*")) == before
        assert (said.unneeded_blocks, said.damaged_files) == (len(needless) - 1, 1)
        done = store.gc(dry_run=False)
        assert replace(done, dry_run=True) == said
        assert said.freed_bytes > 0
        assert store.gc(dry_run=False).freed_bytes == 0
        assert all(is_read(store, link) for link in needed)
        assert not store.find(make.keys(needless))
    assert len(block_files(root)) == len(needed)


def test_a_smaller_budget_deletes_nothing_until_it_is_asked_to(root: Path) -> None:
    links = make.chain(256 * 100)
    with opened(root) as store:
        put_all(store, links)
        store.save(make.manifest("a", 256 * 100))
        used = store.stats()[0].n_bytes
    small = used - 200_000
    with opened(root, small) as store:
        assert len(store.find(make.keys(links))) == 100
        said = store.gc(dry_run=True)
        assert len(store.find(make.keys(links))) == 100
        done = store.gc(dry_run=False)
        assert done.evicted_blocks == said.evicted_blocks > 0
        left = store.find(make.keys(links))
        assert set(left) == set(make.keys(links[: len(left)])), "the tail went first"
        assert store.stats()[0].n_bytes <= small


def test_check_looks_at_equal_shares(store: DiskStore) -> None:
    put_all(store, make.chain(256 * 30))
    store.save(make.manifest("a", 10))
    shares = [store.check(read_data=True, subset=(n, 3)) for n in (1, 2, 3)]
    assert sum(share.n_blocks for share in shares) == 30
    assert sum(share.n_manifests for share in shares) == 1
    assert all(share.n_blocks < 30 for share in shares)
    for wrong in ((0, 3), (4, 3), (1, 0)):
        with pytest.raises(InvalidRequestError, match="n from 1 to m"):
            store.check(subset=wrong)


def test_looking_at_a_folder_changes_nothing(root: Path, tmp_path: Path) -> None:
    assert DiskStore.inspect(tmp_path) is None
    assert DiskStore.inspect(root) is None
    with opened(root) as store:
        put_all(store, make.chain(600))
        store.save(make.manifest("a", 600))
        store.save(make.manifest("a", 601))
    before = sorted((path, path.lstat().st_mtime_ns) for path in root.rglob("*"))
    view = DiskStore.inspect(root)
    assert view is not None
    assert (view.format, view.n_blocks, view.n_agents) == (1, 3, 1)
    assert sorted((path, path.lstat().st_mtime_ns) for path in root.rglob("*")) == before


@pytest.mark.process
def test_many_threads_may_use_one_store(store: DiskStore) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            links = make.chain(256 * 6 + 9, seed % 3)
            for link in links:
                assert store.put(make.block(link))
                assert is_read(store, link)
            assert store.save(make.manifest(f"agent {seed}", 256 * 6 + 9, seed % 3))
            store.touch(make.keys(links))
            assert len(store.find(make.keys(links))) == len(links)
        except BaseException as error:  # noqa: BLE001  # reported below, in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert count(store, "written") == 3 * 7
    assert len(saved_agents(store)) == 6
    assert store.check(read_data=True).is_clean


def test_nothing_is_left_open(root: Path) -> None:
    for _ in range(3):
        with opened(root) as store:
            put_all(store, make.chain(1000))
            assert all(is_read(store, link) for link in make.chain(1000))
            store.save(make.manifest("a", 1000))
            assert open_files(root), "what is open is seen"
    assert open_files(root.parent) == []
    assert list((root / "tmp").iterdir()) == []


def test_a_budget_of_nothing_is_refused(root: Path) -> None:
    with pytest.raises(InvalidRequestError, match="at least 1"):
        DiskStore.open(root, 0)
    assert not root.exists()
