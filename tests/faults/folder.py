"""What the fault tests do with a store's folder, from outside and through the store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from semantic.adapters.stores.disk import DiskStore
from semantic.domain.block_hash import BlockKey, BlockLink, Part
from semantic.domain.errors import StoreError
from tests.support import store_blocks as make

PLENTY = 64 << 20
FAST = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
"""Memory that looks like a disk: nothing here waits for a drive."""

LINKS = make.chain(600)
"""The blocks of the agent that `filled` saves: two full, one not."""


@contextmanager
def fast_folder() -> Iterator[Path]:
    """A folder of this test alone, gone afterwards."""
    with tempfile.TemporaryDirectory(dir=FAST, ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def opened(root: Path, max_bytes: int = PLENTY) -> Iterator[DiskStore]:
    """The store, closed afterwards."""
    store = DiskStore.open(root, max_bytes)
    try:
        yield store
    finally:
        store.close()


def fill(root: Path) -> None:
    """Make a store with the agent `a`, which has `LINKS`, and one block of no agent."""
    with opened(root) as store:
        keep(store, LINKS)
        assert store.save(make.manifest("a", 600))
        keep(store, make.chain(256, seed=1))


def keep(store: DiskStore, links: Sequence[BlockLink], part: Part = Part.FULL) -> None:
    for block in make.blocks(links, part):
        assert store.put(block)


def is_read(store: DiskStore, link: BlockLink, part: Part = Part.FULL) -> bool:
    """Whether the block is read, both ways; if so it must be right."""
    asked = make.header(link, part)
    body = store.read(asked)
    assert body is None or body == make.block(link, part).body, "wrong bytes"
    if part is Part.CHECKPOINT:
        return body is not None
    room = make.Room(asked)
    (filled,) = store.read_into([room.read])
    assert not filled or room.body == make.block(link, part).body, "wrong bytes"
    return filled and body is not None


def has_agent(store: DiskStore, name: str = "a", n_tokens: int = 600, seed: int = 0) -> bool:
    """Whether the agent is known; if so it must be as it was saved."""
    found = store.manifest(make.SCOPE, name)
    assert found is None or found.token_ids == make.text(n_tokens, seed), "wrong agent"
    return found is not None


def count(store: DiskStore, name: str) -> int:
    return store.stats()[0].counts.get(name, 0)


def works(store: DiskStore, seed: int = 900) -> bool:
    """Whether a new agent can be kept and found."""
    links = make.chain(300, seed)
    kept = all(store.put(block) for block in make.blocks(links))
    name = f"new {seed}"
    saved = store.save(make.manifest(name, 300, seed))
    return kept and saved and has_agent(store, name, 300, seed) and all_read(store, links)


def all_read(store: DiskStore, links: Sequence[BlockLink]) -> bool:
    read = [is_read(store, link) for link in links]
    return all(read)


def require_message(error: StoreError, *words: str) -> None:
    """It is one line and has one of `words`."""
    assert len(str(error).splitlines()) == 1
    assert any(word in str(error) for word in words), error


# Files


def path_of(root: Path, key: BlockKey) -> Path:
    name = key.hash.hex()
    return root / "blocks" / name[:2] / f"{name}.{key.part}"


def full_path(root: Path, link: BlockLink) -> Path:
    return path_of(root, link.key(Part.FULL))


def block_files(root: Path) -> list[Path]:
    return sorted((root / "blocks").rglob("*.*"))


def manifest_files(root: Path) -> list[Path]:
    return sorted((root / "agents").rglob("*.*"))


def index_files(root: Path) -> list[Path]:
    return sorted(root.glob("index.sqlite*"))


def delete_index(root: Path) -> None:
    for path in index_files(root):
        path.unlink()


def disk_usage(root: Path) -> int:
    """What the folder takes, as `du` adds it up; others may be changing it."""
    return sum(_blocks_of(path) for path in [str(root), *_walk(str(root))])


def listing(root: Path) -> list[tuple[str, int, int, int, int]]:
    """Every name below `root` with mode, size, time of change and number."""
    found = []
    for path in sorted([str(root), *_walk(str(root))]):
        one = os.lstat(path)
        found.append((path, one.st_mode, one.st_size, one.st_mtime_ns, one.st_ino))
    return found


def _walk(root: str) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        yield from (f"{folder}/{name}" for name in (*folders, *files))


def _blocks_of(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def open_descriptors() -> int:
    return sum(1 for _ in Path("/dev/fd").iterdir())


def flip(path: Path, bit: int) -> None:
    """Turn one bit of a file round, where it lies."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (old,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([old ^ 1 << bit % 8]))


def copy_of(root: Path) -> Callable[[], None]:
    """Remembers the bytes of all files; the function puts them back and deletes what came."""
    held = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    folders = {path for path in root.rglob("*") if path.is_dir()}

    def restore() -> None:
        for path in [one for one in root.rglob("*") if not one.is_dir() or one.is_symlink()]:
            if path not in held:
                path.unlink()
        for path in sorted((one for one in root.rglob("*") if one.is_dir()), reverse=True):
            if path not in folders:
                path.rmdir()
        for path, data in held.items():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_bytes(data)
            path.chmod(0o600)

    return restore
