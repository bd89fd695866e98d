"""Every system call fails in turn, once or from then on: nothing is raised, wrong or lost.

After each run the store is opened again without faults. Each agent is then as it was before or
after the call that failed, every block that is read is right, and no sound file was quarantined.
"""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.adapters.stores.disk.files import Counts
from semantic.domain.block_hash import BlockLink, Part
from semantic.domain.errors import StoreError
from tests.support import store_blocks as make
from tests.support.faulty_files import ALL_CALLS, FaultyFiles, until_untouched
from tests.support.lanes import examples
from tests.support.open_files import open_files
from tests.support.store_blocks import saved_agents
from tests.unit.adapters.disk.support import (
    FAST_FOLDER,
    NEVER,
    PLENTY,
    bad_files,
    block_files,
    count,
    disk_usage,
    is_read,
    manifest_files,
    opened,
    put_all,
)

OLD = make.chain(300, seed=1)
NEW = make.chain(600, seed=1)
OTHER = make.chain(40, seed=2)
NUMBERS = (errno.EIO, errno.ENOSPC, errno.EMFILE)
WRITING = ALL_CALLS - {"preadv", "fstat", "lstat", "names", "try_lock", "rmdir"}


def prepare(root: Path) -> None:
    with opened(root) as store:
        put_all(store, OLD)
        store.save(make.manifest("a", 300, seed=1))
        put_all(store, OTHER)
        store.save(make.manifest("b", 40, seed=2))


def use(store: DiskStore) -> None:
    """One of everything; whatever is read must be right."""
    for link in NEW:
        if store.put(make.block(link)):
            store.find([link.key(Part.FULL)])
    store.save(make.manifest("a", 600, seed=1))
    for link in [*OLD, *NEW]:
        is_read_or_missed(store, link)
    store.children(NEW[0].hash, Part.FULL)
    store.touch(make.keys(NEW))
    saved_agents(store)
    store.manifest(make.SCOPE, "b")
    store.remove(make.SCOPE, "b")
    store.flush()
    store.stats()


def is_read_or_missed(store: DiskStore, link: BlockLink) -> None:
    room = make.Room(make.header(link))
    (ok,) = store.read_into([room.read])
    assert not ok or room.body == make.block(link).body
    body = store.read(make.header(link))
    assert body in (None, make.block(link).body)


def judge(root: Path) -> None:
    """Open without faults: all is sound, and old or new."""
    with opened(root) as store:
        report = store.check(read_data=True)
        assert report.damaged == ()
        assert report.foreign == ()
        assert bad_files(root) == []
        held = {one.agent_id: one.token_ids for one in saved_agents(store)}
        assert held.get("a") in (make.text(300, 1), make.text(600, 1))
        assert held.get("b") in (None, make.text(40, 2))
        assert is_read(store, OLD[0])
        assert len(list((root / "tmp").iterdir())) == 1
        assert store.stats()[0].n_blocks == len(block_files(root))
        assert store.stats()[0].n_bytes >= disk_usage(root)
        put_all(store, NEW)
        assert store.save(make.manifest("a", 600, seed=1))
        assert all(is_read(store, link) for link in NEW)


@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
def test_using_a_store_survives_any_fault(number: int, forever: bool) -> None:
    def scenario(files: FaultyFiles) -> None:
        with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as folder:
            root = Path(folder) / "store"
            prepare(root)
            with suppress(StoreError):
                store = DiskStore.open(root, PLENTY, files=files)
                use(store)
                store.close()
            assert open_files(Path(folder)) == []
            judge(root)

    calls = WRITING if number == errno.ENOSPC else ALL_CALLS
    every = examples(37, thorough=1)
    # Each error begins elsewhere, so that together they meet more of the calls.
    first = 1 + 2 * NUMBERS.index(number) % every
    found = until_untouched(
        number, scenario, forever=forever, calls=calls, first=first, every=every
    )
    assert found > max(15, 2 * every), "several of the calls were met"


@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
def test_making_a_store_survives_any_fault(forever: bool) -> None:
    def scenario(files: FaultyFiles) -> None:
        with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as folder:
            root = Path(folder) / "store"
            with suppress(StoreError):
                DiskStore.open(root, PLENTY, files=files).close()
            assert open_files(Path(folder)) == []
            with opened(root) as store:
                assert any(store.secret)
                put_all(store, OLD)

    every = examples(3, thorough=1)
    assert until_untouched(errno.EIO, scenario, forever=forever, every=every) > 20


@pytest.mark.parametrize(
    ("number", "call"),
    [
        (errno.ENOSPC, "write"),
        (errno.EDQUOT, "write"),
        (errno.EIO, "write"),
        (errno.EIO, "close"),
        (errno.EACCES, "rename"),
        (errno.ENOSPC, "rename"),
    ],
)
def test_a_failed_write_is_counted_and_leaves_nothing(root: Path, number: int, call: str) -> None:
    files = FaultyFiles(number, 1, forever=True, calls=frozenset({call}))
    files.repair()
    store = DiskStore.open(root, PLENTY, files=files)
    before = store.stats()[0].n_bytes
    files.break_again()
    assert not store.put(make.block(OLD[0]))
    assert not store.save(make.manifest("a", 3))
    files.repair()
    name = errno.errorcode[number]
    assert count(store, f"write_errors: {name}") >= 1
    assert count(store, "write_errors") >= 1
    assert count(store, "written") == 0
    assert block_files(root) == []
    (session,) = (root / "tmp").iterdir()
    assert [path.name for path in session.iterdir()] == ["lock"]
    assert store.stats()[0].n_bytes <= before + 2 * 4096, "but for the shards"
    put_all(store, OLD)
    assert store.save(make.manifest("a", 3))
    store.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_failed_read_is_a_miss_that_costs_nothing(root: Path, number: int) -> None:
    files = FaultyFiles(number, 1, forever=True, calls=frozenset({"open", "preadv"}))
    files.repair()
    store = DiskStore.open(root, PLENTY, files=files)
    put_all(store, OLD)
    files.break_again()
    for link in OLD:
        assert store.read(make.header(link)) is None
    assert count(store, f"read_errors: {errno.errorcode[number]}") == len(OLD)
    assert count(store, "misses") == len(OLD)
    files.repair()
    assert all(is_read(store, link) for link in OLD)
    store.close()
    assert bad_files(root) == []


def test_a_block_that_cannot_be_read_again_is_put_anew(root: Path) -> None:
    """As on a bad sector: otherwise it would be a miss for ever, and taken for stored."""
    files = FaultyFiles(errno.EIO, 1, forever=True, calls=frozenset({"preadv"}))
    files.repair()
    store = DiskStore.open(root, PLENTY, files=files)
    put_all(store, OLD)
    files.break_again()
    assert store.read(make.header(OLD[0])) is None
    files.repair()
    assert (count(store, "read_errors: EIO"), count(store, "damaged: unreadable")) == (1, 1)
    assert len(bad_files(root)) == 1
    put_all(store, OLD)
    assert all(is_read(store, link) for link in OLD)
    store.close()


@pytest.mark.parametrize("most_bytes", [1, 7, 1000, 4095])
def test_short_reads_and_writes_are_continued(root: Path, most_bytes: int) -> None:
    files = FaultyFiles(errno.EIO, NEVER, most_bytes=most_bytes)
    store = DiskStore.open(root, PLENTY, files=files)
    links = OLD if most_bytes > 1 else OLD[1:]
    put_all(store, links)
    assert store.save(make.manifest("a", 300, seed=1))
    assert all(is_read(store, link) for link in links)
    store.close()


def test_a_block_whose_sync_failed_is_not_believed(root: Path) -> None:
    files = FaultyFiles(errno.EIO, 1, calls=frozenset({"sync_data"}))
    store = DiskStore.open(root, PLENTY, files=files)
    put_all(store, OLD)
    assert store.save(make.manifest("a", 300, seed=1))
    counts = store.stats()[0].counts
    assert (counts["dropped"], counts["write_errors: EIO"]) == (1, 1)
    assert [is_read(store, link) for link in OLD] == [False, True]
    assert len(block_files(root)) == 1
    store.close()


def test_what_is_saved_is_on_the_drive_in_order(root: Path) -> None:
    """Blocks, their folders, the manifest; its name last."""
    done: list[str] = []

    class Recording(FaultyFiles):
        def sync_data(self, fd: int) -> None:
            done.append("block")
            super().sync_data(fd)

        def sync_all(self, fd: int) -> None:
            done.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "manifest")  # noqa: PTH112
            super().sync_all(fd)

        def rename(self, source: Path | str, target: Path | str, *, to: int,
                   of: int | None = None) -> None:  # fmt: skip
            done.append("name")
            super().rename(source, target, to=to, of=of)

    store = DiskStore.open(root, PLENTY, files=Recording(errno.EIO, NEVER))
    done.clear()
    put_all(store, OLD)
    assert done == ["name"] * 2
    done.clear()
    assert store.save(make.manifest("a", 300, seed=1))
    assert done == [*["block"] * 2, *["folder"] * 4, "manifest", "name", *["folder"] * 2]
    done.clear()
    store.flush()
    assert done == []
    store.close()


def test_without_durability_nothing_is_synced(root: Path) -> None:
    files = FaultyFiles(errno.EIO, 1, forever=True, calls=frozenset({"sync_data", "sync_all"}))
    files.repair()
    store = DiskStore.open(root, PLENTY, files=files, durable=False)
    files.break_again()
    put_all(store, OLD)
    assert store.save(make.manifest("a", 300, seed=1))
    store.flush()
    store.close()
    assert not files.was_met


def test_a_folder_that_vanishes_is_a_miss(root: Path) -> None:
    store = DiskStore.open(root, PLENTY)
    put_all(store, OLD)
    root.rename(root.parent / "away")
    use(store)
    assert count(store, "write_errors") > 0
    (root.parent / "away").rename(root)
    put_all(store, NEW)
    assert all(is_read(store, link) for link in NEW)
    store.close()


def test_what_a_full_index_cannot_remember_does_not_lie_there_uncounted(root: Path) -> None:
    with opened(root) as store:
        put_all(store, OLD)
        with store._store.index.writing() as db:
            db.execute("PRAGMA max_page_count = 1")  # as many as there are
        links = make.chain(256 * 60, seed=3)
        kept = [store.put(make.block(link)) for link in links]
        saved = [store.save(make.manifest(f"agent {n}", 20_000, seed=n)) for n in range(60)]
        assert not all(kept)
        assert not all(saved)
        assert count(store, "write_errors: ENOSPC") == kept.count(False) + saved.count(False)
        assert len(block_files(root)) == len(OLD) + sum(kept) == store.stats()[0].n_blocks
        assert len(manifest_files(root)) == sum(saved) == len(saved_agents(store))
        assert store.stats()[0].n_bytes >= disk_usage(root)
        with store._store.index.writing() as db:
            db.execute("PRAGMA max_page_count = 1000000")
        put_all(store, links)
        assert store.save(make.manifest("agent", 20_000))


def test_the_log_counts_what_a_disk_refuses(caplog: pytest.LogCaptureFixture) -> None:
    counts = Counts()
    for _ in range(120):
        counts.add_error("write_errors", OSError(errno.ENOSPC, "No space left on device"))
    assert [message.split("):")[0].rsplit(" ", 1)[-1] for message in caplog.messages] == [
        "1",
        "10",
        "100",
    ]
    assert caplog.messages[0] == (
        "cannot write to the store (failure 1): No space left on device (ENOSPC); after a restart, "
        "agents prefill the missing blocks"
    )
