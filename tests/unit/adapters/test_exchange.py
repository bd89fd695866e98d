"""Agents as files: what comes in is what went out, and nothing else is let in."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.exchange import transfer
from semantic.adapters.exchange.document import (
    AgentDocument,
    BodyEntry,
    checksum,
    container_header,
    read_document,
    write_document,
)
from semantic.adapters.exchange.transfer import AgentFiles, create_file, export_agent, import_agent
from semantic.adapters.stores.memory import MemoryStore
from semantic.domain.block_hash import Part, Scope, namespace_of, tenant_tag
from semantic.domain.errors import CapacityError, InvalidRequestError
from semantic.domain.stored import Manifest
from tests.support.lanes import examples
from tests.support.store_blocks import LAYOUT, block, header, saved_agents, text

MIB = 1 << 20
N_TOKENS = 700
"""Three blocks, the last one not full."""


def new_store(max_bytes: int = MIB) -> MemoryStore:
    return MemoryStore(max_bytes)


def agent(store: MemoryStore, agent_id: str = "ada") -> Manifest:
    """An agent of the local tenant of `store`, saved with all parts of its blocks."""
    namespace = namespace_of("model", LAYOUT.name)
    manifest = Manifest(
        Scope(namespace, tenant_tag(store.secret, "")),
        agent_id,
        text(N_TOKENS),
        prompt_tokens=600,
        note="{}",
        model="tiny",
    )
    links = list(manifest.scope.chain(manifest.token_ids))
    for link in links:
        assert store.put(block(link))
    assert store.put(block(links[1], Part.WINDOW))
    assert store.put(block(links[2], Part.CHECKPOINT))
    assert store.save(manifest)
    return manifest


@pytest.fixture
def exported(tmp_path: Path) -> AgentFiles:
    store = new_store()
    return export_agent(store, agent(store), tmp_path / "ada").files


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# There and back


def test_another_store_gets_the_same_bodies_under_its_own_hashes(tmp_path: Path) -> None:
    source, target = new_store(), new_store()
    before = agent(source)
    written = export_agent(source, before, tmp_path / "ada")
    assert (written.n_blocks, written.missing_blocks, written.n_bodies) == (3, 0, 5)
    read = import_agent(target, tmp_path / "ada")
    again = import_agent(target, tmp_path / "ada", name="eve").manifest.scope
    assert (again, again.root == read.manifest.scope.root) == (read.manifest.scope, False)
    after = target.manifest(read.manifest.scope, "ada")
    assert after is not None
    assert (after.token_ids, after.prompt_tokens, after.note, after.model) == (
        before.token_ids, 600, "{}", "tiny",
    )  # fmt: skip
    assert after.scope.namespace == before.scope.namespace
    assert after.scope.tenant == tenant_tag(target.secret, "") != before.scope.tenant
    old, new = (list(one.scope.chain(one.token_ids)) for one in (before, after))
    for theirs, ours in zip(old, new, strict=True):
        assert theirs.hash != ours.hash
        for part in Part:
            assert target.read(header(ours, part)) == source.read(header(theirs, part))
    assert target.read(header(new[1], Part.WINDOW)) is not None
    assert read.n_bodies == 5


def test_the_safetensors_library_reads_the_bodies(exported: AgentFiles) -> None:
    tensors = dict(safetensors.deserialize(exported.bodies.read_bytes()))  # type: ignore[no-untyped-call]
    assert sorted(tensors) == [
        "000000.full", "000001.full", "000001.window", "000002.checkpoint", "000002.full",
    ]  # fmt: skip
    assert all(one["dtype"] == "U8" for one in tensors.values())
    document = json.loads(exported.document.read_bytes())
    sums = {f"{b['block']:06d}.{b['part']}": b["xxh3_128"] for b in document["bodies"]}
    assert {name: checksum(bytes(one["data"])) for name, one in tensors.items()} == sums


def test_only_the_owner_can_read_the_files(exported: AgentFiles) -> None:
    for path in (exported.bodies, exported.document):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("given", ["ada", "ada.safetensors", "ada.json", "v1.2"])
def test_either_file_or_neither_ending_names_both(tmp_path: Path, given: str) -> None:
    files = AgentFiles.of(tmp_path / given)
    stem = given.removesuffix(".safetensors").removesuffix(".json")
    assert (files.bodies.name, files.document.name) == (f"{stem}.safetensors", f"{stem}.json")


def test_blocks_that_are_gone_are_left_out_and_counted(tmp_path: Path) -> None:
    source, target = new_store(), new_store()
    whole = agent(source)
    longer = Manifest(whole.scope, "long", (*whole.token_ids, *text(600, seed=1)))
    written = export_agent(source, longer, tmp_path / "long")
    assert (written.n_blocks, written.missing_blocks) == (6, 4)
    read = import_agent(target, tmp_path / "long").manifest
    links = list(read.scope.chain(read.token_ids))
    assert set(target.find([link.key(Part.FULL) for link in links])) == {
        link.key(Part.FULL) for link in links[:2]
    }


def test_another_name_lets_an_agent_in_twice(tmp_path: Path) -> None:
    store = new_store()
    files = export_agent(store, agent(store), tmp_path / "x").files
    with pytest.raises(InvalidRequestError, match=r"'ada' of this model exists already; use --as"):
        import_agent(store, files.bodies)
    assert import_agent(store, files.bodies, name="eve").manifest.agent_id == "eve"
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        import_agent(store, files.bodies, name="")


@pytest.mark.parametrize("name", ["../../etc/passwd", "a\0b", "🦊" * 9, "x" * 10_000, "\ud800"])
def test_a_name_is_text_and_never_a_path(tmp_path: Path, name: str) -> None:
    source, target = new_store(), new_store()
    files = export_agent(source, agent(source, name), tmp_path / "x").files
    assert import_agent(target, files.document).manifest.agent_id == name
    assert listing(tmp_path) == ["x.json", "x.safetensors"]


# Refused


def refused(files: AgentFiles) -> str:
    """Why the files are refused; nothing of them is in the store then."""
    store = new_store()
    with pytest.raises(InvalidRequestError) as caught:
        import_agent(store, files.bodies)
    assert store.stats()[0].n_blocks == 0
    assert saved_agents(store) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("which", ["bodies", "document"])
def test_a_single_flipped_bit_is_refused_wherever_it_is(exported: AgentFiles, which: str) -> None:
    path: Path = getattr(exported, which)
    data = path.read_bytes()
    bits = random.Random(which).sample(range(8 * len(data)), 300)
    header_bits = range(0, 8 * 700, examples(7, thorough=1))
    for bit in {*bits, *header_bits}:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert str(path) in refused(exported)
    path.write_bytes(data)
    import_agent(new_store(), path)


@pytest.mark.parametrize("which", ["bodies", "document"])
def test_a_file_that_is_shorter_or_longer_is_refused(exported: AgentFiles, which: str) -> None:
    path: Path = getattr(exported, which)
    data = path.read_bytes()
    for wrong in (b"", data[:7], data[:-1], data[: len(data) // 2], data + b"\0", data + data):
        path.write_bytes(wrong)
        refused(exported)


def test_bodies_of_another_agent_are_refused(exported: AgentFiles, tmp_path: Path) -> None:
    store = new_store()
    agent(store)
    other = Manifest(agent(store).scope, "other", text(N_TOKENS, seed=2))
    for link in other.scope.chain(other.token_ids):
        store.put(block(link))
    foreign = export_agent(store, other, tmp_path / "other").files
    exported.bodies.write_bytes(foreign.bodies.read_bytes())
    refused(exported)


def forge(exported: AgentFiles, change: Callable[[dict[str, object]], None]) -> None:
    """Change fields of the document and make its checksum hold again."""
    fields = json.loads(exported.document.read_bytes())
    del fields["checksum"]
    change(fields)
    zeros = b'{"checksum": "' + b"0" * 32
    rest = b'", ' + json.dumps(fields).encode()[1:]
    made = b'{"checksum": "' + checksum(zeros + rest).encode() + rest
    exported.document.write_bytes(made)


def _set(name: str, value: object) -> Callable[[dict[str, object]], None]:
    return lambda fields: fields.__setitem__(name, value)


def _in_bodies(change: Callable[[list[dict[str, object]]], None]) -> Callable[..., None]:
    return lambda fields: change(fields["bodies"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_set("format", "else"), "format must be 'semantic-agent', got 'else'"),
        (_set("version", 2), "version must be 1, got 2"),
        (_set("version", "1"), "version must be 1, got '1'"),
        (_set("version", True), "version"),
        (_set("namespace", "ff"), "namespace must be 64 hexadecimal digits"),
        (_set("namespace", "zz" * 32), "namespace must be 64 hexadecimal digits"),
        (_set("namespace", "A" * 64), "namespace must be 64 hexadecimal digits"),
        (_set("agent", 3), "agent must be text"),
        (_set("agent", ""), "name must not be empty"),
        (_set("note", None), "note must be text"),
        (_set("model", []), "model must be text"),
        (_set("layout", {}), "layout must be text"),
        (_set("token_ids", "abc"), "token_ids must be a list"),
        (_set("token_ids", [-1]), "token_ids must hold whole numbers"),
        (_set("token_ids", [1 << 32]), "token_ids must hold whole numbers"),
        (_set("token_ids", [1.0]), "token_ids must hold whole numbers"),
        (_set("token_ids", [True]), "token_ids must hold whole numbers"),
        (_set("token_ids", [1, 2]), "prompt_tokens|block must hold"),
        (_set("prompt_tokens", 701), "prompt_tokens must hold whole numbers below 701"),
        (_set("prompt_tokens", -1), "prompt_tokens must hold"),
        (_set("bodies", {}), "bodies must be a list"),
        (_set("bodies", [1]), "bodies must be objects"),
        (_in_bodies(list.reverse), "bodies must be in ascending order"),
        (_in_bodies(lambda b: b.insert(0, b[0])), "bodies must be in ascending order"),
        (_in_bodies(lambda b: b[0].update(block=3)), "block must hold whole numbers below 3"),
        (_in_bodies(lambda b: b[0].update(part="../full")), "part must be one of full"),
        (_in_bodies(lambda b: b[0].update(part=["full"])), "part must be one of full"),
        (_in_bodies(lambda b: b[0].update(bytes=1 << 62)), "bytes must hold whole numbers"),
        (_in_bodies(lambda b: b[0].update(bytes=3585)), "000000.full has 3585 bytes"),
        (_in_bodies(lambda b: b[0].update(bytes=7168)), "000001.full has 3584 bytes"),
        (_in_bodies(lambda b: b[-1].update(bytes=1001)), "expected .* bytes, got"),
        (_in_bodies(lambda b: b[0].update(xxh3_128="0" * 32)), "000000.full is damaged"),
        (_in_bodies(lambda b: b[0].update(xxh3_128="0")), "xxh3_128 must be 32 hexadecimal"),
        (_in_bodies(lambda b: b[0].update(path="/etc")), "bodies must be objects with"),
    ],
)
def test_a_document_that_lies_with_a_right_checksum_is_refused(
    exported: AgentFiles, change: Callable[[dict[str, object]], None], complaint: str
) -> None:
    forge(exported, change)
    reason = refused(exported)
    assert len(reason) < 500
    with pytest.raises(InvalidRequestError, match=complaint):
        import_agent(new_store(), exported.bodies)


@pytest.mark.parametrize("rest", [b"", b"[" * 100_000, b'", "a": ' + b"9" * 5000 + b"}", b'"]'])
def test_what_is_no_json_is_refused_whatever_its_checksum(
    exported: AgentFiles, rest: bytes
) -> None:
    opening = b'{"checksum": "'
    made = opening + checksum(opening + b"0" * 32 + rest).encode() + rest
    exported.document.write_bytes(made)
    assert "the document is not JSON" in refused(exported)


def test_a_document_of_any_size_is_not_read(
    exported: AgentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_MAX_DOCUMENT_BYTES", 100)
    assert "is larger than 100 bytes" in refused(exported)


@pytest.mark.parametrize("which", ["bodies", "document"])
def test_a_link_a_folder_or_a_pipe_is_no_file(exported: AgentFiles, which: str) -> None:
    path: Path = getattr(exported, which)
    real = path.rename(path.with_name("real"))
    assert "cannot read" in refused(exported)
    path.symlink_to(real)
    assert "is a link" in refused(exported)
    path.unlink()
    path.mkdir()
    refused(exported)
    path.rmdir()
    os.mkfifo(path)
    assert "not a regular file" in refused(exported)


@pytest.mark.parametrize(
    ("n_bytes", "complaint"),
    [(6000, "quota of 6000"), (15_000, "the store's quota or its disk is full")],
)
def test_a_store_without_room_is_a_matter_of_capacity(
    exported: AgentFiles, n_bytes: int, complaint: str
) -> None:
    small = new_store(n_bytes)
    with pytest.raises(CapacityError, match=complaint):
        import_agent(small, exported.bodies)
    assert saved_agents(small) == []


def test_a_large_body_is_checked_in_pieces_and_a_sparse_one_refused(exported: AgentFiles) -> None:
    size = 64 * MIB

    def grow(bodies: list[dict[str, object]]) -> None:
        bodies[:] = [bodies[-1] | {"bytes": size, "xxh3_128": "0" * 32}]

    forge(exported, _in_bodies(grow))
    entry = BodyEntry(2, Part.CHECKPOINT, size, "0" * 32)
    with exported.bodies.open("wb") as file:
        file.write(container_header([entry]))
        file.truncate(file.tell() + size)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match="is damaged"):
            import_agent(new_store(1 << 40), exported.bodies)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()
    forge(exported, _in_bodies(lambda bodies: bodies[0].update(bytes=8 << 30)))
    assert "bytes must hold whole numbers below" in refused(exported)


# Writing


@pytest.mark.parametrize("which", ["bodies", "document"])
def test_nothing_is_overwritten_and_nothing_half_stays(tmp_path: Path, which: str) -> None:
    store = new_store()
    manifest = agent(store)
    taken: Path = getattr(AgentFiles.of(tmp_path / "x"), which)
    taken.write_text("mine", encoding="ascii")
    with pytest.raises(InvalidRequestError, match="exists already; choose another name"):
        export_agent(store, manifest, tmp_path / "x")
    assert listing(tmp_path) == [taken.name]
    assert taken.read_text(encoding="ascii") == "mine"


def test_a_dangling_link_is_not_followed(tmp_path: Path) -> None:
    store = new_store()
    (tmp_path / "x.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidRequestError, match="exists already"):
        export_agent(store, agent(store), tmp_path / "x")
    assert not (tmp_path / "elsewhere").exists()


def test_a_body_that_cannot_be_read_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store()
    manifest = agent(store)
    monkeypatch.setattr(store, "read", lambda _: None)
    with pytest.raises(InvalidRequestError, match=r"cannot read body 000000\.full"):
        export_agent(store, manifest, tmp_path / "x")
    assert listing(tmp_path) == []


def test_what_fails_beside_a_file_is_not_blamed_on_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"^no such agent$"), create_file(tmp_path / "x"):
        raise InvalidRequestError("no such agent")
    assert listing(tmp_path) == []


def test_a_full_disk_is_one_clear_message_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), descriptor)

    store = new_store()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidRequestError, match=r"cannot write .*x\.json: No space left"):
        export_agent(store, agent(store), tmp_path / "x")
    assert listing(tmp_path) == []


@pytest.mark.parametrize("name", ["no/such/folder/x", "a\0b", ".", ".."])
def test_a_file_that_cannot_be_is_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    store = new_store()
    with pytest.raises(InvalidRequestError):
        export_agent(store, agent(store), Path(name))
    assert listing(tmp_path) == []


# The document alone


@given(
    texts=st.tuples(*[st.text() for _ in range(4)]),
    tokens=st.lists(st.integers(0, (1 << 32) - 1), max_size=600),
    data=st.data(),
)
def test_every_document_reads_back(
    texts: tuple[str, str, str, str], tokens: list[int], data: st.DataObject
) -> None:
    prompt = data.draw(st.integers(0, len(tokens)))
    bodies = tuple(
        BodyEntry(i, Part.FULL, 8 * min(256, len(tokens) - 256 * i), f"{i:032x}")
        for i in range(-(-len(tokens) // 256))
    )
    document = AgentDocument(b"n" * 32, *texts, prompt, tuple(tokens), bodies)
    assert read_document(write_document(document)) == document
