"""Several processes on one store, some of them killed, and clocks that jump."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.adapters.stores.disk.files import FileSystem
from semantic.domain.block_hash import Part
from tests.faults.folder import (
    LINKS,
    all_read,
    count,
    delete_index,
    disk_usage,
    fast_folder,
    fill,
    full_path,
    has_agent,
    keep,
    listing,
    opened,
    works,
)
from tests.faults.processes import ENVIRONMENT, ROOT, process
from tests.support import store_blocks as make
from tests.support.lanes import examples

BUDGET = 1_660_000
TIMES = examples(300, thorough=3000)
"""Each process of a crowd uses the store so often."""
KILLS = 3
"""At least so many of one more are killed meanwhile."""
USES = (1, 20, 60)
"""Each of those is killed when it has used the store so often."""


@pytest.fixture
def root() -> Iterator[Path]:
    """A store with an agent."""
    with fast_folder() as folder:
        fill(folder / "store")
        yield folder / "store"


@pytest.mark.process
@pytest.mark.parametrize("with_kills", [False, True], ids=["all live", "one is killed"])
def test_processes_on_one_store(with_kills: bool) -> None:
    """Row 13, several processes: putting, reading, evicting and collecting the same blocks. Nothing
    torn is read, the budget holds at every moment, and the sums are right in the end; also when
    one of them is killed again and again.
    """
    with fast_folder() as folder, ExitStack() as running:
        root = folder / "store"
        crowd = [
            running.enter_context(process("crowd", root, number, TIMES, BUDGET))
            for number in range(4)
        ]
        n_killed = 0
        while any(one.is_running for one in crowd) or n_killed < KILLS * with_kills:
            if with_kills:
                with process("crowd", root, 9, 100 * TIMES, BUDGET) as victim:
                    for _ in range(USES[n_killed % len(USES)]):
                        assert victim.line() == "."
                n_killed += 1
            time.sleep(0.05)
            assert (disk_usage(root) if root.exists() else 0) <= BUDGET
        ends = [json.loads(one.result().splitlines()[-1]) for one in crowd]
        assert sum(n_read for n_read, _ in ends) > 5
        assert max(most for _, most in ends) > BUDGET / 3
        with opened(root, BUDGET) as store:
            stats = store.stats()[0]
            assert disk_usage(root) <= stats.n_bytes <= BUDGET
            assert store.check(read_data=True).is_clean
            assert not store.check().foreign
            assert len(list((root / "tmp").iterdir())) == 1
            assert not list((root / "bad").iterdir())
            assert works(store)
        same_sums(root)


def same_sums(root: Path) -> None:
    """What the index counts is what is counted when it is made anew."""
    with opened(root, BUDGET) as store:
        old = store.stats()[0]
    delete_index(root)
    with opened(root, BUDGET) as store:
        new = store.stats()[0]
    assert (old.n_blocks, old.n_bytes, old.n_agents) == (new.n_blocks, new.n_bytes, new.n_agents)


class RefusedLocks:
    """How often a lock was not free that this process tried; what waits tries again."""

    def __init__(self) -> None:
        self.n = 0
        self.begun = threading.Event()


@pytest.fixture
def refused_locks(monkeypatch: pytest.MonkeyPatch) -> RefusedLocks:
    refused, tried = RefusedLocks(), FileSystem.try_lock

    def try_lock(files: FileSystem, fd: int) -> bool:
        if tried(files, fd):
            return True
        refused.n += 1
        refused.begun.set()
        return False

    monkeypatch.setattr(FileSystem, "try_lock", try_lock)
    return refused


@pytest.mark.process
def test_the_lock_ends_with_its_holder(root: Path, refused_locks: RefusedLocks) -> None:
    """Row 14, the lock holder is killed, inside a transaction that had deleted everything: who
    waits goes on at once, and nothing is gone.
    """
    kept: list[bool] = []
    with process("holder", root) as holder, opened(root) as store:
        assert holder.line() == "holds"
        waiting = threading.Thread(
            target=lambda: kept.append(store.put(make.block(make.chain(256, seed=41)[0])))
        )
        waiting.start()
        assert refused_locks.begun.wait(60)
        assert all_read(store, LINKS), "reading does not wait"
        assert not kept
        holder.kill()
        n_refused = refused_locks.n
        waiting.join(60)
        assert kept == [True]
        assert refused_locks.n <= n_refused + 1, "one may have been tried just before"
        assert all_read(store, LINKS)
        assert has_agent(store)
    with opened(root) as store:
        assert not (root / "tmp" / "left").exists()
        assert all_read(store, LINKS)
        assert store.stats()[0].n_blocks == len(LINKS) + 3


def test_process_numbers_in_locks_mean_nothing(root: Path, refused_locks: RefusedLocks) -> None:
    """Row 14, stale locks, a process number used again: files that look like a living process's
    lock, with our own number in them, stop no process and are cleaned away.
    """
    (root / "lock").write_text(f"{os.getpid()}\n")
    for number, name in ((1, "1"), (os.getpid(), str(os.getpid())), (os.getpid(), "f" * 16)):
        session = root / "tmp" / name
        session.mkdir(mode=0o700)
        (session / "lock").write_text(f"{number}\n")
        (session / "0").write_bytes(bytes(9000))
    (root / "lock.pid").write_text(f"{os.getpid()}\n")
    with opened(root) as store:
        assert refused_locks.n == 0
        assert len(list((root / "tmp").iterdir())) == 1
        assert has_agent(store)
        assert works(store)


@pytest.mark.parametrize("when", [0, 4_102_444_800], ids=["1970", "2100"])
def test_clocks_of_files_mean_nothing(when: int) -> None:
    """Row 15, clock skew, times in 1970 and 2100: nothing is evicted for it, and what goes first
    when room is needed is what was used first.
    """
    with fast_folder() as folder:
        root = folder / "store"
        with opened(root, BUDGET) as store:
            for seed in range(1, 5):
                keep(store, make.chain(512, seed))
                assert store.save(make.manifest(f"{seed}", 512, seed))
            store.touch(make.keys(make.chain(512, seed=1)))
        for path, *_ in listing(root):
            recent = "1" if when else "2"
            jumped = when if recent in path[-9:] else 2_000_000_000 - when
            os.utime(path, (jumped, jumped), follow_symlinks=False)
        with opened(root, BUDGET) as store:
            assert store.stats()[0].n_blocks == 8
            assert count(store, "evicted") == 0
            seed = 100
            while all(store.find(make.keys(make.chain(512, seed=2)))):
                seed += 1
                if not store.put(make.block(make.chain(256, seed)[0])):
                    break
                left = {s: len(store.find(make.keys(make.chain(512, seed=s)))) for s in range(1, 5)}
                if left[2] < 2:
                    assert left == {1: 2, 2: left[2], 3: 2, 4: 2}
                    break
                assert seed < 400
            else:
                pytest.fail("nothing was evicted")


@pytest.mark.process
def test_the_clock_jumps_between_runs(root: Path) -> None:
    """Row 15: one process in 1970, one in 2100; libfaketime lies to both about the time."""
    faketime = shutil.which("faketime")
    if faketime is None:
        pytest.skip("faketime is not installed")
    for year in ("1971-01-01", "2099-12-31", "1999-01-01"):
        done = subprocess.run(
            [faketime, year, sys.executable, "-m", "tests.faults.processes", "-",
             "open_and_use", root],
            cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("[[true, true, true]"), done.stdout


@pytest.mark.process
def test_the_same_agent_from_many_threads_and_stores(root: Path) -> None:
    """Row 19, the same agent at once: every save gets a generation of its own, and the newest is
    one that was saved, whole.
    """
    generations: list[int] = []
    stores = [DiskStore.open(root, 64 << 20, durable=False) for _ in range(2)]

    def save(number: int) -> None:
        store = stores[number % 2]
        for turn in range(6):
            n_tokens = 1000 * number + turn + 1
            assert store.save(make.manifest("same", n_tokens, seed=5))
            found = store.manifest(make.SCOPE, "same")
            assert found is not None
            assert found.token_ids == make.text(len(found.token_ids), 5)
            generations.append(found.generation)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = stores[0].manifest(make.SCOPE, "same")
    assert last is not None
    assert last.generation == 24 == max(generations)
    for store in stores:
        store.close()


def test_tenants_and_models_share_nothing(root: Path) -> None:
    """Rows 16 and 18, other weights under the same name, another tenant with the same prompt: not
    one block and no agent of the one is the other's; the same tenant has all of its own.
    """
    with opened(root) as store:
        for scope in (make.scope_of(tenant="other"), make.scope_of(model="model, other weights")):
            links = make.chain(600, scope=scope)
            assert not store.find(make.keys(links))
            assert not any(store.read(make.header(link)) for link in links)
            assert not store.children(scope.root, Part.FULL)
            assert store.manifest(scope, "a") is None
            assert not store.remove(scope, "a")
            keep(store, links)
            assert store.save(make.manifest("a", 600, scope=scope))
        assert all_read(store, LINKS)
        assert store.stats()[0].n_agents == 3
        assert count(store, "mismatches") == 0


def test_what_comes_back_is_what_was_put(root: Path) -> None:
    """Row 32, exactness, as far as a store goes: from another store's view, after a restart, after
    the index was lost, and after eviction and a second put, every byte is the same.
    """
    parts = [Part.FULL, Part.WINDOW, Part.CHECKPOINT]
    links = make.chain(256 * 3 + 100, seed=9)

    def same(store: DiskStore) -> None:
        for part in parts:
            for link in links:
                assert store.read(make.header(link, part)) == make.block(link, part).body

    with opened(root) as store:
        for part in parts:
            keep(store, links, part)
        same(store)
        with opened(root) as other:
            same(other)
    with opened(root) as store:
        same(store)
    delete_index(root)
    with opened(root) as store:
        same(store)
        store.gc(dry_run=False)
        assert not store.find(make.keys(links))
        assert not full_path(root, links[0]).exists()
        for part in parts:
            keep(store, links, part)
        same(store)
