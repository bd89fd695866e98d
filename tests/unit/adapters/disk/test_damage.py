"""Damaged, foreign and planted files: each is a miss, counted by kind, and quarantined."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.adapters.stores.disk.entries import MAX_QUARANTINED
from semantic.domain.block_hash import Part
from tests.support import store_blocks as make
from tests.support.store_blocks import saved_agents
from tests.unit.adapters.disk.support import (
    bad_files,
    count,
    is_read,
    manifest_files,
    opened,
    path_of,
    put_all,
)

(LINK,) = make.chain(200)
KEY = LINK.key(Part.FULL)


@pytest.fixture
def file(root: Path, store: DiskStore) -> Path:
    """The file of `LINK`."""
    put_all(store, [LINK])
    return path_of(root, KEY)


def assert_quarantined(root: Path, store: DiskStore, kind: str) -> None:
    before = len(bad_files(root))
    assert store.read(make.header(LINK)) is None
    assert count(store, f"damaged: {kind}") == 1
    assert count(store, "damaged") == 1
    assert len(bad_files(root)) == before + 1
    assert not os.path.lexists(path_of(root, KEY))
    assert not store.find([KEY])
    assert store.put(make.block(LINK))
    assert is_read(store, LINK)


def test_a_thousand_flipped_bits_are_all_found(file: Path, store: DiskStore) -> None:
    good = file.read_bytes()
    random = Random(7)
    places = [random.randrange(8 * len(good)) for _ in range(700)]
    places += [random.randrange(8 * 1300) for _ in range(300)]  # fields, tokens, layout
    for at in places:
        flipped = bytearray(good)
        flipped[at // 8] ^= 1 << at % 8
        file.write_bytes(flipped)
        room = make.Room(make.header(LINK))
        assert list(store.read_into([room.read])) == [False], at
        assert not file.exists() or count(store, "newer format")
    file.write_bytes(good)
    assert is_read(store, LINK)


@pytest.mark.parametrize(
    ("length", "kind"),
    [(0, "truncated"), (7, "truncated"), (100, "truncated"), (184, "truncated"),
     (700, "truncated"), (1210, "truncated"), (4080, "truncated"), (4095, "truncated"),
     (4096, "truncated"), (4097, "truncated"), (-1, "truncated")],
)  # fmt: skip
def test_a_truncated_file_is_found(
    root: Path, store: DiskStore, file: Path, length: int, kind: str
) -> None:
    file.write_bytes(file.read_bytes()[:length])
    assert_quarantined(root, store, kind)


def test_what_power_loss_leaves_is_found(root: Path, store: DiskStore, file: Path) -> None:
    good = file.read_bytes()
    file.write_bytes(good[:4096] + bytes(len(good) - 4096))
    assert_quarantined(root, store, "body checksum")
    shutil.rmtree(root / "bad")
    (root / "bad").mkdir(mode=0o700)
    file.write_bytes(bytes(len(good)))
    assert store.read(make.header(LINK)) is None
    assert count(store, "damaged: magic") == 1


def test_an_appended_byte_is_found(root: Path, store: DiskStore, file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")
    assert_quarantined(root, store, "too long")


def test_another_blocks_file_is_found(root: Path, store: DiskStore, file: Path) -> None:
    (other,) = make.chain(200, seed=5, scope=make.scope_of(tenant="other"))
    put_all(store, [other])
    shutil.copyfile(path_of(root, other.key(Part.FULL)), file)
    assert_quarantined(root, store, "identity")
    assert is_read(store, other)


def test_swapped_blocks_of_one_chain_are_found(root: Path, store: DiskStore) -> None:
    links = make.chain(512)
    put_all(store, links)
    first, second = (path_of(root, link.key(Part.FULL)) for link in links)
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    assert not any(is_read(store, link) for link in links)
    assert len(bad_files(root)) == 2


def test_a_newer_format_is_a_miss_and_stays(root: Path, store: DiskStore, file: Path) -> None:
    good = file.read_bytes()
    file.write_bytes(good[:8] + b"\x02" + good[9:])
    assert store.read(make.header(LINK)) is None
    assert count(store, "newer format") == 1
    assert count(store, "damaged") == 0
    assert file.exists()
    file.write_bytes(file.read_bytes() + b"more")
    used = store.stats()[0].n_bytes
    store.close()
    with opened(root) as again:
        assert file.exists()
        assert not again.find([KEY])
        assert again.stats()[0].n_bytes >= used - 5 * 4096
        assert again.check().newer == (file.relative_to(root).as_posix(),)


def plant_link(path: Path) -> None:
    target = path.parent.parent.parent.parent / "target"
    target.write_bytes(b"secret of somebody else")
    path.symlink_to(target)


def plant_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def plant_fifo(path: Path) -> None:
    os.mkfifo(path)


def plant_hard_link(path: Path) -> None:
    target = path.parent.parent.parent.parent / "target"
    target.write_bytes(b"x" * 5000)
    os.link(target, path)


def plant_socket(path: Path) -> None:
    import socket

    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as planted:
            planted.bind("s")
        Path("s").rename(path.name)
    finally:
        os.chdir(here)


PLANTS = [plant_link, plant_dangling_link, plant_fifo, plant_hard_link, plant_socket]


@pytest.mark.process
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_file_is_neither_followed_nor_waited_for(
    root: Path, store: DiskStore, file: Path, plant: Callable[[Path], None]
) -> None:
    file.unlink()
    plant(file)
    assert_quarantined(root, store, "not a plain file")
    target = root.parent / "target"
    assert not target.exists() or target.read_bytes()


@pytest.mark.process
@pytest.mark.parametrize("plant", PLANTS)
def test_a_file_planted_while_the_store_was_closed_is_quarantined(
    root: Path, plant: Callable[[Path], None]
) -> None:
    with opened(root) as store:
        put_all(store, [LINK])
    file = path_of(root, KEY)
    file.unlink()
    plant(file)
    with opened(root) as store:
        assert not store.find([KEY])
        assert count(store, "damaged: not a plain file") == 1
        assert len(bad_files(root)) == 1
        assert store.put(make.block(LINK))
        assert is_read(store, LINK)


def test_a_planted_file_is_replaced_by_a_put(root: Path, store: DiskStore, file: Path) -> None:
    file.unlink()
    plant_link(file)
    assert store.put(make.block(LINK))
    assert not file.is_symlink()
    assert is_read(store, LINK)
    assert (root.parent / "target").read_bytes() == b"secret of somebody else"


def test_a_linked_shard_is_refused(root: Path, store: DiskStore, file: Path) -> None:
    moved = root.parent / "moved"
    file.parent.rename(moved)
    file.parent.symlink_to(moved)
    assert store.read(make.header(LINK)) is None
    (moved / file.name).unlink()
    assert not store.put(make.block(LINK))
    assert list(moved.iterdir()) == []
    store.close()
    with opened(root) as again:
        assert not again.find([KEY])


def test_foreign_files_are_left_alone_and_counted(root: Path) -> None:
    with opened(root) as store:
        put_all(store, [LINK])
        before = store.stats()[0].n_bytes
    shard = path_of(root, KEY).parent
    (shard / "README").write_bytes(b"x" * 10_000)
    (shard / "folder").mkdir()
    (shard / ("f" * 64 + ".fullest")).write_bytes(b"")
    (root / "blocks" / "zz").mkdir()
    (root / "blocks" / "zz" / path_of(root, KEY).name).write_bytes(b"in the wrong shard")
    with opened(root) as store:
        assert store.stats()[0].n_bytes >= before + 10_000
        assert len(store.check(read_data=True).foreign) == 4
        assert store.check().is_clean
        assert is_read(store, LINK)
        store.gc(dry_run=False)
    assert (shard / "README").exists()


def test_only_the_newest_damaged_files_are_kept(root: Path, store: DiskStore) -> None:
    links = make.chain(256 * (MAX_QUARANTINED + 5))
    put_all(store, links)
    for link in links:
        path_of(root, link.key(Part.FULL)).write_bytes(b"junk")
        assert not is_read(store, link)
    names = [path.name.split("-")[1] for path in bad_files(root)]
    assert names == [path_of(root, link.key(Part.FULL)).name for link in links[-MAX_QUARANTINED:]]


def test_check_names_all_damage_and_changes_nothing(root: Path, store: DiskStore) -> None:
    links = make.chain(256 * 4)
    put_all(store, links)
    store.save(make.manifest("a", 1024))
    paths = [path_of(root, link.key(Part.FULL)) for link in links]
    good = paths[0].read_bytes()
    paths[0].write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    paths[1].write_bytes(b"")
    (manifest,) = manifest_files(root)
    manifest.write_bytes(b"SEMAGENT" + bytes(60))
    before = sorted(root.rglob("*"))
    report = store.check(read_data=True)
    found = {root / problem.path: problem.damage for problem in report.damaged}
    assert found[paths[0]] == "body checksum"
    assert found[paths[1]] == "truncated"
    assert manifest in found
    assert (report.n_blocks, report.n_manifests, len(found)) == (2, 0, 3)
    assert len(store.check(read_data=False).damaged) == 2
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("junk", [b"", b"junk", b"SEMAGENT" + bytes(4000)])
def test_a_damaged_manifest_gives_way_to_the_one_before(root: Path, junk: bytes) -> None:
    with opened(root) as store:
        put_all(store, make.chain(600))
        store.save(make.manifest("a", 600))
        store.save(make.manifest("a", 10))
        manifest_files(root)[-1].write_bytes(junk)
        found = store.manifest(make.SCOPE, "a")
        assert found is not None
        assert (found.generation, len(found.token_ids)) == (1, 600)
        assert count(store, "damaged") == 1
        assert store.gc(dry_run=True).unneeded_blocks == 0, "its blocks are needed again"
        assert store.save(make.manifest("a", 20))
    with opened(root) as store:
        found = store.manifest(make.SCOPE, "a")
        assert found is not None
        assert len(found.token_ids) == 20


def test_an_agent_whose_manifests_are_all_damaged_is_unknown(root: Path) -> None:
    with opened(root) as store:
        store.save(make.manifest("a", 5))
    (path,) = manifest_files(root)
    path.write_bytes(b"junk")
    with opened(root) as store:
        assert saved_agents(store) == []
        assert store.manifest(make.SCOPE, "a") is None
        assert len(bad_files(root)) == 1
        assert store.save(make.manifest("a", 6))


def test_another_agents_manifest_under_this_name_is_refused(root: Path, store: DiskStore) -> None:
    store.save(make.manifest("mine", 5))
    (mine,) = manifest_files(root)
    store.save(make.manifest("theirs", 6))
    (theirs,) = (path for path in manifest_files(root) if path != mine)
    shutil.copyfile(theirs, mine)
    assert store.manifest(make.SCOPE, "mine") is None
    assert count(store, "damaged: identity") == 1
