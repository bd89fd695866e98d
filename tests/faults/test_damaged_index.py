"""The index is lost, old, flipped or replaced. It is disposable: after the next opening the same
is found, the same is pinned, and the budget counts the same.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from random import Random

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.domain.block_hash import Part
from semantic.domain.errors import StoreError
from tests.faults.folder import (
    PLENTY,
    all_read,
    copy_of,
    delete_index,
    disk_usage,
    fast_folder,
    flip,
    index_files,
    opened,
    works,
)
from tests.faults.processes import process
from tests.support import store_blocks as make
from tests.support.faulty_files import FaultyFiles
from tests.support.lanes import THOROUGH, examples
from tests.support.store_blocks import saved_agents

_FLIPS = examples(60, thorough=400)
_LOG_FLIPS = examples(40, thorough=100)

AGENTS = [("a", 600, 0, True), ("b", 530, 1, False), ("c", 5, 2, False)]
"""Name, tokens, seed and whether it is pinned."""


@pytest.fixture
def root() -> Iterator[Path]:
    """A store with agents, one pinned, and blocks of no agent."""
    with fast_folder() as folder:
        with opened(folder / "store") as store:
            for name, n_tokens, seed, pinned in AGENTS:
                for block in make.blocks(make.chain(n_tokens, seed)):
                    assert store.put(block)
                assert store.save(make.manifest(name, n_tokens, seed, pinned=pinned))
            for block in make.blocks(make.chain(700, 3)):
                assert store.put(block)
        yield folder / "store"


def answers(store: DiskStore) -> Mapping[str, object]:
    """All that the index says: finds, followers, agents, sums."""
    links = [link for seed in range(4) for link in make.chain(800, seed)]
    links += [link for _, n_tokens, seed, _ in AGENTS for link in make.chain(n_tokens, seed)]
    stats = store.stats()[0]
    return {
        "found": dict(store.find(make.keys(links))),
        "followers": {
            link.parent: sorted(
                (one.link.hash, one.link.start) for one in store.children(link.parent, Part.FULL)
            )
            for link in links
        },
        "agents": {one.agent_id: one for one in saved_agents(store)},
        "sums": (stats.n_blocks, stats.n_agents, stats.n_bytes, stats.pinned_bytes),
    }


def sound_answers(root: Path) -> Mapping[str, object]:
    """What a new index says."""
    delete_index(root)
    with opened(root) as store:
        return answers(store)


def differences(root: Path) -> set[str]:
    """Open with the index as it lies there: what is not as it should be."""
    with opened(root) as store:
        before, n_bytes = answers(store), disk_usage(root)
        if not works(store):
            return {"cannot be written"}
        assert n_bytes <= PLENTY
    expected = _EXPECTED[root]
    return {name for name in expected if before[name] != expected[name]}


_EXPECTED: dict[Path, Mapping[str, object]] = {}


@pytest.fixture
def expected(root: Path) -> Iterator[Path]:
    """The same store; what its index should say is remembered."""
    _EXPECTED[root] = sound_answers(root)
    yield root
    del _EXPECTED[root]


def test_flipped_bits_of_the_index(expected: Path) -> None:
    """Row 30, the index bit-flipped, many times anywhere: after opening all is as it was."""
    random = Random(30)
    size = 8 * (expected / "index.sqlite").stat().st_size
    wrong = flips_that_stay(
        expected, "index.sqlite", [random.randrange(size) for _ in range(_FLIPS)]
    )
    assert not wrong, f"{len(wrong)} of {_FLIPS} flips: {wrong[:12]}"


def test_flipped_bits_of_the_indexs_beginning(expected: Path) -> None:
    """Row 30: the 100 bytes with which every SQLite file begins; all bits of its versions."""
    every = 1 if THOROUGH else 3  # not a divisor of 8: each bit of a byte has its turn
    bits = [8 * at + at % 8 for at in range(0, 100, every)] + list(range(8 * 16, 8 * 24, every))
    wrong = flips_that_stay(expected, "index.sqlite", bits)
    assert not wrong, f"{len(wrong)} of {len(bits)} flips: {wrong[:12]}"


def flips_that_stay(root: Path, name: str, bits: Sequence[int]) -> list[tuple[int, object]]:
    """The places of those bits that, flipped, make a difference after opening, and which."""
    restore = copy_of(root)
    wrong: list[tuple[int, object]] = []
    for at in bits:
        flip(root / name, at)
        try:
            found = differences(root)
            if found:
                wrong.append((at // 8, sorted(found)))
        except Exception as error:  # noqa: BLE001  # any of them is what is looked for
            wrong.append((at // 8, repr(error)[:90]))
        restore()
    return wrong


@pytest.mark.parametrize("name", ["index.sqlite-wal", "index.sqlite-shm"])
def test_flipped_bits_of_the_log(expected: Path, name: str) -> None:
    """Row 30: the log and its map, as a killed process leaves them, with bits flipped."""
    root = expected
    kept = DiskStore.open(root, PLENTY)
    kept.touch(make.keys(make.chain(600)))
    held = {path: path.read_bytes() for path in index_files(root)}
    kept.close()
    for path, data in held.items():
        path.write_bytes(data)
        path.chmod(0o600)
    assert len(held) == 3
    random = Random(31)
    size = 8 * len(held[root / name])
    wrong = flips_that_stay(root, name, [random.randrange(size) for _ in range(_LOG_FLIPS)])
    assert not wrong, wrong[:12]


HARM = {
    "clock as text": "UPDATE numbers SET value = CAST('x' AS TEXT) WHERE name = 'clock'",
    "clock at its end": "UPDATE numbers SET value = 9223372036854775807 WHERE name = 'clock'",
    "clock gone": "DELETE FROM numbers WHERE name = 'clock'",
    "sum gone": "DELETE FROM numbers WHERE name = 'bytes'",
    "sum wrong": "UPDATE numbers SET value = value + 1000000000 WHERE name = 'bytes'",
    "blocks pinned": "UPDATE blocks SET pinned = 1",
    "blocks not pinned": "UPDATE blocks SET pinned = 0",
    "agents not pinned": "UPDATE agents SET pinned = 0",
    "agents pinned": "UPDATE agents SET pinned = 1",
    "chains gone": "DELETE FROM chain",
    "tokens gone": "DELETE FROM tokens",
    "tokens wrong": "UPDATE tokens SET packed = zeroblob(length(packed))",
    "starts wrong": "UPDATE blocks SET start = start + 512",
    "parents wrong": "UPDATE blocks SET parent = zeroblob(32)",
    "scopes wrong": "UPDATE scopes SET tenant = zeroblob(32)",
    "sizes wrong": "UPDATE blocks SET body_bytes = body_bytes + 1",
    "costs wrong": "UPDATE blocks SET cost = cost + 4096",
    "uses as text": "UPDATE blocks SET used = CAST('x' AS TEXT)",
    "parts wrong": "UPDATE blocks SET part = 'window'",
    "blocks gone": "DELETE FROM blocks",
    "agents gone": "DELETE FROM agents",
    "manifests gone": "DELETE FROM manifests",
    "more reserved": "INSERT INTO reservations(session, cost) VALUES ('x', 1 << 40)",
}
"""What a flipped bit or an edit by hand may make of single tables, SQLite finding no fault."""


@pytest.mark.parametrize("harm", HARM)
def test_rows_that_say_something_else(expected: Path, harm: str) -> None:
    """Row 30: sound tables with wrong rows; the files are right and the index is wrong, always."""
    with closing(sqlite3.connect(expected / "index.sqlite")) as db:
        db.execute(HARM[harm])
        db.commit()
    assert differences(expected) == set()


def test_an_older_index_of_another_agent_of_the_same_name(root: Path) -> None:
    """Row 30, an older copy put back: meanwhile the agent was removed and saved anew, with as many
    tokens and pinned. Its pins hold.
    """
    older = {path: path.read_bytes() for path in index_files(root)}
    with opened(root) as store:
        assert store.remove(make.SCOPE, "b")
        for block in make.blocks(make.chain(530, 8)):
            assert store.put(block)
        assert store.save(make.manifest("b", 530, 8, pinned=True))
        expected = answers(store)
    delete_index(root)
    for path, data in older.items():
        path.write_bytes(data)
        path.chmod(0o600)
    with opened(root) as store:
        assert answers(store) == expected


@pytest.mark.process
@pytest.mark.parametrize("how", ["deleted", "rebuilt"])
def test_the_index_goes_again_and_again_while_threads_use_it(root: Path, how: str) -> None:
    """Row 30, the index deleted, or rebuilt by another process, while serving: no exception, no
    crash, no wrong answer, and after the next opening everything that was put is there.
    """
    with process("busy", root, 2.5) as busy:
        assert busy.line() == "busy"
        with opened(root) as other:
            pause = 0.02
            while busy.is_running:
                if how == "deleted":
                    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
                        (root / name).unlink(missing_ok=True)
                else:
                    with suppress(StoreError):
                        other.rebuild_index()
                time.sleep(pause)
                pause *= 1.05  # on a slow machine nothing would be kept between two of them
        kept = json.loads(busy.result())
    assert len(kept) > 10
    with opened(root) as store:
        assert all(all_read(store, make.chain(300, seed)) for seed in kept)
        assert store.check(read_data=True).is_clean


def test_a_rebuilding_that_fails_is_not_believed(root: Path) -> None:
    """Row 30: the folder cannot be listed just when the index is made anew. What is left is not
    taken for a store with nothing in it: blocks are found again, and the budget counts them.
    """
    files = FaultyFiles(errno.EIO, 1, calls=frozenset({"names"}))
    files.repair()
    store = DiskStore.open(root, PLENTY, files=files)
    before = answers(store)
    files.break_again()
    with pytest.raises(StoreError):
        store.rebuild_index()
    files.repair()
    after = answers(store)
    store.close()
    assert after == before


def test_nothing_of_the_index_is_open_to_others(root: Path) -> None:
    """Row 30: an index that was made anew is the owner's alone, its log and map as well."""
    before = os.umask(0)
    try:
        delete_index(root)
        with opened(root) as store:
            store.touch(make.keys(make.chain(600)))
            modes = {path.name: path.stat().st_mode & 0o777 for path in index_files(root)}
    finally:
        os.umask(before)
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}
