"""`semantic mcp`: the client of the official package calls the tools of the real command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from mcp import Client, StdioServerParameters, stdio_client
from mcp.types import TextContent

from tests.cli.support import imported, process, semantic
from tests.support.http_server import Address
from tests.support.serve_process import OURS, ServeProcess, served

pytestmark = pytest.mark.process

KEY = "key-of-a" * 4
WORDS = " ".join(f"word {i}" for i in range(120))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    with served(tmp_path_factory.mktemp("store"), environment=os.environ | OURS) as found:
        yield found


class Tools:
    """A session with the command. A call returns the tool's reply, or the text of its error."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def __call__(self, name: str, /, **arguments: object) -> SimpleNamespace:
        text, is_error = await self._call(name, arguments)
        assert not is_error, text
        found: SimpleNamespace = json.loads(text, object_hook=lambda one: SimpleNamespace(**one))
        return found

    async def refused(self, name: str, /, **arguments: object) -> str:
        text, is_error = await self._call(name, arguments)
        assert is_error, text
        return text

    async def _call(self, name: str, arguments: dict[str, object]) -> tuple[str, bool]:
        done = await self.client.call_tool(name, arguments)
        (one,) = done.content
        assert isinstance(one, TextContent)
        return one.text, bool(done.is_error)


@asynccontextmanager
async def tools(
    url: str, log: Path, *flags: str, mode: str = "auto", **variables: str
) -> AsyncIterator[Tools]:
    """A session with `semantic mcp`, which prints nothing beside the protocol."""
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "semantic", "mcp", "--url", url, *flags],
        env={**OURS, **variables},
    )
    with log.open("w+", encoding="utf-8") as errors:
        async with Client(stdio_client(command, errors), mode=mode) as client:
            yield Tools(client)
        errors.seek(0)
        assert errors.read() == ""


def address(url: str) -> Address:
    return Address(int(url.rpartition(":")[2]))


def ask(url: str, agent: str, *said: str, key: str | None = None) -> tuple[str, int]:
    """The answer to a conversation's texts, the user's first, and its cached tokens."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    body = {"model": "default", "agent_id": agent, "messages": messages, "max_tokens": 8}
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    reply = address(url).ask("POST", "/v1/chat/completions", body, headers)
    assert reply.status == 200, reply.body
    found = json.loads(reply.body)
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"]["content"], cached


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_five_tools_explain_themselves(server: ServeProcess, tmp_path: Path, mode: str) -> None:
    async def session() -> None:
        async with tools(server.url, tmp_path / "log", mode=mode) as call:
            found = {one.name: one for one in (await call.client.list_tools()).tools}
        assert list(found) == ["list", "checkpoint", "fork", "why", "forget"]
        assert all(len(one.description or "") > 40 for one in found.values())
        assert "X-Agent-ID" in str(found["fork"].description)
        fields = found["fork"].input_schema["properties"]
        assert list(fields) == ["agent", "new_names", "checkpoint", "turn"]
        assert fields["new_names"]["type"] == "array"
        assert all(one["description"] for one in fields.values())
        assert found["fork"].input_schema["required"] == ["agent", "new_names"]

    anyio.run(session)


def test_two_forks_begin_with_a_checkpoint(server: ServeProcess, tmp_path: Path) -> None:
    async def session() -> None:
        async with tools(server.url, tmp_path / "log") as call:
            first = f"{WORDS}. First?"
            said, _ = ask(server.url, "ann/1?", first)
            saved = await call("checkpoint", agent="ann/1?", name="plan")
            assert (saved.name, saved.turns) == ("plan", 1)
            ask(server.url, "ann/1?", first, said, "Second?")
            row = next(one for one in (await call("list")).agents if one.id == "ann/1?")
            assert (row.turns, hasattr(row, "blocks")) == (2, False)

            names = ["left", "right", "third"]
            plan = {"new_names": names[:2], "checkpoint": "plan"}
            forks = (await call("fork", agent="ann/1?", **plan)).agents
            forks += (await call("fork", agent="ann/1?", new_names=names[2:], turn=1)).agents
            assert [(one.id, one.tokens) for one in forks] == [
                (name, saved.tokens) for name in names
            ]
            early = await call("checkpoint", agent="ann/1?", name="early", turn=1)
            assert early.tokens == saved.tokens
            shown = await call("list", agent="ann/1?")
            assert [one.name for one in shown.checkpoints] == ["plan", "early"]
            assert [one.turn for one in shown.turns] == [1, 2]
            family = {one.id: one.depth for one in shown.family}
            assert family == {"ann/1?": 0, **dict.fromkeys(names, 1)}
            for name in names:
                assert ask(server.url, name, first, said, f"To the {name}?")[1] >= 256

            assert (await call("why", agent="left")).match.reused_tokens >= 256
            differs = await call("why", agent="left", other="right")
            assert saved.tokens <= differs.common_tokens < differs.tokens

            await call("forget", agent="ann/1?", checkpoint="plan")
            assert len((await call("list", agent="ann/1?")).checkpoints) == 1
            gone = await call("forget", agent="ann/1?", family=True)
            assert sorted(gone.descendants) == names
            assert "left" in await call.refused("why", agent="left")

    anyio.run(session)


def test_the_servers_errors_reach_the_model(server: ServeProcess, tmp_path: Path) -> None:
    ask(server.url, "bob", WORDS)
    own = SimpleNamespace(**address(server.url).ask("GET", "/v1/agents/not%20there/why").json)

    async def session() -> None:
        async with tools(server.url, tmp_path / "log") as call:
            assert own.error["message"] in await call.refused("why", agent="not there")
            both = await call.refused("forget", agent="bob", family=True, checkpoint="x")
            assert "expected either family or checkpoint" in both
            assert (await call("list", agent="bob")).family
            assert "new_names" in await call.refused("fork", agent="bob", new_names="left")
            assert "agent" in await call.refused("why")
        async with tools(server.url, tmp_path / "log", "--model", "other") as call:
            assert "'other'" in await call.refused("list")

    anyio.run(session)


def test_a_server_that_is_away_is_an_error_of_the_tool(tmp_path: Path) -> None:
    async def session() -> None:
        async with tools("http://127.0.0.1:1", tmp_path / "log") as call:
            said = await call.refused("list")
            assert "cannot reach http://127.0.0.1:1" in said
            assert "start one with `semantic serve`" in said

    anyio.run(session)


def test_a_key_stays_in_the_variable(tmp_path: Path) -> None:
    with served(tmp_path / "store", "--api-key", KEY, environment=os.environ | OURS) as server:
        ask(server.url, "ann", WORDS, key=KEY)

        async def session() -> None:
            async with tools(server.url, tmp_path / "log") as call:
                assert "SEMANTIC_API_KEY" in await call.refused("list")
            async with tools(server.url, tmp_path / "log", SEMANTIC_API_KEY=KEY) as call:
                assert "ann" in str(await call("list"))
                assert (await call("fork", agent="ann", new_names=["new"])).agents[
                    0
                ].parent == "ann"
                assert (await call("forget", agent="ann", family=True)).descendants == ["new"]

        anyio.run(session)


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "semantic_server.clients.agent_tools", raising=False)
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    ran = semantic("mcp")
    assert (ran.code, len(ran.error_lines)) == (4, 1)
    assert "install semantic-engine[mcp]" in ran.err


def test_the_command_ends_with_its_input_and_loads_no_model() -> None:
    ran = process("mcp")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    modules, _ = imported("mcp")
    assert [name for name in modules if name in {"mlx", "mlx.core", "fastapi"}] == []
