"""Files that do not hold what was written: cut, zeroed, flipped, copied, exchanged. What is
returned is what was put; all else is a miss, counted by kind and quarantined.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.domain.block_hash import Part
from semantic.domain.errors import StoreError
from semantic.domain.stored import StoredBlock
from tests.faults.folder import (
    LINKS,
    block_files,
    copy_of,
    count,
    delete_index,
    fast_folder,
    fill,
    flip,
    full_path,
    has_agent,
    is_read,
    keep,
    manifest_files,
    opened,
    require_message,
    works,
)
from tests.support import store_blocks as make
from tests.support.lanes import examples

PAGE = 4096


@pytest.fixture
def root() -> Iterator[Path]:
    """A store with an agent."""
    with fast_folder() as folder:
        fill(folder / "store")
        yield folder / "store"


def damaged_block(root: Path, store: DiskStore, data: bytes) -> None:
    """The first block's file holds `data` now: a miss, quarantined, and then put anew."""
    path = full_path(root, LINKS[0])
    path.write_bytes(data)
    before = count(store, "damaged")
    assert not is_read(store, LINKS[0])
    assert count(store, "damaged") == before + 1
    assert not path.exists()
    keep(store, LINKS[:1])
    assert is_read(store, LINKS[0])


def torn(good: bytes, before: bytes) -> Iterator[bytes]:
    """What power loss may leave of a file that was renamed but not written: from each page on
    zeros, a single page of zeros, what lay on the drive before, and nothing at all.
    """
    for at in range(0, len(good), PAGE):
        end = min(at + PAGE, len(good))
        yield good[:at] + bytes(len(good) - at)
        yield good[:at] + bytes(end - at) + good[end:]
        yield good[:at] + before[at:end].ljust(end - at, b"\0") + good[end:]
        yield good[:at] + before[at : len(good)].ljust(len(good) - at, b"\0")
        yield good[:at]


def test_power_loss_inside_a_block(root: Path) -> None:
    """Row 2, power loss, the name kept and the data lost: a large block, page by page."""
    layout_bytes = 9 * PAGE
    (link,) = make.chain(256, seed=7)
    body = make.body_of(link.hash, Part.CHECKPOINT, layout_bytes)
    block = StoredBlock(make.header(link, Part.CHECKPOINT), body)
    with opened(root) as store:
        assert store.put(block)
        (path,) = [one for one in block_files(root) if one.suffix == ".checkpoint"]
        good = path.read_bytes()
        other = full_path(root, LINKS[0]).read_bytes() * 3
        bad = [data for data in torn(good, other) if data != good]
        assert len(bad) >= 45
        for data in bad:
            path.write_bytes(data)
            assert store.read(block.header) is None
            assert not path.exists()
            assert store.put(block)
        assert count(store, "damaged") == len(bad)
        assert store.read(block.header) == body


def test_power_loss_inside_a_manifest(root: Path) -> None:
    """Row 2: the newest manifest is torn, and the one before it counts."""
    n_tokens = 5000
    with opened(root) as store:
        assert store.save(make.manifest("long", n_tokens - 1))
        path = next(one for one in manifest_files(root) if one.stat().st_size > 3 * PAGE)
        before = path.read_bytes()
        assert store.save(make.manifest("long", n_tokens))
        newest = path.with_suffix(f".{2:020}")
        good = newest.read_bytes()
        restore = copy_of(root / "agents")
        bad = [data for data in torn(good, before) if data != good]
        assert len(bad) >= 20
        for data in bad:
            newest.write_bytes(data)
            assert has_agent(store, "long", n_tokens - 1)
            assert not newest.exists()
            restore()
            store.rebuild_index()
        assert has_agent(store, "long", n_tokens)


def test_power_loss_while_nobody_looks(root: Path) -> None:
    """Row 2: all files are zeros of the right length; the store opens, has nothing, and works."""
    for path in [*block_files(root), *manifest_files(root)]:
        path.write_bytes(bytes(path.stat().st_size))
    with opened(root) as store:
        assert not any(is_read(store, link) for link in LINKS)
        assert not has_agent(store)
        assert count(store, "damaged") >= len(LINKS)
        assert works(store)
        assert len(store.check(read_data=True).damaged) == 1, "the one that was not asked for"


@pytest.mark.parametrize("length", [0, 1, 8, 12, 40, 168, 184, 1207, 1208, 4079, 4080, 4095, 4096, 4097, -1])  # fmt: skip # noqa: E501
def test_a_block_is_cut(root: Path, length: int) -> None:
    """Row 3, truncated: in each region of the header, at its end, in the body, by one byte."""
    with opened(root) as store:
        good = full_path(root, LINKS[0]).read_bytes()
        damaged_block(root, store, good[:length])
        assert count(store, "damaged: truncated") == 1


@pytest.mark.parametrize("length", [0, 1, 8, 15, 16, 31, 32, 40, 47, 48, 100, -4, -1])
def test_the_only_manifest_is_cut(root: Path, length: int) -> None:
    """Row 3, truncated: an agent whose only manifest is torn is not known; its blocks are."""
    (path,) = manifest_files(root)
    path.write_bytes(path.read_bytes()[:length])
    with opened(root) as store:
        assert not has_agent(store)
        assert count(store, "damaged: truncated") == 1
        assert is_read(store, LINKS[0])


@pytest.mark.long
def test_bits_are_flipped_anywhere(root: Path) -> None:
    """Row 4, a bit flipped anywhere: in blocks and manifests, FORMAT and secret. Nothing that was
    not put is ever returned, and no flip of a block, a manifest or the secret goes unseen.
    """
    random = Random(4)
    restore = copy_of(root)
    files = [*block_files(root), *manifest_files(root)]
    for number in range(examples(100, thorough=960)):
        path = random.choice(files)
        size = path.stat().st_size
        # The body is most of a block; half of the flips are to meet the fields before it.
        at = random.randrange(8 * (size if number % 2 else min(1300, size)))
        flip(path, at)
        with opened(root) as store:
            seen = read_all(store)
            assert seen != ([True] * len(LINKS), True), f"{path.name} bit {at}"
            counts = store.stats()[0].counts
            assert counts["damaged"] == 1 or counts.get("newer format"), f"{path.name} bit {at}"
        restore()
        if number % 40 == 0:
            assert_sound(root)
    assert_sound(root)


@pytest.mark.parametrize("name", ["FORMAT", "secret"])
def test_every_bit_of_a_small_file_is_flipped(root: Path, name: str) -> None:
    """Row 4: with another secret no tenant would find anything again, for no visible reason."""
    secret = (root / "secret").read_bytes()
    good = (root / name).read_bytes()
    unseen = []
    for at in range(8 * len(good)):
        flip(root / name, at)
        try:
            with opened(root) as store:
                if store.secret != secret:
                    unseen.append(at)
                assert read_all(store) == ([True] * len(LINKS), True)
        except StoreError as error:
            require_message(error, name, "format")
        flip(root / name, at)
    assert not unseen, f"{len(unseen)} flips of {8 * len(good)} give another secret in silence"


def test_a_block_under_another_name(root: Path) -> None:
    """Row 5: a sound block under another block's name, under another part's, and another
    tenant's copied in: none is returned for what it is not.
    """
    other = make.chain(256, seed=3, scope=make.scope_of(tenant="other"))
    with opened(root) as store:
        keep(store, other)
        keep(store, LINKS[:1], Part.WINDOW)
        mine = full_path(root, LINKS[0])
        for source in (full_path(root, other[0]), full_path(root, LINKS[1]),
                       mine.with_suffix(".window")):  # fmt: skip
            damaged_block(root, store, source.read_bytes())
        assert count(store, "damaged: identity") == 3
        assert is_read(store, other[0])


def test_another_tenants_folder_is_copied_in(root: Path) -> None:
    """Row 5: all files of another store, with another secret, lie beside ours: each still answers
    only to its own hashes.
    """
    with fast_folder() as folder:
        theirs = make.scope_of(tenant="theirs")
        with opened(folder / "their store") as store:
            keep(store, make.chain(600, 0, theirs))
            assert store.save(make.manifest("a", 600, scope=theirs))
        shutil.copytree(folder / "their store" / "blocks", root / "blocks", dirs_exist_ok=True)
        shutil.copytree(folder / "their store" / "agents", root / "agents", dirs_exist_ok=True)
    with opened(root) as store:
        assert read_all(store) == ([True] * len(LINKS), True)
        ours = store.manifest(make.SCOPE, "a")
        assert ours is not None
        assert ours.scope == make.SCOPE
        assert count(store, "damaged") == 0


@pytest.mark.parametrize("rebuilt", [False, True], ids=["index kept", "index lost"])
def test_two_blocks_of_a_chain_are_exchanged(root: Path, rebuilt: bool) -> None:
    """Row 6: both are misses, whether the store was open, closed, or lost its index."""
    first, second = (full_path(root, link) for link in LINKS[:2])
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    if rebuilt:
        delete_index(root)
    with opened(root) as store:
        assert [is_read(store, link) for link in LINKS] == [False, False, True]
        assert count(store, "damaged: identity") == 2


def test_two_generations_of_an_agent_are_exchanged(root: Path) -> None:
    """Row 6, with manifests: neither is taken for the other."""
    with opened(root) as store:
        assert store.save(make.manifest("a", 599))
    first, second = manifest_files(root)
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    with opened(root) as store:
        assert store.manifest(make.SCOPE, "a") is None
        assert count(store, "damaged: identity") == 2


def read_all(store: DiskStore) -> tuple[Sequence[bool], bool]:
    """Which of the blocks are read, and whether the agent is known; all of it right."""
    others = make.chain(256, seed=1)
    found = [is_read(store, link) for link in [*LINKS, *others]]
    return ([*found[:-1]] if found[-1] else [], has_agent(store))


def assert_sound(root: Path) -> None:
    with opened(root) as store:
        assert read_all(store) == ([True] * len(LINKS), True)
        assert store.check(read_data=True).is_clean
