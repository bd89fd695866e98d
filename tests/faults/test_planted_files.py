"""Things planted in a store's folder: links, pipes, devices, sockets, folders, odd names. They are
never followed, written through or waited for, and what lies outside stays as it is.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from semantic.domain.block_hash import Part
from semantic.domain.errors import StoreError
from tests.faults.folder import (
    LINKS,
    all_read,
    block_files,
    count,
    fast_folder,
    fill,
    full_path,
    has_agent,
    keep,
    manifest_files,
    opened,
    require_message,
    works,
)
from tests.support import store_blocks as make
from tests.support.open_files import open_files
from tests.support.store_blocks import saved_agents

SECONDS = 60
"""More than anything takes here that waits for nothing."""


@contextmanager
def not_blocking(root: Path) -> Iterator[None]:
    """Whatever waits inside is a failure; it is freed by opening the pipes' other ends."""
    freed: list[int] = []

    def free() -> None:
        pipes = [path for path in root.rglob("*") if stat.S_ISFIFO(os.lstat(path).st_mode)]
        freed.extend(os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in pipes)

    timer = threading.Timer(SECONDS, free)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for fd in freed:
            os.close(fd)
    assert not freed, "it waits for the other end of a pipe"


@pytest.fixture
def root() -> Iterator[Path]:
    """A store with an agent, and beside it what must stay as it is."""
    with fast_folder() as folder:
        fill(folder / "store")
        (folder / "file").write_bytes(b"of somebody else" * 300)
        (folder / "folder").mkdir()
        (folder / "folder" / "kept").write_bytes(b"of somebody else")
        yield folder / "store"


def outside(root: Path) -> tuple[bytes, list[str], bytes]:
    folder = root.parent / "folder"
    names = sorted(path.name for path in folder.iterdir())
    return (root.parent / "file").read_bytes(), names, (folder / "kept").read_bytes()


def link_to_file(path: Path) -> None:
    path.symlink_to(store_beside(path).parent / "file")


def link_to_folder(path: Path) -> None:
    path.symlink_to(store_beside(path).parent / "folder")


def link_to_nowhere(path: Path) -> None:
    path.symlink_to(store_beside(path).parent / "folder" / "new")


def second_name(path: Path) -> None:
    os.link(store_beside(path).parent / "file", path)


def pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def device(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a device")
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        short = store_beside(path).parent / "s"
        made.bind(str(short))
        short.rename(path)


def empty_folder(path: Path) -> None:
    path.mkdir(mode=0o700)


def full_folder(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "inside").write_bytes(b"x")


def store_beside(path: Path) -> Path:
    return next(one for one in path.parents if one.name == "store")


PLANTS = [link_to_file, link_to_folder, link_to_nowhere, second_name, pipe, device, listener,
          empty_folder, full_folder]  # fmt: skip


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


DISPOSABLE: dict[str, Callable[[Path], Path]] = {
    "block": lambda root: full_path(root, LINKS[0]),
    "manifest": lambda root: manifest_files(root)[0],
    "next manifest": lambda root: manifest_files(root)[0].with_suffix(f".{2:020}"),
    "shard": lambda root: full_path(root, LINKS[0]).parent,
    "agents' shard": lambda root: manifest_files(root)[0].parent,
    "foreign shard": lambda root: root / "blocks" / "zz",
    "foreign file": lambda root: full_path(root, LINKS[0]).parent / "README",
    "session": lambda root: root / "tmp" / "0123456789abcdef",
    "damaged file": lambda root: root / "bad" / f"{1:020}-{full_path(root, LINKS[0]).name}",
    "index": lambda root: root / "index.sqlite",
    "index-wal": lambda root: root / "index.sqlite-wal",
    "index-shm": lambda root: root / "index.sqlite-shm",
    "index-journal": lambda root: root / "index.sqlite-journal",
}
"""Places whose loss costs what was there and nothing else: a store opens and goes on."""


def planted(part: int) -> pytest.MarkDecorator:
    """Everything in every place; by default a third of that, another one for each `part`."""
    pairs = [
        pytest.param(
            place,
            plant,
            id=f"{place}-{plant.__name__}",
            marks=[] if (row + column) % 3 == part else [pytest.mark.thorough],
        )
        for row, place in enumerate(DISPOSABLE)
        for column, plant in enumerate(PLANTS)
    ]
    return pytest.mark.parametrize(("place", "plant"), pairs)


NEEDED = ["FORMAT", "secret", "lock", "blocks", "agents", "bad", "tmp", "secret.new", "FORMAT.new"]
"""Places without which there is no store: it opens, or one message says what is wrong."""


@pytest.mark.process
@planted(0)
def test_something_lies_there_at_opening(
    root: Path, place: str, plant: Callable[[Path], None]
) -> None:
    """Row 23, links, pipes, devices planted: the store opens, works, cleans itself and opens again;
    no descriptor stays open.
    """
    path = DISPOSABLE[place](root)
    clear(path)
    plant(path)
    before = outside(root)
    places = (root.parent, Path("/dev"))
    opened_before = open_files(*places)
    with not_blocking(root):
        for turn in range(2):
            with opened(root) as store:
                all_read(store, LINKS)
                has_agent(store)
                assert works(store, seed=100 + turn)
                store.check(read_data=True)
                keep_again(root)
                store.gc(dry_run=False)
    assert outside(root) == before
    assert open_files(*places) == opened_before


@pytest.mark.process
@pytest.mark.parametrize("plant", PLANTS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("place", ["block", "manifest", "shard"])
def test_something_lies_there_and_the_index_is_gone(
    root: Path, place: str, plant: Callable[[Path], None]
) -> None:
    """The index is derived from what is left."""
    path = DISPOSABLE[place](root)
    clear(path)
    plant(path)
    for file in root.glob("index.sqlite*"):
        file.unlink()
    with not_blocking(root), opened(root) as store:
        assert store.read(make.header(LINKS[0])) is None or place == "manifest"
        all_read(store, LINKS)
        assert works(store, seed=100)
        store.check(read_data=True)
        store.rebuild_index()


def keep_again(root: Path) -> None:
    """What was lost comes back: from another process's view of the folder."""
    with opened(root) as store:
        for block in make.blocks(LINKS):
            store.put(block)
        has_agent(store)


@pytest.mark.process
@planted(1)
def test_something_is_put_there_meanwhile(
    root: Path, place: str, plant: Callable[[Path], None]
) -> None:
    """Row 23: the same while the store is open. No call raises; opened again, all goes on."""
    before = outside(root)
    with not_blocking(root):
        with opened(root) as store:
            path = DISPOSABLE[place](root)
            clear(path)
            plant(path)
            for _ in range(2):
                all_read(store, LINKS)
                has_agent(store)
                for block in make.blocks(LINKS):
                    store.put(block)
                store.save(make.manifest("a", 600))
                saved_agents(store)
                store.touch(make.keys(LINKS))
                store.children(make.SCOPE.root, Part.FULL)
                store.flush()
            with suppress(StoreError):
                store.check(read_data=True)
            with suppress(StoreError):
                store.gc(dry_run=False)
        with opened(root) as store:
            assert works(store)
    assert outside(root) == before


@pytest.mark.process
@pytest.mark.parametrize("plant", PLANTS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", NEEDED)
def test_something_lies_where_the_store_itself_should(
    root: Path, name: str, plant: Callable[[Path], None]
) -> None:
    """Row 23: FORMAT, secret, lock and the folders. Refused with one message, or harmless."""
    clear(root / name)
    plant(root / name)
    before = outside(root)
    secret = root / "secret"
    with not_blocking(root):
        try:
            with opened(root) as store:
                assert works(store)
                assert all_read(store, LINKS) or name == "blocks"
        except StoreError as error:
            require_message(error, str(root), name)
    assert outside(root) == before
    if name not in {"secret", "secret.new"}:
        assert secret.stat().st_size == 32


@pytest.mark.parametrize("plant", [empty_folder, full_folder], ids=lambda one: one.__name__)
def test_a_quarantined_folder_does_not_stop_eviction(
    root: Path, plant: Callable[[Path], None]
) -> None:
    """Row 23: what lies in `bad/` goes first when room is needed, also when it is a folder."""
    path = full_path(root, LINKS[0])
    clear(path)
    plant(path)
    small = 1_660_000
    with opened(root, small) as store:
        assert store.read(make.header(LINKS[0])) is None
        for seed in range(60, 80):
            for block in make.blocks(make.chain(1024, seed)):
                store.put(block)
        assert count(store, "write_errors") == 0, store.stats()
        assert count(store, "evicted") > 0
        store.gc(dry_run=False)
        assert store.stats()[0].n_bytes <= small


ODD_BYTES = [
    b"blocks/%s/\xff\xfe",
    b"blocks/%s/%s\xff",
    b"blocks/\xff\xfe",
    b"agents/\xff\xfe",
    b"bad/00000000000000000001-\xff",
    b"tmp/\xff\xfe",
    b"blocks/%s/a b\n",
]
"""Names that are no UTF-8, which most file systems on Linux take."""


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("name", ODD_BYTES, ids=ascii)
def test_a_name_is_no_text(root: Path, name: bytes, kind: str) -> None:
    """Row 22 and 23: a foreign name of any bytes is left alone, and counted."""
    shard = LINKS[0].hash.hex()[:2].encode()
    full = os.fsencode(root) + b"/" + name.replace(b"%s", shard)
    try:
        Path(os.fsdecode(full)).mkdir() if kind == "folder" else os.close(
            os.open(full, os.O_CREAT | os.O_WRONLY)
        )
    except OSError as error:
        pytest.skip(f"the file system does not take such names: {error}")
    with opened(root) as store:
        assert all_read(store, LINKS)
        assert works(store)
        store.check(read_data=True)
        store.gc(dry_run=True)
        store.gc(dry_run=False)
        assert has_agent(store)


@pytest.mark.parametrize("generation", [0, 2**63 - 1, 2**63, 2**64, 10**20 - 1])
@pytest.mark.parametrize("data", [b"", b"junk"])
def test_a_generation_of_any_size(root: Path, generation: int, data: bytes) -> None:
    """Row 24: a manifest's name with a number that no database holds. Damaged, and that is all."""
    (path,) = manifest_files(root)
    path.with_suffix(f".{generation:020}").write_bytes(data)
    with opened(root) as store:
        assert has_agent(store)
        assert count(store, "damaged") == 1
        assert store.save(make.manifest("a", 601))
        assert has_agent(store, n_tokens=601)


def test_the_last_number_of_a_damaged_file_is_taken(root: Path) -> None:
    """Row 23: what is quarantined after it is still counted, and does not grow without end."""
    (root / "bad" / f"{10**20 - 1:020}-x").write_bytes(b"x")
    links = make.chain(256 * 40, seed=5)
    with opened(root) as store:
        keep(store, links)
        for link in links:
            full_path(root, link).write_bytes(b"junk")
            assert store.read(make.header(link)) is None
        assert len(list((root / "bad").iterdir())) <= 17
        store.gc(dry_run=False)
        assert not list((root / "bad").iterdir())


def test_a_dead_sessions_place_is_a_file_and_is_cleaned(root: Path) -> None:
    """Row 23: something in `tmp/` that is no session is cleaned away by `gc`, too."""
    with opened(root) as store:
        (root / "tmp" / "x").write_bytes(b"x")
        store.gc(dry_run=True)
        store.gc(dry_run=False)
        assert len(list((root / "tmp").iterdir())) == 1
    assert block_files(root)


@pytest.mark.parametrize("while_open", [True, False])
def test_a_block_is_put_where_a_folder_stands(tmp_path: Path, while_open: bool) -> None:
    """Planted files: the folder is quarantined with its contents, and the block is stored."""
    root = tmp_path / "store"
    link = make.chain(256)[0]
    path = full_path(root, link)

    def plant() -> None:
        path.parent.mkdir(exist_ok=True)
        path.mkdir()
        (path / "inside").write_text("kept", encoding="ascii")

    with opened(root) as store:
        if while_open:
            plant()
            assert store.put(make.block(link))
    if not while_open:
        plant()
        with opened(root) as store:
            assert store.put(make.block(link))
    with opened(root) as store:
        assert all_read(store, [link])
    assert [found.read_text(encoding="ascii") for found in root.glob("bad/*/inside")] == ["kept"]
