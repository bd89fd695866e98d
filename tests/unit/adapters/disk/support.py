"""Small things that the tests of the disk store do with its folder."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from semantic.adapters.stores.disk import DiskStore
from semantic.domain.block_hash import BlockKey, BlockLink, Part
from tests.support import store_blocks as make
from tests.support.faulty_files import FaultyFiles

PLENTY = 64 << 20
NEVER = 1 << 60
FAST_FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Memory that looks like a disk, for tests that open hundreds of stores."""


@contextmanager
def opened(root: Path, max_bytes: int = PLENTY) -> Iterator[DiskStore]:
    """The store, closed afterwards; nothing waits for the drive."""
    store = DiskStore.open(root, max_bytes, files=FaultyFiles(errno.EIO, NEVER))
    try:
        yield store
    finally:
        store.close()


def path_of(root: Path, key: BlockKey) -> Path:
    """Where the block's file is."""
    name = key.hash.hex()
    return root / "blocks" / name[:2] / f"{name}.{key.part}"


def block_files(root: Path) -> list[Path]:
    return sorted((root / "blocks").rglob("*.*"))


def manifest_files(root: Path) -> list[Path]:
    """All generations of all agents; of one agent the oldest first."""
    return sorted((root / "agents").rglob("*.*"))


def bad_files(root: Path) -> list[Path]:
    return sorted((root / "bad").iterdir())


def disk_usage(root: Path) -> int:
    """What the folder takes on disk, as `du` adds it up."""
    return sum(path.lstat().st_blocks * 512 for path in [root, *root.rglob("*")])


def put_all(store: DiskStore, links: Sequence[BlockLink], part: Part = Part.FULL) -> None:
    for block in make.blocks(links, part):
        assert store.put(block)


def is_read(store: DiskStore, link: BlockLink, part: Part = Part.FULL) -> bool:
    """Whether the block is read; if so it must be right."""
    room = make.Room(make.header(link, part))
    (ok,) = store.read_into([room.read])
    body = store.read(make.header(link, part))
    assert ok == (body is not None)
    if ok:
        assert room.body == body == make.block(link, part).body
        assert room.rest_is_untouched
    return ok


def count(store: DiskStore, name: str) -> int:
    return store.stats()[0].counts.get(name, 0)
