"""Full disks, read-only folders, other owners, limits of a process: a store says what is wrong when
it is opened, and while it serves it misses, counts, and works again afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.domain.errors import StoreError
from tests.faults.folder import (
    LINKS,
    all_read,
    count,
    fast_folder,
    fill,
    full_path,
    has_agent,
    keep,
    listing,
    manifest_files,
    opened,
    require_message,
    works,
)
from tests.faults.processes import process
from tests.support import store_blocks as make

pytestmark = pytest.mark.process

NOBODY = 65534
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount or be another user")


@pytest.fixture
def root() -> Iterator[Path]:
    """A store with an agent."""
    with fast_folder() as folder:
        fill(folder / "store")
        yield folder / "store"


@contextmanager
def mounted(place: Path, megabytes: int) -> Iterator[Path]:
    """A file system of that size."""
    place.mkdir(mode=0o700)
    options = f"size={megabytes}m,mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def remount(place: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(place)], check=True)


@ROOT_ONLY
def test_a_full_disk(tmp_path: Path) -> None:
    """Row 7, a disk that is really full: others fill it, byte by byte. What was kept stays, what
    cannot be kept is counted, nothing unfinished is left, and with room all goes on.
    """
    with mounted(tmp_path / "disk", 4) as disk:
        root = disk / "store"
        with opened(root) as store:
            keep(store, LINKS)
            assert store.save(make.manifest("a", 600))
            ballast = disk / "ballast"
            for free in (200_000, 60_000, 20_000, 9_000, 4096, 0):
                ballast.unlink(missing_ok=True)
                fill_but(ballast, free)
                for seed in range(30, 60):
                    for block in make.blocks(make.chain(512, seed)):
                        if store.put(block):
                            assert store.read(block.header) == block.body
                    store.save(make.manifest(f"{seed}", 512, seed))
                assert all_read(store, LINKS)
                assert has_agent(store)
                assert [len(list(one.iterdir())) for one in (root / "tmp").iterdir()] == [1]
                store.gc(dry_run=True)
            assert count(store, "write_errors: ENOSPC") > 0
            assert count(store, "damaged") == 0
            ballast.unlink()
            assert works(store)
        with opened(root) as store:
            assert store.check(read_data=True).is_clean
            assert all_read(store, LINKS)
            assert has_agent(store)


@ROOT_ONLY
def test_opening_on_a_full_disk(tmp_path: Path) -> None:
    """Row 7: there is not a byte to open with. One message or a store; nothing is lost."""
    with mounted(tmp_path / "disk", 4) as disk:
        fill(disk / "store")
        fill_but(disk / "ballast", 0)
        try:
            with opened(disk / "store") as store:
                assert all_read(store, LINKS)
        except StoreError as error:
            require_message(error, str(disk / "store"))
        with pytest.raises(StoreError, match=r"cannot (?:use|read)"):
            DiskStore.open(disk / "another", 1 << 30)
        (disk / "ballast").unlink()
        with opened(disk / "store") as store:
            assert all_read(store, LINKS)
            assert has_agent(store)
        with opened(disk / "another") as store:
            assert works(store)


def fill_but(ballast: Path, free: int) -> None:
    """Fill the disk until about `free` bytes are left."""
    with ballast.open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        if free:
            file.truncate(max(0, file.tell() - free))


def test_files_may_not_be_long(root: Path) -> None:
    """Row 7, RLIMIT_FSIZE: blocks fit and the index does not, or nothing does."""
    for limit in (2000, 5000, 9000, 60_000):
        with process("small_files", root, limit) as limited:
            kept, counts = json.loads(limited.result())
        if limit == 2000:
            assert kept[:2] == [False, False]
            assert counts["write_errors"] > 0
        with opened(root) as store:
            assert store.check(read_data=True).is_clean
            assert all_read(store, LINKS)


@pytest.mark.parametrize("limit", [64, 12, 4, 1, 0])
def test_hardly_a_file_can_be_opened(root: Path, limit: int) -> None:
    """Row 10, RLIMIT_NOFILE: hundreds of blocks read at once by the threads of the pool."""
    with opened(root) as store:
        keep(store, make.chain(256 * 300, seed=60))
    with process("few_descriptors", root, limit) as limited:
        n_read, counts = json.loads(limited.result())
    if limit == 64:
        assert n_read == 300
    if limit <= 1:
        assert counts["read_errors: EMFILE"] > 0
    assert counts["damaged"] == 0
    with opened(root) as store:
        assert all_read(store, LINKS)
        assert all_read(store, make.chain(256 * 300, seed=60)[:10])


@ROOT_ONLY
def test_a_read_only_file_system(tmp_path: Path) -> None:
    """Row 9, mounted read-only: one message and nothing changed; writable again, it works."""
    with mounted(tmp_path / "disk", 8) as disk:
        root = disk / "store"
        fill(root)
        remount(disk, "ro")
        before = listing(root)
        with pytest.raises(StoreError, match="Read-only") as refused:
            DiskStore.open(root, 1 << 26)
        assert str(root) in str(refused.value)
        view = DiskStore.inspect(root)
        assert view is not None
        assert view.n_agents == 1
        assert listing(root) == before
        remount(disk, "rw")
        with opened(root) as store:
            assert works(store)
            assert all_read(store, LINKS)


def as_nobody(root: Path) -> list[Any] | str:
    """What a user without rights finds when they open and use the store."""
    with process("open_and_use", root, user=NOBODY) as other:
        said: list[Any] | str = json.loads(other.result())
        return said


def give(root: Path, user: int) -> None:
    os.chown(root.parent, user, user)
    for path, *_ in listing(root):
        os.chown(path, user, user, follow_symlinks=False)


@pytest.fixture
def theirs(root: Path) -> Path:
    """The store, belonging to a user without rights."""
    give(root, NOBODY)
    assert isinstance(as_nobody(root), list)
    return root


@ROOT_ONLY
def test_the_folder_belongs_to_somebody_else(theirs: Path) -> None:
    """Row 9, wrong owner: refused with one message, nothing changed; for root as for others."""
    before = listing(theirs)
    with pytest.raises(StoreError, match=f"belongs to user {NOBODY}; expected a folder of user 0"):
        DiskStore.open(theirs, 1 << 26)
    assert listing(theirs) == before
    give(theirs, 0)
    theirs.parent.chmod(0o755)
    before = listing(theirs)
    message = as_nobody(theirs)
    assert isinstance(message, str)
    assert "belongs to user 0" in message
    assert listing(theirs) == before


@ROOT_ONLY
@pytest.mark.parametrize("name", ["", "blocks", "agents", "bad", "tmp"])
def test_a_folder_that_may_not_be_written(theirs: Path, name: str) -> None:
    """Row 9, read-only: opening says so, or the store serves what it can and raises nothing."""
    folder = theirs / name
    folder.chmod(0o500)
    said = as_nobody(theirs)
    if isinstance(said, str):
        assert str(theirs) in said
        assert "ermission denied" in said or "readonly" in said
    else:
        assert said[0] == [True] * 3
    folder.chmod(0o700)
    said = as_nobody(theirs)
    assert isinstance(said, list)
    assert said[:5] == [[True] * 3, [True] * 3, [True] * 3, True, True]


@ROOT_ONLY
@pytest.mark.parametrize("which", ["block", "manifest", "index.sqlite", "shard"])
def test_a_file_that_may_not_be_read(theirs: Path, which: str) -> None:
    """Row 9, files of mode 0000: a miss, and the next put makes it anew; so does an opening for
    what is disposable. A block on a bad sector behaves alike.
    """
    path = {
        "block": full_path(theirs, LINKS[0]),
        "manifest": manifest_files(theirs)[-1],
        "shard": full_path(theirs, LINKS[0]).parent,
    }.get(which, theirs / which)
    path.chmod(0)
    said = as_nobody(theirs)
    if which == "shard" and isinstance(said, str):
        assert str(path) in said
        return
    assert isinstance(said, list), said
    read, _, again, _, goes_on, _ = said
    assert goes_on
    assert read == [which not in {"block", "shard"}, True, True]
    if which == "block":
        assert again == [True] * 3, "it was put again, and can be read"


@ROOT_ONLY
@pytest.mark.parametrize("name", ["FORMAT", "secret", "lock"])
def test_a_needed_file_that_may_not_be_read(theirs: Path, name: str) -> None:
    """Row 9: without FORMAT, secret or lock there is no store; one message, nothing changed."""
    (theirs / name).chmod(0)
    before = listing(theirs)
    said = as_nobody(theirs)
    assert isinstance(said, str)
    assert "ermission denied" in said
    assert listing(theirs) == before


# What is refused


def newer(root: Path) -> None:
    (root / "FORMAT").write_text('{"format": 2}\n')


def world_writable(root: Path) -> None:
    root.chmod(0o777)


def group_writable_part(root: Path) -> None:
    (root / "blocks").chmod(0o770)


def secret_cut(root: Path) -> None:
    (root / "secret").write_bytes(b"x" * 31)


def secret_gone(root: Path) -> None:
    (root / "secret").unlink()


def format_gone(root: Path) -> None:
    (root / "FORMAT").unlink()


def format_damaged(root: Path) -> None:
    (root / "FORMAT").write_bytes(b"\0" * 12)


def blocks_is_a_file(root: Path) -> None:
    shutil.rmtree(root / "blocks")
    (root / "blocks").write_bytes(b"x")


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (newer, "has format 2, written by a later version; expected at most 1"),
        (world_writable, r"others can write to .* \(mode 0777\)"),
        (group_writable_part, r"others can write to .*blocks \(mode 0770\)"),
        (secret_cut, "secret of the store .* is missing or damaged; expected 32"),
        (secret_gone, "secret of the store .* is missing or damaged; expected 32"),
        (format_gone, "is not a store: it has no FORMAT"),
        (format_damaged, "FORMAT of the store .* is damaged"),
        (blocks_is_a_file, "blocks is not a folder"),
    ],
)
def test_bad_input_is_one_message_and_changes_nothing(
    root: Path, harm: object, expected: str
) -> None:
    """Bad input, a newer format, an open folder: one clear message; every name, size, mode and
    time below the folder is as before.
    """
    assert callable(harm)
    harm(root)
    before = listing(root)
    for _ in range(2):
        with pytest.raises(StoreError, match=expected) as refused:
            DiskStore.open(root, 1 << 26)
        assert len(str(refused.value).splitlines()) == 1
    assert listing(root) == before
