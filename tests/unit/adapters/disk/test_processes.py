"""Several stores on one folder: two in this process, and real processes."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.adapters.stores.disk.index import _Connection
from semantic.domain.block_hash import Part
from tests.support import store_blocks as make
from tests.support.own_process import environment
from tests.unit.adapters.disk.support import (
    PLENTY,
    bad_files,
    count,
    disk_usage,
    is_read,
    manifest_files,
    opened,
    path_of,
    put_all,
)

ROOT = Path(__file__).resolve().parents[4]
SMALL = 1_960_000

WORKER = """
import sys
from pathlib import Path
from semantic.adapters.stores.disk import DiskStore, folder, index
from tests.support import store_blocks as make

# A machine that computes something else may take longer than a user would wait.
folder._LOCK_SECONDS = index._WAIT_SECONDS = 100
root, max_bytes, number = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
store = DiskStore.open(root, max_bytes, durable=False)
for turn in range(12):
    links = make.chain(256 * 4 + turn, seed=(number + turn) % 5)
    for link in links:
        if store.put(make.block(link)):
            body = store.read(make.header(link))
            assert body in (None, make.block(link).body)
    store.save(make.manifest("shared", number * 100 + turn))
    saved = store.save(make.manifest(f"own {number}", 256 * 4 + turn, (number + turn) % 5))
    assert saved, store.stats()
    found = store.manifest(make.SCOPE, f"own {number}")
    assert found is not None and len(found.token_ids) == 256 * 4 + turn
    if turn == 6:
        store.rebuild_index()
    if turn == 9:
        store.gc(dry_run=False)
counts = store.stats()[0].counts
assert counts["damaged"] == 0, counts
assert counts["write_errors"] == 0, counts
store.close()
print(store.secret.hex())
"""


@pytest.fixture
def pair(root: Path) -> tuple[DiskStore, DiskStore]:
    return DiskStore.open(root, PLENTY), DiskStore.open(root, PLENTY)


def close(pair: tuple[DiskStore, DiskStore]) -> None:
    for store in pair:
        store.close()


def test_what_one_writes_the_other_has(pair: tuple[DiskStore, DiskStore]) -> None:
    one, other = pair
    links = make.chain(600)
    assert one.secret == other.secret
    put_all(one, links)
    assert all(is_read(other, link) for link in links)
    put_all(other, links)
    assert count(other, "written") == 0
    assert one.save(make.manifest("a", 600))
    assert other.save(make.manifest("a", 601))
    found = one.manifest(make.SCOPE, "a")
    assert found is not None
    assert (found.generation, len(found.token_ids)) == (2, 601)
    assert other.remove(make.SCOPE, "a")
    assert one.manifest(make.SCOPE, "a") is None
    close(pair)


def test_one_goes_on_after_the_other_rebuilt_the_index(pair: tuple[DiskStore, DiskStore]) -> None:
    one, other = pair
    links = make.chain(600)
    put_all(one, links[:2])
    other.rebuild_index()
    put_all(one, links[2:])
    assert other.find(make.keys(links)) == one.find(make.keys(links))
    one.rebuild_index()
    other.rebuild_index()
    assert len(one.find(make.keys(links))) == len(links)
    close(pair)


def test_what_the_other_evicted_is_a_miss(root: Path, pair: tuple[DiskStore, DiskStore]) -> None:
    one, other = pair
    (link,) = make.chain(256)
    put_all(one, [link])
    other.gc(dry_run=False)
    assert not path_of(root, link.key(Part.FULL)).exists()
    assert not is_read(one, link)
    assert one.put(make.block(link))
    assert is_read(other, link)
    close(pair)


def test_an_index_that_is_replaced_while_it_is_opened_is_opened_again(
    pair: tuple[DiskStore, DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader of one opens the old files, and the other has new ones when it looks again."""
    one, other = pair
    reader = one._store.index._reader
    reader.close()
    openings: list[sqlite3.Connection] = []

    def open_late() -> sqlite3.Connection:
        db = _Connection._open(reader)
        if not openings:
            other.rebuild_index()
        openings.append(db)
        return db

    monkeypatch.setattr(reader, "_open", open_late)
    assert one.manifest(make.SCOPE, "a") is None
    assert other.save(make.manifest("a", 1))
    assert one.manifest(make.SCOPE, "a") is not None
    assert len(openings) == 2
    close(pair)


def test_a_generation_that_is_taken_is_not_overwritten(
    root: Path, pair: tuple[DiskStore, DiskStore]
) -> None:
    one, other = pair
    one.save(make.manifest("a", 1))
    (path,) = manifest_files(root)
    stray = path.with_suffix(f".{2:020}")
    stray.write_bytes(b"of a process that died before it could be remembered")
    assert other.save(make.manifest("a", 2))
    assert stray.read_bytes().startswith(b"of a process")
    found = one.manifest(make.SCOPE, "a")
    assert found is not None
    assert (found.generation, len(found.token_ids)) == (3, 2)
    close(pair)


def test_a_generation_that_was_taken_meanwhile_is_not_overwritten(
    root: Path, pair: tuple[DiskStore, DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other saves the same agent just when this one has written its file aside."""
    one, other = pair
    create = one._store.folder.create
    raced: list[bool] = []

    def create_late(path: Path, data: bytes, *, rest: bytes = b"", sync: bool = False) -> None:
        create(path, data, rest=rest, sync=sync)
        if not raced:
            raced.append(other.save(make.manifest("a", 2)))

    monkeypatch.setattr(one._store.folder, "create", create_late)
    assert one.save(make.manifest("a", 1))
    assert raced == [True]
    found = other.manifest(make.SCOPE, "a")
    assert found is not None
    assert (found.generation, len(found.token_ids)) == (2, 1)
    assert len(manifest_files(root)) == 2
    close(pair)


@pytest.mark.process
def test_processes_share_a_folder(root: Path) -> None:
    """Four processes begin at once on no folder at all, with one budget, and write the same."""
    command = [sys.executable, "-c", WORKER, str(root), str(SMALL)]
    workers = [
        subprocess.Popen(
            [*command, str(number)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    results = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4, [err for _, err in results]
    assert len({out for out, _ in results}) == 1, "one secret"
    assert disk_usage(root) <= SMALL
    assert bad_files(root) == []
    with opened(root, SMALL) as store:
        assert store.check(read_data=True).is_clean
        shared = store.manifest(make.SCOPE, "shared")
        assert shared is not None
        assert shared.generation == 4 * 12
        assert shared.token_ids == make.text(len(shared.token_ids))
        assert len(list((root / "tmp").iterdir())) == 1
