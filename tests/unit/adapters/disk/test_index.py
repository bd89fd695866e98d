"""The index can be lost, damaged or old: the files bring it back, with the same answers."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.adapters.stores.disk.schema import VERSION, number
from semantic.domain.block_hash import BlockHash, Part
from tests.support import store_blocks as make
from tests.support.lanes import examples
from tests.support.store_blocks import saved_agents
from tests.unit.adapters.disk.support import count, is_read, opened, path_of, put_all

LINKS = [*make.chain(256 * 5 + 9, seed=1), *make.chain(700, seed=2)]


def fill(store: DiskStore) -> None:
    put_all(store, LINKS)
    put_all(store, LINKS[:2], Part.WINDOW)
    put_all(store, LINKS[4:5], Part.CHECKPOINT)
    store.save(make.manifest("a", 256 * 5 + 9, seed=1, pinned=True))
    store.save(make.manifest("b", 700, seed=2))
    store.save(make.manifest("b", 701, seed=2))


def answers(store: DiskStore) -> tuple[object, ...]:
    keys = [link.key(part) for link in LINKS for part in Part]
    parents: list[BlockHash] = [make.SCOPE.root, *(link.hash for link in LINKS)]
    found = dict(store.find(keys))
    children = {
        parent: sorted(header.key.hash for header in store.children(parent, Part.FULL))
        for parent in parents
    }
    stats = store.stats()[0]
    return found, children, saved_agents(store), stats.n_blocks, stats.n_agents, stats.pinned_bytes


def index_files(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.name.startswith("index.sqlite")]


def delete(root: Path) -> None:
    for path in index_files(root):
        path.unlink()


def empty(root: Path) -> None:
    for path in index_files(root):
        path.write_bytes(b"")


def overwrite(root: Path) -> None:
    for path in index_files(root):
        path.write_bytes(Random(3).randbytes(20_000))


def another_schema(root: Path) -> None:
    delete(root)
    with sqlite3.connect(root / "index.sqlite") as db:
        db.executescript("CREATE TABLE blocks(hash); PRAGMA user_version = 1;")
    db.close()


def newer_schema(root: Path) -> None:
    with sqlite3.connect(root / "index.sqlite") as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()


def link_elsewhere(root: Path) -> None:
    delete(root)
    (root.parent / "precious").write_bytes(b"precious")
    (root / "index.sqlite").symlink_to(root.parent / "precious")


def fifo(root: Path) -> None:
    delete(root)
    os.mkfifo(root / "index.sqlite")


def lost_trigger(root: Path) -> None:
    with sqlite3.connect(root / "index.sqlite") as db:
        db.execute("DROP TRIGGER blocks_come")
    db.close()


HARM = [
    delete, empty, overwrite, another_schema, newer_schema, lost_trigger, link_elsewhere, fifo
]  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_a_harmed_index_is_rebuilt_at_opening(root: Path, harm: Callable[[Path], None]) -> None:
    with opened(root) as store:
        fill(store)
        expected = answers(store)
    harm(root)
    with opened(root) as store:
        assert answers(store) == expected
        assert store.check(read_data=True).is_clean
        before = store.stats()[0].n_bytes
        put_all(store, make.chain(256, seed=9))
        assert store.stats()[0].n_bytes > before + 8192, "the sum follows the rows again"
    precious = root.parent / "precious"
    assert not precious.exists() or precious.read_bytes() == b"precious"


@pytest.mark.parametrize("harm", [delete, link_elsewhere, fifo])
def test_an_index_that_vanishes_is_rebuilt_while_serving(
    root: Path, store: DiskStore, harm: Callable[[Path], None]
) -> None:
    fill(store)
    expected = answers(store)
    harm(root)
    assert answers(store) == expected
    assert count(store, "index mended") == 1
    harm(root)
    assert store.put(make.block(make.chain(256, seed=9)[0]))
    harm(root)
    assert store.save(make.manifest("c", 3))
    harm(root)
    store.touch(make.keys(LINKS))
    harm(root)
    assert store.remove(make.SCOPE, "c")
    assert store.check(read_data=True).is_clean


def test_rebuilding_gives_the_same_answers(store: DiskStore) -> None:
    fill(store)
    expected = answers(store)
    store.rebuild_index()
    assert answers(store) == expected
    assert all(is_read(store, link) for link in LINKS)


def test_an_older_copy_of_the_index_is_brought_up_to_date(root: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    with opened(root) as store:
        put_all(store, LINKS[:3])
        store.save(make.manifest("a", 600, seed=1))
        store.save(make.manifest("gone", 20, seed=1))
    for path in index_files(root):
        shutil.copy2(path, copies)
    with opened(root) as store:
        fill(store)
        store.remove(make.SCOPE, "gone")
        expected = answers(store)
    delete(root)
    for path in copies.iterdir():
        shutil.copy2(path, root)
    with opened(root) as store:
        assert answers(store) == expected


def test_flipped_bits_of_the_index_never_give_a_wrong_answer(root: Path) -> None:
    """A wrong row may cost a block or an agent for now; rebuilding gives all of them back."""
    with opened(root) as store:
        fill(store)
        expected = answers(store)
    good = (root / "index.sqlite").read_bytes()
    random = Random(11)
    for _ in range(examples(25, thorough=60)):
        flipped = bytearray(good)
        for _ in range(random.choice([1, 8, 64])):
            at = random.randrange(8 * len(good))
            flipped[at // 8] ^= 1 << at % 8
        delete(root)
        (root / "index.sqlite").write_bytes(flipped)
        with opened(root) as store:
            for link in LINKS:
                assert is_read(store, link)
            for parent in (make.SCOPE.root, LINKS[0].hash):
                for header in store.children(parent, Part.FULL):
                    assert header.link.scope.hash_of(parent, header.link.tokens) == header.key.hash
            assert {one.agent_id for one in saved_agents(store)} <= {"a", "b"}
            assert store.put(make.block(make.chain(256, seed=9)[0]))
            assert count(store, "damaged") == 0
            store.rebuild_index()
            again = make.chain(256, seed=9)[0]
            assert is_read(store, again)
            path_of(root, again.key(Part.FULL)).unlink()
            assert not is_read(store, again)
            assert answers(store) == expected
    assert list((root / "bad").iterdir()) == []


def test_a_block_whose_row_was_never_written_is_found_again(root: Path) -> None:
    """A process that dies between rename and commit leaves such a file."""
    with opened(root) as store:
        fill(store)
        expected = answers(store)
        with store._store.index.writing() as db:
            db.execute("DELETE FROM blocks WHERE start = 256")
            db.execute("DELETE FROM manifests")
            db.execute("DELETE FROM chain")
            db.execute("DELETE FROM agents")
    with opened(root) as store:
        assert answers(store) == expected


def test_use_is_kept_over_a_restart_and_a_rebuild(root: Path) -> None:
    """The agent that was saved first is evicted first, whatever the clocks of files say."""
    with opened(root) as store:
        for seed in (1, 2, 3):
            put_all(store, make.chain(256 * 4, seed=seed))
        for seed in (2, 3, 1):
            store.save(make.manifest(f"agent {seed}", 256 * 4, seed=seed))
        used = store.stats()[0].n_bytes
    for path in root.rglob("*.*"):
        os.utime(path, (0, 0) if "a" in path.name[:8] else (2**32, 2**32))
    delete(root)
    with opened(root, used - 4 * 8448 + 100) as store:
        store.gc(dry_run=False)
        left = {seed: len(store.find(make.keys(make.chain(1024, seed=seed)))) for seed in (1, 2, 3)}
        assert left == {1: 4, 2: 0, 3: 4}


def test_what_is_read_at_once_is_of_one_state(root: Path) -> None:
    with opened(root) as store:
        put_all(store, LINKS[:1])
        index = store._store.index
        with index.reading() as db:
            before = number(db, "bytes")
            with index.writing() as other:
                other.execute("DELETE FROM blocks")
            assert number(db, "bytes") == before
        with index.reading() as db:
            assert number(db, "bytes") < before
