"""Exports and imports of agents over HTTP: what is refused, and that a refusal leaves nothing."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest
from pydantic import SecretStr

from semantic.adapters.exchange.archive import CONTAINER, DOCUMENT
from semantic.adapters.exchange.document import read_document, write_document
from semantic.adapters.stores.memory import MemoryStore
from semantic.domain.block_hash import BlockKey, tenant_id, tenant_tag
from semantic.domain.stored import BlockHeader, StoredBlock
from semantic.ports.agents import TenantId
from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext
from semantic_server.http.identity import tenant_name
from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import FakeServing
from tests.support.http_server import Reply, RunningServer, error, running, until
from tests.support.served_agents import MODEL, AgentsWorld
from tests.support.store_blocks import saved_agents

pytestmark = pytest.mark.process

IMPORT = "/v1/agents/import"
KIB = 1024


@pytest.fixture
def served() -> AgentsWorld:
    return AgentsWorld()


@pytest.fixture
def server(served: AgentsWorld) -> Iterator[RunningServer]:
    yield from serve(served, ServerSettings(max_body_mb=0.001))


def serve(served: AgentsWorld, settings: ServerSettings) -> Iterator[RunningServer]:
    app = create_app(settings=settings, context=ServerContext(FakeServing(), agents=served.agents))
    with running(settings=settings, app=app) as found:
        yield found


@pytest.fixture(scope="module")
def archive() -> bytes:
    """An agent "ada" of three blocks."""
    source = AgentsWorld()
    source.turn("ada", 600)
    (found,) = serve_once(source, lambda server: server.ask("GET", "/v1/agents/ada/export").body)
    return found


def serve_once(served: AgentsWorld, ask: Callable[[RunningServer], bytes]) -> list[bytes]:
    return [ask(server) for server in serve(served, ServerSettings())]


def members(archive: bytes) -> dict[str, bytes]:
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            found[member.name] = file.read()
    return found


def tar(parts: dict[str, bytes], **header: Any) -> bytes:
    """What the standard library makes of `parts`."""
    out = io.BytesIO()
    form = header.pop("form", tarfile.GNU_FORMAT)
    with tarfile.open(fileobj=out, mode="w:", format=form) as made:
        for name, data in parts.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for field, value in header.items():
                setattr(member, field, value)
            made.addfile(member, io.BytesIO(data) if member.isreg() else None)
    return out.getvalue()


def negative(data: bytes) -> bytes:
    member = tarfile.TarInfo(DOCUMENT)
    member.size = -1
    return member.tobuf(tarfile.GNU_FORMAT) + data[512:]


def claimed(n_bytes: int) -> bytes:
    member = tarfile.TarInfo(DOCUMENT)
    member.size = n_bytes
    return member.tobuf(tarfile.GNU_FORMAT)


def altered(data: bytes, **fields: Any) -> bytes:
    """The archive with another document, whose checksum holds."""
    parts = members(data)
    document = replace(read_document(parts[DOCUMENT]), **fields)
    return tar({**parts, DOCUMENT: write_document(document)})


def n_blocks(served: AgentsWorld) -> int:
    return served.store.stats()[0].n_blocks


# There and back


@pytest.mark.parametrize("agent", ["ada", "a/b", "x/export", "🦊 ä", "%2F", "import", "x" * 256])
def test_an_agent_of_any_name_moves(server: RunningServer, agent: str) -> None:
    source = AgentsWorld()
    source.turn(agent, 600)
    path = f"/v1/agents/{quote(agent, safe='')}"
    (sent,) = serve_once(source, lambda one: one.ask("GET", f"{path}/export").body)
    assert list(members(sent)) == [DOCUMENT, CONTAINER]
    reply = server.ask("POST", IMPORT, sent)
    assert (reply.status, reply.json["id"], reply.json["tokens"]) == (200, agent, 604), reply.body
    assert reply.json["blocks"] == {"pool": 0, "memory": 3, "disk": 0, "remote": 0, "missing": 0}
    assert server.ask("GET", path).json["tokens"] == 604
    assert members(server.ask("GET", f"{path}/export").body)[CONTAINER] == members(sent)[CONTAINER]


def test_an_encoded_slash_is_part_of_a_name(server: RunningServer, served: AgentsWorld) -> None:
    served.turn("ada/export", 20)
    assert server.ask("GET", "/v1/agents/ada%2Fexport").json["id"] == "ada/export"


def test_what_tar_makes_of_the_two_files_is_read(server: RunningServer, archive: bytes) -> None:
    for name, form in (("a", tarfile.USTAR_FORMAT), ("b", tarfile.GNU_FORMAT)):
        made = tar(members(archive), form=form, mtime=1_700_000_000, uname="ada", mode=0o644)
        assert len(made) % 10_240 == 0
        assert server.ask("POST", f"{IMPORT}?name={name}", made).status == 200


def test_an_export_says_how_long_it_is(server: RunningServer, served: AgentsWorld) -> None:
    served.turn("ada", 600)
    reply = server.ask("GET", "/v1/agents/ada/export")
    assert int(reply.headers["content-length"]) == len(reply.body)
    assert reply.headers["content-type"] == "application/x-tar"
    assert error(server.ask("GET", "/v1/agents/eve/export"))[0] == 404


def test_an_agent_is_exported_as_its_last_turn_left_it_while_it_decodes(
    server: RunningServer, served: AgentsWorld
) -> None:
    served.turn("ada", 600)
    before = members(server.ask("GET", "/v1/agents/ada/export").body)
    served.submit("ada", 900)
    for _ in range(3):
        served.engine.step_once()
    assert served.engine.requests
    assert members(server.ask("GET", "/v1/agents/ada/export").body) == before


def test_an_archive_names_the_model_and_not_its_folder(
    server: RunningServer, served: AgentsWorld, archive: bytes
) -> None:
    served.turn("eve", 600)
    (saved,) = saved_agents(served.store)
    assert served.store.agents.save(replace(saved, model=MODEL))
    sent = members(server.ask("GET", "/v1/agents/eve/export").body)
    assert read_document(sent[DOCUMENT]).model == "tiny"
    assert b"folders" not in sent[DOCUMENT]
    assert server.ask("POST", IMPORT, archive).status == 200
    assert {one.model for one in saved_agents(served.store)} == {MODEL}


def test_an_import_reuses_what_it_brought_and_gives_it_to_no_other(
    server: RunningServer, served: AgentsWorld, archive: bytes
) -> None:
    assert server.ask("POST", IMPORT, archive).status == 200
    served.turn("eve", 600)
    served.turn("ada", 600)
    shares = {
        one: server.ask("GET", f"/v1/agents/{one}").json["last_turn"] for one in ("eve", "ada")
    }
    cached = {one: found["cached_tokens"] for one, found in shares.items()}  # type: ignore[index]
    assert cached == {"eve": 0, "ada": 599}


# What is refused


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda _: b"", f"the archive ends inside {CONTAINER}"),
        (lambda _: b"x" * 1024, f"cannot read the tar header of {DOCUMENT}: invalid header"),
        (lambda _: bytes(1024), f"cannot read the tar header of {DOCUMENT}: end of file header"),
        (lambda data: data[:-2000], f"the archive ends inside {CONTAINER}"),
        (lambda data: data + b"x", "the archive's size must be a multiple of 512 bytes"),
        (lambda data: data + b"x" * 512, f"expected the end of the archive after {CONTAINER}"),
        (lambda data: data + bytes(2 << 20), f"expected the end of the archive after {CONTAINER}"),
        (lambda data: data[:700] + b"#" + data[701:], f"{DOCUMENT}: the checksum does not match"),
        (
            lambda data: data[:-3000] + b"#" + data[-2999:],
            "is damaged: its checksum does not match",
        ),
        (
            lambda data: tar(dict(reversed(members(data).items()))),
            f"the archive must hold the files {DOCUMENT}",
        ),
        (
            lambda data: tar({"../x": b"", **members(data)}),
            f"the archive must hold the files {DOCUMENT}",
        ),
        (
            lambda data: tar(members(data), type=tarfile.SYMTYPE),
            f"the archive must hold the files {DOCUMENT}",
        ),
        (
            lambda data: tar(members(data), type=tarfile.GNUTYPE_SPARSE),
            "the archive must hold the files",
        ),
        (
            lambda data: tar(members(data), form=tarfile.PAX_FORMAT, mtime=0.5),
            "the archive must hold the files",
        ),
        (lambda data: tar({**members(data), CONTAINER: b""}), f"{CONTAINER}: expected "),
        (negative, f"the size of {DOCUMENT} must be 0 or more, got -1"),
        (lambda data: claimed(17 << 20) + data[512:], f"{DOCUMENT} has more than 16777216 bytes"),
        (lambda data: altered(data, namespace=bytes(32)), "this agent belongs to another model ('"),
        (lambda data: altered(data, layout="x"), "body 000000.full does not have the layout"),
        (lambda data: altered(data, agent_id="a\nb"), "agent name must have 1 to 256 printable"),
    ],
)
def test_anything_else_is_refused_and_leaves_nothing(
    server: RunningServer,
    served: AgentsWorld,
    archive: bytes,
    spoil: Callable[[bytes], bytes],
    message: str,
) -> None:
    status, found = error(server.ask("POST", IMPORT, spoil(archive)))
    assert (status, message in found) == (400, True), found
    assert n_blocks(served) == 0
    assert server.ask("POST", IMPORT, archive).status == 200


def test_bodies_that_are_not_of_the_models_size_are_refused(
    server: RunningServer, archive: bytes
) -> None:
    document = read_document(members(archive)[DOCUMENT])
    tokens = len(document.token_ids)
    sizes = {0: 256, 1: 256, 2: tokens - 512}
    bodies = tuple(replace(one, n_bytes=sizes[one.block]) for one in document.bodies)
    refused = server.ask("POST", IMPORT, altered(archive, bodies=bodies))
    assert error(refused) == (400, "body 000000.full does not have the layout of the model")


def test_a_name_is_taken_by_what_is_saved_and_by_what_runs(
    server: RunningServer, served: AgentsWorld, archive: bytes
) -> None:
    taken = "agent 'ada' already exists: choose another name with name= in the query"
    served.submit("ada", 300)
    assert error(server.ask("POST", IMPORT, archive)) == (400, taken)
    served.world.finish()
    assert error(server.ask("POST", IMPORT, archive)) == (400, taken)
    assert error(server.ask("POST", f"{IMPORT}?name=", archive))[0] == 400
    assert server.ask("POST", f"{IMPORT}?name=a/b", archive).json["id"] == "a/b"


def test_a_store_that_is_too_small_takes_nothing(archive: bytes) -> None:
    needed = len(members(archive)[CONTAINER])
    small = AgentsWorld(MemoryStore(needed // 2))
    for server in serve(small, ServerSettings()):
        status, message = error(server.ask("POST", IMPORT, archive))
        assert (status, "the quota of the store" in message) == (400, True)
        assert n_blocks(small) == 0


class Full(MemoryStore):
    """Takes one block and refuses the next, as a quota does that is taken by pins."""

    n_put = 0

    def put(self, block: StoredBlock) -> bool:
        self.n_put += 1
        return self.n_put != 2 and super().put(block)


def test_a_store_that_takes_a_part_has_nothing_after(archive: bytes) -> None:
    full = AgentsWorld(Full(1 << 20))
    for server in serve(full, ServerSettings()):
        reply = server.ask("POST", IMPORT, archive)
        assert (reply.status, n_blocks(full)) == (503, 0)
        assert reply.headers["retry-after"]
        assert server.ask("GET", "/v1/agents").json["data"] == []
        assert server.ask("POST", IMPORT, archive).status == 200


class Meanwhile(MemoryStore):
    """Something happens while the first block is put."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__(64 << 20)
        self._happens = [happens]

    def put(self, block: StoredBlock) -> bool:
        while self._happens:
            self._happens.pop()()
        return super().put(block)


def test_nothing_is_stored_before_all_is_checked(archive: bytes) -> None:
    stored: list[str] = []
    world = AgentsWorld(Meanwhile(lambda: stored.append("a block")))
    damaged = archive[:-3000] + b"#" + archive[-2999:]
    for server in serve(world, ServerSettings()):
        assert server.ask("POST", IMPORT, damaged).status == 400
        assert stored == []
        assert server.ask("POST", IMPORT, archive).status == 200
        assert stored == ["a block"]


def test_an_import_never_takes_the_place_of_an_agent_that_came_meanwhile(archive: bytes) -> None:
    world = AgentsWorld(Meanwhile(lambda: world.turn("ada", 20)))
    for server in serve(world, ServerSettings()):
        assert error(server.ask("POST", IMPORT, archive))[0] == 400
        assert server.ask("GET", "/v1/agents/ada").json["tokens"] == 24
        assert n_blocks(world) == 1


def test_a_server_that_stops_takes_back_what_it_has_put(archive: bytes) -> None:
    world = AgentsWorld(Meanwhile(lambda: setattr(world.transfers, "_is_closed", True)))
    for server in serve(world, ServerSettings()):
        assert error(server.ask("POST", IMPORT, archive)) == (
            503,
            "the server is stopping: retry later",
        )
        assert (n_blocks(world), saved_agents(world.store)) == (0, [])


def test_a_block_that_is_evicted_while_it_is_sent_breaks_the_export_off(archive: bytes) -> None:
    class Forgetful(MemoryStore):
        """Has every body once."""

        def __init__(self) -> None:
            super().__init__(1 << 20)
            self.seen: set[BlockKey] = set()

        def read(self, header: BlockHeader) -> bytes | None:
            again = header.key in self.seen
            self.seen.add(header.key)
            return None if again and header.link.start else super().read(header)

    forgetful = AgentsWorld(Forgetful())
    forgetful.turn("ada", 600)
    for server in serve(forgetful, ServerSettings()):
        with server.connect() as raw:
            raw.sendall(b"GET /v1/agents/ada/export HTTP/1.1\r\nhost: localhost\r\n\r\n")
            received = b"".join(iter(lambda: raw.recv(1 << 20), b""))
        head, _, body = received.partition(b"\r\n\r\n")
        assert b"200 OK" in head
        assert f"content-length: {len(archive)}".encode() in head
        assert 0 < len(body) < len(archive)
        gone = server.ask("GET", "/v1/agents/ada/export").body  # of blocks that are read again
        assert {one.block for one in read_document(members(gone)[DOCUMENT]).bodies} == {0}


# At once, and half


def half_an_import(server: RunningServer, archive: bytes) -> Any:
    """A connection on which half of an archive has been sent."""
    raw = server.connect()
    head = f"POST {IMPORT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(archive)}\r\n\r\n"
    raw.sendall(head.encode() + archive[: len(archive) // 2])
    return raw


def test_of_two_imports_at_once_one_comes_later(
    server: RunningServer, served: AgentsWorld, archive: bytes
) -> None:
    with half_an_import(server, archive) as first:
        until(lambda: served.transfers._is_importing)
        second = server.ask("POST", IMPORT, archive)
        assert error(second) == (503, "an import is already running: retry later")
        assert second.headers["retry-after"]
        first.sendall(archive[len(archive) // 2 :])
        assert b"200 OK" in first.recv(1000)
    assert error(server.ask("POST", IMPORT, archive))[0] == 400
    assert n_blocks(served) == 3


def test_a_client_that_leaves_in_the_middle_leaves_nothing(
    server: RunningServer, served: AgentsWorld, archive: bytes
) -> None:
    with half_an_import(server, archive):
        until(lambda: served.transfers._is_importing)
    until(lambda: not served.transfers._is_importing)
    assert n_blocks(served) == 0
    assert server.ask("POST", IMPORT, archive).status == 200


def test_a_client_that_leaves_an_export_gives_its_place_back(
    server: RunningServer, served: AgentsWorld
) -> None:
    served.turn("ada", 600)
    for _ in range(5):  # more than there may be at once
        with server.connect() as raw:
            raw.sendall(b"GET /v1/agents/ada/export HTTP/1.1\r\nhost: localhost\r\n\r\n")
            raw.recv(1)
    until(lambda: not served.transfers._n_exports)
    served.transfers._n_exports = 4
    assert error(server.ask("GET", "/v1/agents/ada/export"))[0] == 503


def test_an_upload_that_stands_still_ends(served: AgentsWorld, archive: bytes) -> None:
    for server in serve(served, ServerSettings(body_timeout=0.5)):
        with half_an_import(server, archive) as raw:
            reply = b"".join(iter(lambda: raw.recv(1 << 16), b""))
        assert b"408 Request Timeout" in reply
        assert b"1048576 bytes of the body did not arrive within 0.5 seconds" in reply
        until(lambda: not served.transfers._is_importing)


def test_only_this_one_request_may_be_large(server: RunningServer) -> None:
    large = bytes(2 * KIB)
    assert server.ask("POST", IMPORT, large).status == 400
    for method, path in (
        ("PUT", IMPORT),
        ("POST", f"{IMPORT}/fork"),
        ("POST", "/v1/agents/x/import"),
        ("POST", "/v1/chat/completions"),
    ):
        assert server.ask(method, path, large).status == 413


# Tenants and operators

KEYS = "key-of-a" * 4, "key-of-b" * 4, "key-of-an-operator"
OPERATOR = KEYS[2]


def of(served: AgentsWorld, key: str) -> str:
    return tenant_id(served.store.secret, tenant_tag(served.store.secret, tenant_name(key)))


@pytest.fixture
def keyed() -> Iterator[tuple[AgentsWorld, Callable[..., Reply]]]:
    store = MemoryStore(64 << 20)
    names = [tenant_name(key) for key in KEYS[:2]]
    ids = {TenantId(tenant_id(store.secret, tenant_tag(store.secret, one))): one for one in names}
    world = AgentsWorld(store, tenants=ids)
    a, b, operator = map(SecretStr, KEYS)
    settings = ServerSettings(api_keys=(a, b), operator_keys=(operator,))
    for server in serve(world, settings):

        def ask(key: str, method: str, path: str, body: object = None, at: Any = server) -> Reply:
            found = at.ask(method, path, body, headers={"x-api-key": key})
            assert isinstance(found, Reply)
            return found

        yield world, ask


def test_an_operator_moves_an_agent_to_a_tenant_that_has_none_yet(
    keyed: tuple[AgentsWorld, Callable[..., Reply]],
) -> None:
    world, ask = keyed
    world.turn("ada", 600, tenant=tenant_name(KEYS[0]))
    a, b = (of(world, key) for key in KEYS[:2])
    sent = ask(OPERATOR, "GET", f"/v1/agents/ada/export?tenant={a}").body
    reply = ask(OPERATOR, "POST", f"{IMPORT}?tenant={b}", sent)
    assert (reply.status, reply.json["id"], reply.json["tenant"]) == (200, "ada", b)
    assert ask(KEYS[1], "GET", "/v1/agents/ada").json["tokens"] == 604
    assert ask(OPERATOR, "GET", f"/v1/agents/ada/export?tenant={b}").status == 200
    world.turn("ada", 600, tenant=tenant_name(KEYS[1]))
    assert ask(KEYS[1], "GET", "/v1/agents/ada").json["last_turn"]["cached_tokens"] == 599  # type: ignore[index]


def test_no_tenants_key_moves_agents(
    keyed: tuple[AgentsWorld, Callable[..., Reply]], archive: bytes
) -> None:
    world, ask = keyed
    world.turn("ada", 20, tenant=tenant_name(KEYS[0]))
    own = of(world, KEYS[0])
    refused = (403, "exports and imports: expected an operator's key, see --operator-key")
    for query in ("", f"?tenant={own}"):
        assert error(ask(KEYS[0], "GET", f"/v1/agents/ada/export{query}")) == refused
        assert error(ask(KEYS[0], "POST", f"{IMPORT}{query}", archive)) == refused
        assert error(ask("no key", "POST", f"{IMPORT}{query}", archive))[0] == 401


@pytest.mark.parametrize("tenant", ["local", "public", "0123456789abcdef", ""])
def test_an_import_is_for_a_tenant_with_a_key(
    keyed: tuple[AgentsWorld, Callable[..., Reply]], archive: bytes, tenant: str
) -> None:
    world, ask = keyed
    world.turn("x", 20, tenant="")  # of a time without keys
    world.turn("x", 20, tenant="public")
    n_before = n_blocks(world)
    refused = error(ask(OPERATOR, "POST", f"{IMPORT}?tenant={tenant}", archive))
    assert refused == (
        404,
        (
            f"there is no tenant {tenant!r} with a key: the server logs all tenants "
            "with keys when it starts"
        ),
    )
    assert n_blocks(world) == n_before
    assert error(ask(OPERATOR, "POST", IMPORT, archive))[0] == 400


def test_without_keys_no_tenant_is_named(server: RunningServer, archive: bytes) -> None:
    assert server.ask("POST", f"{IMPORT}?tenant=local", archive).status == 403
    assert server.ask("GET", "/v1/agents/ada/export?tenant=local").status == 403


def test_the_description_has_both(server: RunningServer) -> None:
    paths: Any = server.ask("GET", "/openapi.json").json["paths"]
    body = paths[IMPORT]["post"]["requestBody"]["content"]
    sent = paths["/v1/agents/{agent_id}/export"]["get"]["responses"]["200"]["content"]
    assert (list(body), list(sent)) == (["application/octet-stream"], ["application/x-tar"])
