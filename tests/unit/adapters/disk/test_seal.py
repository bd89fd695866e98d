"""A store that was closed in order is opened without a look at every file; others are recovered."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from semantic.adapters.stores.disk import DiskStore, open_store
from semantic.adapters.stores.disk.open_store import Recovery
from tests.support import store_blocks as make
from tests.support.store_blocks import saved_agents
from tests.unit.adapters.disk.support import (
    PLENTY,
    bad_files,
    block_files,
    count,
    is_read,
    opened,
    path_of,
    put_all,
)

LINKS = make.chain(600)
OTHERS = make.chain(300, seed=1)


class Recoveries:
    """How often every file was compared with the index."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.n = 0
        run = Recovery.run

        def counted(recovery: Recovery) -> None:
            self.n += 1
            run(recovery)

        patch.setattr(Recovery, "run", counted)


@pytest.fixture
def recoveries(monkeypatch: pytest.MonkeyPatch) -> Recoveries:
    monkeypatch.setattr(open_store, "SEALED_FROM", 0)
    return Recoveries(monkeypatch)


@pytest.fixture
def sealed(root: Path, recoveries: Recoveries) -> Path:
    """A store that was sealed."""
    fill(root)
    assert seal_of(root).exists()
    recoveries.n = 0
    return root


def fill(root: Path) -> None:
    with opened(root) as store:
        put_all(store, [*LINKS, *OTHERS])
        assert store.save(make.manifest("a", 600))


def seal_of(root: Path) -> Path:
    return root / "index.seal"


def answers(store: DiskStore) -> object:
    [tier] = store.stats()
    manifests = [one.agent_id for one in saved_agents(store)]
    return dict(store.find(make.keys([*LINKS, *OTHERS]))), manifests, tier.n_blocks, tier.n_agents


def test_a_sealed_store_is_opened_without_a_look_at_every_file(
    sealed: Path, recoveries: Recoveries
) -> None:
    for _ in range(3):
        with opened(sealed) as store:
            assert not seal_of(sealed).exists(), "an open store has no seal: it may be killed"
            assert all(is_read(store, link) for link in (*LINKS, *OTHERS))
            quick = answers(store)
        assert seal_of(sealed).exists()
    assert recoveries.n == 0
    seal_of(sealed).unlink()
    with opened(sealed) as store:
        assert recoveries.n == 1
        assert answers(store) == quick


def test_what_a_sealed_store_writes_is_there_after_the_next_seal(
    sealed: Path, recoveries: Recoveries
) -> None:
    more = make.chain(256, seed=2)
    with opened(sealed) as store:
        put_all(store, more)
        assert store.save(make.manifest("b", 256, 2))
    with opened(sealed) as store:
        assert all(is_read(store, link) for link in more)
        assert {one.agent_id for one in saved_agents(store)} == {"a", "b"}
    assert recoveries.n == 0


def remove_a_block(root: Path) -> None:
    path_of(root, make.keys(LINKS)[-1]).unlink()


def add_a_file(root: Path) -> None:
    (block_files(root)[0].parent / "foreign").write_bytes(b"x")


def remove_all_blocks(root: Path) -> None:
    shutil.rmtree(root / "blocks")
    (root / "blocks").mkdir(mode=0o700)


def flip_the_index(root: Path) -> None:
    path = root / "index.sqlite"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove_the_index(root: Path) -> None:
    (root / "index.sqlite").unlink()


def replace_the_index(root: Path) -> None:
    (root / "index.sqlite").write_bytes(b"")


def add_a_log(root: Path) -> None:
    (root / "index.sqlite-wal").touch(mode=0o600)


def cut_the_seal(root: Path) -> None:
    seal_of(root).write_bytes(seal_of(root).read_bytes()[:-1])


def lengthen_the_seal(root: Path) -> None:
    seal_of(root).write_bytes(seal_of(root).read_bytes() + b"x")


def link_the_seal(root: Path) -> None:
    seal_of(root).rename(root / "elsewhere")
    seal_of(root).symlink_to(root / "elsewhere")


def quarantine_something(root: Path) -> None:
    (root / "bad" / f"{1:020}-x").write_bytes(b"x")


@pytest.mark.parametrize(
    "change",
    [
        remove_a_block,
        add_a_file,
        remove_all_blocks,
        flip_the_index,
        remove_the_index,
        replace_the_index,
        add_a_log,
        cut_the_seal,
        lengthen_the_seal,
        link_the_seal,
        quarantine_something,
    ],
)
def test_a_seal_that_does_not_match_is_none(
    sealed: Path, recoveries: Recoveries, change: Callable[[Path], None]
) -> None:
    change(sealed)
    with opened(sealed) as store:
        assert recoveries.n >= 1
        for link in (*LINKS, *OTHERS):
            there = path_of(sealed, make.keys([link])[0]).exists()
            assert is_read(store, link) == there
        assert [one.agent_id for one in saved_agents(store)] == ["a"]


def test_after_a_crash_there_is_no_seal(
    sealed: Path, recoveries: Recoveries, tmp_path: Path
) -> None:
    """A copy of the folder of an open store is what a killed process leaves."""
    killed = tmp_path / "killed"
    with opened(sealed) as store:
        put_all(store, make.chain(256, seed=2))
        shutil.copytree(sealed, killed)
    with opened(killed) as store:
        assert recoveries.n == 1
        assert all(is_read(store, link) for link in (*LINKS, *OTHERS, *make.chain(256, seed=2)))


def test_only_the_last_process_seals(sealed: Path) -> None:
    first = DiskStore.open(sealed, PLENTY, durable=False)
    second = DiskStore.open(sealed, PLENTY, durable=False)
    first.close()
    assert not seal_of(sealed).exists()
    put_all(second, make.chain(256, seed=2))
    second.close()
    assert seal_of(sealed).exists()


def test_a_file_that_was_cut_in_place_is_a_miss_when_it_is_read(
    sealed: Path, recoveries: Recoveries
) -> None:
    cut = path_of(sealed, make.keys(LINKS)[0])
    os.truncate(cut, cut.stat().st_size - 1)
    with opened(sealed) as store:
        assert recoveries.n == 0
        assert not is_read(store, LINKS[0])
        assert count(store, "damaged") == 1
        assert len(bad_files(sealed)) == 1
        assert all(is_read(store, link) for link in LINKS[1:])


def test_a_store_that_had_write_errors_is_not_sealed(sealed: Path) -> None:
    with opened(sealed) as store:
        store._store.counts.add("write_errors")
    assert not seal_of(sealed).exists()


def test_a_small_store_is_not_sealed(root: Path) -> None:
    fill(root)
    assert not seal_of(root).exists()
