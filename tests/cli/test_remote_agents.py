"""`semantic agents export` and `import` with --server: an agent of a running server as one file."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from semantic.adapters.stores.memory import MemoryStore
from semantic.cli.main import app
from semantic.domain.block_hash import tenant_id, tenant_tag
from semantic.ports.agents import TenantId
from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext
from semantic_server.http.identity import tenant_name
from semantic_server.http.settings import ServerSettings
from tests.cli.support import Ran, command_line, environment, semantic
from tests.support.fake_serving import FakeServing
from tests.support.http_server import RunningServer, running
from tests.support.model_server import several
from tests.support.served_agents import AgentsWorld

pytestmark = pytest.mark.process

KEY, OPERATOR = "the key of a", "the key of the operator"


@contextmanager
def served(world: AgentsWorld, settings: ServerSettings | None = None) -> Iterator[RunningServer]:
    context = ServerContext(FakeServing(), agents=world.agents)
    with running(settings=settings, app=create_app(settings=settings, context=context)) as server:
        yield server


@pytest.fixture
def here() -> Iterator[RunningServer]:
    """A server with the agent "ada" of three blocks."""
    world = AgentsWorld()
    world.turn("ada", 600)
    with served(world) as server:
        yield server


@pytest.fixture
def there() -> Iterator[RunningServer]:
    with served(AgentsWorld(), ServerSettings(max_body_mb=0.001)) as server:
        yield server


def agents(command: str, server: RunningServer, *arguments: str) -> Ran:
    return semantic("agents", command, "--server", server.url, *arguments)


def tokens(server: RunningServer, agent: str) -> object:
    return server.ask("GET", f"/v1/agents/{agent}").json.get("tokens")


def left(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


# There and back


def test_an_agent_moves_in_a_file(
    here: RunningServer, there: RunningServer, tmp_path: Path
) -> None:
    file = tmp_path / "ada.tar"
    ran = agents("export", here, "ada", str(file))
    assert (ran.code, ran.out.startswith("ada: "), ran.err) == (0, True, "")
    assert file.read_bytes() == here.ask("GET", "/v1/agents/ada/export").body
    assert file.stat().st_mode & 0o777 == 0o600
    ran = agents("import", there, str(file))
    assert (ran.code, ran.out.startswith("ada: 604 tokens, ")) == (0, True), ran.err
    read = json.loads(agents("import", there, str(file), "--as", "a/b c", "--json").out)
    assert read == {"name": "a/b c", "tokens": 604, "bytes": file.stat().st_size}
    assert tokens(there, "a%2Fb%20c") == 604
    written = agents("export", there, "a/b c", str(tmp_path / "again"), "--json")
    assert json.loads(written.out)["files"] == [str(tmp_path / "again")]


def test_an_archive_goes_to_a_pipe(here: RunningServer) -> None:
    command = ("agents", "export", "--server", here.url, "ada", "-")
    ran = CliRunner().invoke(app, command, prog_name="semantic")
    assert ran.stdout_bytes == here.ask("GET", "/v1/agents/ada/export").body
    assert ran.stderr.startswith("ada: ")


def test_an_operators_key_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, name = MemoryStore(64 << 20), tenant_name(KEY)
    tenant = tenant_id(store.secret, tenant_tag(store.secret, name))
    world = AgentsWorld(store, tenants={TenantId(tenant): name})
    world.turn("ada", 600, tenant=name)
    keyed = ServerSettings(api_keys=(SecretStr(KEY),), operator_keys=(SecretStr(OPERATOR),))
    with served(world, keyed) as server:
        where = ("ada", str(tmp_path / "x"), "--tenant", tenant)
        ran = agents("export", server, *where)
        assert (ran.code, "requires an API key" in ran.err) == (4, True)
        monkeypatch.setenv("SEMANTIC_API_KEY", KEY)
        ran = agents("export", server, *where)
        assert (ran.code, "refuses the export: " in ran.err) == (4, True)
        monkeypatch.setenv("OTHER", OPERATOR)
        assert agents("export", server, *where, "--key-variable", "OTHER").code == 0
        back = (str(tmp_path / "x"), "--as", "eve", "--key-variable", "OTHER")
        ran = agents("import", server, *back)
        assert (ran.code, "tenant must be the id" in ran.err) == (2, True)
        assert agents("import", server, *back, "--tenant", tenant).code == 0


def test_of_several_models_the_one_that_is_named(tmp_path: Path) -> None:
    world, file = AgentsWorld(), str(tmp_path / "ada.tar")
    world.turn("ada", 600)
    with several() as one:
        one.loader.agents["llama"] = world.agents
        for refused in (("export", "ada", file), ("import", __file__)):
            ran = agents(refused[0], one.server, *refused[1:])
            assert (ran.code, len(ran.error_lines)) == (2, 1)
            assert (
                "expected the agent's model in --model, or in model= of the query: one of org"
                in ran.err
            )
        assert (left(tmp_path), one.loader.loads.total()) == ([], 0)
        ran = agents("export", one.server, "ada", file, "--model", "lama")
        assert (ran.code, "did you mean llama?" in ran.err) == (2, True)
        assert agents("export", one.server, "ada", file, "--model", "llama").code == 0
        taken = agents("import", one.server, file, "--as", "eve", "--model", "llama", "--json")
        assert json.loads(taken.out)["tokens"] == 604
        assert one.ask("GET", "/v1/agents/eve?model=llama").json["tokens"] == 604
        assert one.loader.loads == {"llama": 1}


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eve", "FILE"), "refuses the export: "),
        (("ada", "TAKEN"), "taken exists already; choose another name"),
        (("ada", "missing/x"), "cannot write missing/x: No such file or directory"),
        (("ada", "FILE", "--store", "x"), "expected either --server, or --store"),
        (("ada", "FILE", "--model-id", "ab"), "expected either --server, or --store"),
        (("ada", "-", "--json"), "expected a file: - requires --server and excludes --json"),
    ],
)
def test_an_export_that_is_refused_leaves_no_file(
    here: RunningServer, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "taken").write_text("mine")
    paths = {"FILE": str(tmp_path / "x"), "TAKEN": str(tmp_path / "taken")}
    ran = agents("export", here, *(paths.get(one, one) for one in arguments))
    assert (ran.code, len(ran.error_lines), message in ran.err) == (2, 1, True), ran.err
    assert (left(tmp_path), (tmp_path / "taken").read_text()) == (["taken"], "mine")


def test_an_import_that_is_refused_says_why_and_leaves_nothing(
    here: RunningServer, there: RunningServer, tmp_path: Path
) -> None:
    file = tmp_path / "ada.tar"
    assert agents("export", here, "ada", str(file)).code == 0
    whole = file.read_bytes()
    for spoilt, message in (
        (whole[:-3000] + b"#" + whole[-2999:], "is damaged: its checksum does not match"),
        (whole[:-2000], "the archive ends inside"),
        (bytes(8 << 20), "cannot read the tar header of agent.json"),  # refused before it is sent
    ):
        file.write_bytes(spoilt)
        ran = agents("import", there, str(file))
        assert (ran.code, message in ran.err) == (2, True), ran.err
        assert tokens(there, "ada") is None
    assert "cannot read" in agents("import", there, str(tmp_path / "missing")).err
    ran = semantic("agents", "import", str(file), "--tenant", "x")
    assert (ran.code, ran.err) == (2, "error: --tenant requires --server\n")


def test_what_is_no_server_of_ours_is_named(tmp_path: Path) -> None:
    command = ("agents", "export", "ada", str(tmp_path / "x"), "--server")
    ran = semantic(*command, "http://127.0.0.1:1")
    assert (ran.code, "cannot reach http://127.0.0.1:1" in ran.err) == (4, True)
    assert (semantic(*command, "not an address").code, left(tmp_path)) == (2, [])
    with half_a_server(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}") as (url, _):
        ran = semantic(*command, url)
    assert (ran.code, "is not a semantic server" in ran.err, left(tmp_path)) == (4, True, [])


# Interrupted

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-tar\r\ncontent-length: 2000\r\n\r\n"
HALF = HEAD + bytes(1000)


@contextmanager
def half_a_server(response: bytes, *, ends: bool = True) -> Iterator[tuple[str, threading.Event]]:
    """The address of what answers one request so and then ends or waits for the client to leave;
    an event that it has answered."""
    answered = threading.Event()

    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(response)
            answered.set()
            with suppress(ConnectionResetError):
                while not ends and connection.recv(1):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", answered
        thread.join()


def test_an_export_that_breaks_off_leaves_no_file(tmp_path: Path) -> None:
    with half_a_server(HALF) as (url, _):
        ran = semantic("agents", "export", "ada", str(tmp_path / "x"), "--server", url)
    assert (ran.code, "archive off after 1000 of 2000 bytes" in ran.err) == (4, True), ran.err
    assert left(tmp_path) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_export_that_is_ended_leaves_no_file(tmp_path: Path, how: signal.Signals) -> None:
    if sys.platform != "linux" and how is not signal.SIGINT:
        pytest.skip("elsewhere a file has its name from the beginning")
    with half_a_server(HALF, ends=False) as (url, answered):
        command = command_line("agents", "export", "ada", str(tmp_path / "x"), "--server", url)
        with subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL) as process:
            assert answered.wait(60)
            process.send_signal(how)
            assert process.wait() in {130, -how}
    assert left(tmp_path) == []


def test_a_model_is_one_of_a_server(tmp_path: Path) -> None:
    ran = semantic("agents", "export", "ada", str(tmp_path / "x"), "--model", "llama")
    assert (ran.code, "--model requires --server" in ran.err) == (2, True)
