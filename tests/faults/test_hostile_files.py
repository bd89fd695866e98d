"""Files made with knowledge of the format, with right checksums. They are refused in
order: before anything large is allocated, with nothing raised, and the store goes on.
"""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import xxhash

from semantic.adapters.stores.disk import DiskStore
from semantic.domain.block_hash import Part
from semantic.domain.errors import StoreError
from semantic.domain.stored import BlockLayout
from tests.faults.folder import (
    LINKS,
    all_read,
    copy_of,
    delete_index,
    fast_folder,
    fill,
    full_path,
    has_agent,
    keep,
    manifest_files,
    opened,
    works,
)
from tests.support import store_blocks as make
from tests.support.lanes import examples
from tests.support.store_blocks import saved_agents

HEADER = struct.Struct("<8sIIIIQQ32s32s32s32s16s")
FIELDS = ("magic", "version", "part", "n_tokens", "n_layout", "start", "n_body", "namespace",
          "tenant", "hash", "parent", "body_sum")  # fmt: skip
SUM_AT = 4080
NUMBERS = {"version": 32, "part": 32, "n_tokens": 32, "n_layout": 32, "start": 64, "n_body": 64}
"""Fields of a header that are numbers, and their bits."""
MEMORY = 24 << 20
"""More than any call here needs; far less than what the files ask for."""


@pytest.fixture
def root() -> Iterator[Path]:
    """A store with an agent."""
    with fast_folder() as folder:
        fill(folder / "store")
        yield folder / "store"


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Fails when more is allocated at one time than the store needs."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def forged(data: bytes, **fields: int | bytes) -> bytes:
    """A block's file with other fields and a right checksum over them."""
    values = dict(zip(FIELDS, HEADER.unpack_from(data), strict=True)) | fields
    framed = HEADER.pack(*values.values()) + data[HEADER.size : SUM_AT]
    return framed + xxhash.xxh3_128_digest(framed) + data[SUM_AT + 16 :]


def forged_manifest(data: bytes, text: bytes | None = None, **fields: object) -> bytes:
    """A manifest's file with other fields, or another text, and a right checksum."""
    (n_text,) = struct.unpack_from("<Q", data, 32)
    if text is None:
        text = json.dumps(json.loads(data[48 : 48 + n_text]) | fields).encode()
    tokens = data[48 + n_text :]
    rest = struct.pack("<QQ", len(text), len(tokens) // 4) + text + tokens
    return data[:16] + xxhash.xxh3_128_digest(rest) + rest


def use(store: DiskStore) -> None:
    """Everything that meets the first block's file or the agent's manifest."""
    all_read(store, LINKS)
    store.manifest(make.SCOPE, "a")
    saved_agents(store)
    store.children(make.SCOPE.root, Part.FULL)
    store.find(make.keys(LINKS))
    store.check(read_data=True)
    store.save(make.manifest("a", 600))
    store.gc(dry_run=True)


def survives(root: Path) -> None:
    """Whatever lies there: a store opens with its index and without, answers, and works."""
    with opened(root) as store:
        use(store)
        assert works(store)
    delete_index(root)
    with opened(root) as store:
        use(store)
        assert works(store, seed=901)
        all_read(store, LINKS[1:])


NUMERIC = [0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def absurd_numbers() -> Iterator[object]:
    """Every value and every number; every second pair of them by default."""
    for i, name in enumerate(NUMBERS):
        for j, value in enumerate(NUMERIC):
            marks = [] if (i + j) % 2 == 0 else [pytest.mark.thorough]
            yield pytest.param(name, value, marks=marks)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(("name", "value"), list(absurd_numbers()))
def test_a_number_of_a_header_is_absurd(root: Path, name: str, value: int) -> None:
    """Row 24, huge counts, negative numbers, lengths of 2^62, with a right checksum."""
    path = full_path(root, LINKS[0])
    path.write_bytes(forged(path.read_bytes(), **{name: value % (1 << NUMBERS[name])}))
    survives(root)


@pytest.mark.parametrize("start", [2**63 - 1, 2**63, 2**64 - 1])
def test_a_position_that_no_database_holds(root: Path, start: int) -> None:
    """Row 24: the position is no part of the hash; a sound header may name any. Met first by a
    scan, for which the index knows nothing of the file.
    """
    path = full_path(root, LINKS[0])
    path.write_bytes(forged(path.read_bytes(), start=start))
    delete_index(root)
    survives(root)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("n_body", [1 << 36, 1 << 43])
def test_a_body_of_terabytes_that_takes_no_room(root: Path, n_body: int) -> None:
    """Row 24: a file with a hole has any size; its header is right. It is not read into memory."""
    path = full_path(root, LINKS[0])
    path.write_bytes(forged(path.read_bytes(), n_body=n_body))
    try:
        os.truncate(path, 4096 + n_body)
    except OSError as error:
        pytest.skip(f"the file system has no files of this size: {error}")
    with opened(root, 1 << 50) as store:
        assert store.read(make.header(LINKS[0])) is None
        room = make.Room(make.header(LINKS[0]))
        assert list(store.read_into([room.read])) == [False]
    delete_index(root)
    with opened(root, 1 << 50) as store:
        assert store.read(make.header(LINKS[0])) is None
        assert works(store)


@pytest.mark.parametrize("place", ["block", "foreign", "bad"])
def test_sizes_whose_sum_no_database_holds(root: Path, place: str) -> None:
    """Row 24, lengths of 2^62: counted as more than there is; the store opens."""
    shard = full_path(root, LINKS[0]).parent
    for i in range(3):
        path = {
            "block": full_path(root, LINKS[i]),
            "foreign": shard / f"foreign {i}",
            "bad": root / "bad" / f"{i:020}-x",
        }[place]
        if place == "block":
            path.write_bytes(forged(path.read_bytes(), n_body=(1 << 62) - 4096))
        path.touch()
        try:
            os.truncate(path, 1 << 62)
        except OSError as error:
            pytest.skip(f"the file system has no files of this size: {error}")
    with opened(root) as store:
        assert has_agent(store)
        assert store.stats()[0].n_bytes >= 0


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "size", [1 << 27, (1 << 28) - 4, (1 << 28) + 1, 1 << 40], ids=lambda size: f"2^{size:.0e}"
)
def test_a_manifest_of_any_size(root: Path, size: int) -> None:
    """Row 24: a manifest whose own lengths do not fit its size is not read to the end."""
    (path,) = manifest_files(root)
    os.truncate(path, size)
    with opened(root) as store:
        assert store.manifest(make.SCOPE, "a") is None
        assert works(store)


VALUES: list[object] = [-1, 0, 2**62, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, -0.5,
                        None, True, "x", [], {}, [[1]]]  # fmt: skip
VALUED = ("generation", "order", "turns", "prompt_tokens", "saved_at", "pinned", "match", "parent")


def absurd() -> Iterator[object]:
    """Every value and every field; every fourth pair of them by default."""
    for i, name in enumerate(VALUED):
        for j, value in enumerate(VALUES):
            marks = [] if (i + j) % 4 == 0 else [pytest.mark.thorough]
            yield pytest.param(name, value, id=f"{name}-{str(value)[:24]}", marks=marks)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(("name", "value"), list(absurd()))
def test_a_field_of_a_manifest_is_absurd(root: Path, name: str, value: object) -> None:
    """Row 24: any JSON in any field of a manifest, with a right checksum."""
    (path,) = manifest_files(root)
    path.write_bytes(forged_manifest(path.read_bytes(), None, **{name: value}))
    survives(root)


def test_a_manifest_of_a_version_that_counted_saves_as_turns(root: Path) -> None:
    (path,) = manifest_files(root)
    data = path.read_bytes()
    (n_text,) = struct.unpack_from("<Q", data, 32)
    fields = json.loads(data[48 : 48 + n_text])
    del fields["turns"]
    path.write_bytes(forged_manifest(data, json.dumps(fields).encode()))
    with opened(root) as store:
        found = store.manifest(make.SCOPE, "a")
        assert found is not None
        assert found.turns == found.generation > 0


TEXTS = [b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"1" * 100_000, b"\xff",
         b'{"agent_id": "a"}', b"NaN", b"1e999", b'"' + b"\\ud800" * 1000 + b'"']  # fmt: skip


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text[:12]))
def test_a_text_that_is_no_manifest(root: Path, text: bytes) -> None:
    """Row 24: any text with a right checksum: deep, long, no UTF-8, of another type."""
    (path,) = manifest_files(root)
    path.write_bytes(forged_manifest(path.read_bytes(), text))
    survives(root)


def test_a_sound_block_with_another_layout(root: Path) -> None:
    """Row 24, wrong dtype or layout: a sound file that says other shapes is not what was asked."""
    other = BlockLayout("test: another dtype", full=make.LAYOUT.full)
    path = full_path(root, LINKS[0])
    path.unlink()
    with opened(root) as store:
        keep(store, [])
        assert store.put(make.block(LINKS[0], layout=other))
        assert store.read(make.header(LINKS[0])) is None
        room = make.Room(make.header(LINKS[0]))
        assert list(store.read_into([room.read])) == [False]
        assert store.stats()[0].counts["mismatches: layout"] == 2
        assert store.read(make.header(LINKS[0], layout=other)) is not None


def test_random_fields_with_a_right_checksum(root: Path) -> None:
    """Row 24, fuzzing that knows the structure: several fields at once, right checksums."""
    random = Random(24)
    restore = copy_of(root)
    block, (manifest,) = full_path(root, LINKS[0]), manifest_files(root)
    good_block, good_manifest = block.read_bytes(), manifest.read_bytes()
    numbers = [0, 1, 255, 257, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1]
    for _ in range(examples(60, thorough=150)):
        changed: dict[str, int | bytes] = {
            name: random.choice(numbers) % (1 << NUMBERS[name])
            for name in random.sample(sorted(NUMBERS), random.randrange(3))
        }
        for name in random.sample(FIELDS[7:], random.randrange(3)):
            changed[name] = random.randbytes(32 if name != "body_sum" else 16)
        block.write_bytes(forged(good_block, **changed))
        junk = bytearray(good_manifest)
        for _ in range(random.randrange(1, 4)):
            junk[random.randrange(16, len(junk))] = random.randrange(256)
        junk[16:32] = xxhash.xxh3_128_digest(bytes(junk[32:]))
        manifest.write_bytes(junk)
        if random.random() < 0.5:
            delete_index(root)
        with opened(root) as store:
            store.find(make.keys(LINKS))
            all_read(store, LINKS)
            saved_agents(store)
            assert works(store)
        restore()


def test_a_hostile_format_file(root: Path) -> None:
    """Row 24: FORMAT with any JSON: one message, or the format that it says."""
    for text in (*TEXTS, b'{"format": 1.5}', b'{"format": "1"}', b'{"format": -1}',
                 b'{"format": 0}', b'{"format": ' + b"9" * 4000 + b"}"):  # fmt: skip
        (root / "FORMAT").write_bytes(text)
        with pytest.raises(StoreError, match="format"):
            DiskStore.open(root, 1 << 26)
