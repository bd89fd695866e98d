"""Requests that are not kept, over HTTP and with a store on disk: nothing of them is there after.

The answers are those of requests that are kept, and these find nothing of them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.http_server import RunningServer, until
from tests.support.model_folder import small_model
from tests.support.served_store import served

pytestmark = pytest.mark.process

Json = dict[str, object]

LONG = " ".join(f"Rule {i} is that {i} plus {i} is {2 * i}." for i in range(40))
ADA = {"x-agent-id": "ada"}
UNKEPT: Json = {"semantic": {"keep": False}}
TOOL: Json = {"type": "function", "name": "Look", "parameters": {"type": "object"}}
CHAT: Json = {"messages": [{"role": "user", "content": f"Chat. {LONG}"}], "max_tokens": 6}
WIRES: Mapping[str, Json] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": f"Completion. {LONG}", "max_tokens": 6},
    "/v1/responses": {"input": f"Response. {LONG}", "max_output_tokens": 6, "tools": [TOOL]},
    "/v1/messages": {
        "messages": [{"role": "user", "content": f"Message. {LONG}"}],
        "max_tokens": 6,
    },
    "/api/chat": {
        "messages": [{"role": "user", "content": f"Ollama. {LONG}"}],
        "options": {"num_predict": 6, "temperature": 0},
        "stream": False,
    },
}


def ask(
    server: RunningServer, path: str, body: Json, headers: Mapping[str, str] | None = None
) -> Json:
    greedy = {} if "options" in body else {"temperature": 0}
    whole = {"model": "default", **greedy, **body}
    reply = server.ask("POST", path, whole, dict(headers or {}))
    assert reply.status == 200, reply.body
    return reply.json


def answered(reply: Json) -> object:
    """What the model said, without ids."""
    names = ("choices", "content", "output", "message")
    said = next(reply[name] for name in names if name in reply)
    text = json.dumps(said, sort_keys=True)
    for item in said if isinstance(said, list) else ():
        if isinstance(item, dict) and "id" in item:
            text = text.replace(str(item["id"]), "")
    return text


def cached(reply: Json) -> tuple[int, int]:
    """Tokens that were read from the cache, and those that were written to it."""
    usage = reply.get("usage", reply.get("semantic"))
    assert isinstance(usage, dict)
    if "cache_read_input_tokens" in usage:
        return usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    details = (usage.get(name) for name in ("prompt_tokens_details", "input_tokens_details"))
    found = next(filter(None, details), usage)
    return found["cached_tokens"], found["cache_write_tokens"]


def agents(server: RunningServer) -> Json:
    return server.ask("GET", "/v1/agents").json


def on_disk(folder: Path) -> tuple[set[str], Json]:
    """The files of a store that is closed, and the rows of its databases."""
    store = folder / "store"
    files = {str(one.relative_to(store)) for one in store.rglob("*") if one.is_file()}
    rows: Json = {}
    for name in sorted(one for one in files if one.endswith(".db")):
        with sqlite3.connect(store / name) as database:
            tables = database.execute("select name from sqlite_master where type = 'table'")
            for (table,) in tables.fetchall():
                rows[f"{name}: {table}"] = database.execute(
                    f"select count(*) from {table}"
                ).fetchall()
    return files, rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "small")


def test_nothing_of_them_is_there_after_and_their_answers_are_the_same(
    tmp_path: Path, model: Path
) -> None:
    with served(tmp_path, model) as server:
        ask(server, "/v1/chat/completions", CHAT, ADA)
        ask(server, "/v1/responses", {"input": "Hello", "max_output_tokens": 2})
    before = on_disk(tmp_path)
    with served(tmp_path, model) as server:
        listed = agents(server)
        unkept = {path: ask(server, path, body | UNKEPT) for path, body in WIRES.items()}
        more = [*CHAT["messages"], {"role": "user", "content": "Go on."}]  # type: ignore[misc]
        asked = CHAT | {"messages": more} | {"n": 2}
        again = ask(server, "/v1/chat/completions", asked, ADA | {"x-semantic-keep": "false"})
        assert cached(again)[0] > 256  # its agent's cache is read
        assert cached(again)[1] == 0
        response = unkept["/v1/responses"]
        assert response["store"] is False
        assert server.ask("GET", f"/v1/responses/{response['id']}").status == 404
        assert agents(server) == listed
        assert server.ask("GET", "/v1/requests").json["data"] == []
    assert on_disk(tmp_path) == before
    with served(tmp_path, model) as server:
        for path, body in WIRES.items():
            kept = ask(server, path, body)
            assert answered(kept) == answered(unkept[path])
            if path != "/v1/chat/completions":  # which ada has asked
                assert cached(kept)[0] == 0
                assert cached(unkept[path]) == (0, 0)
    assert on_disk(tmp_path) != before


def test_two_at_once_of_which_one_is_kept(tmp_path: Path, model: Path) -> None:
    path, body = "/v1/completions", WIRES["/v1/completions"] | {"max_tokens": 30}
    with served(tmp_path, model) as server:
        with ThreadPoolExecutor(4) as threads:
            kept = [threads.submit(ask, server, path, body, {"x-agent-id": f"{i}"}) for i in (1, 2)]
            unkept = [threads.submit(ask, server, path, body | UNKEPT) for _ in range(2)]
            assert all(answered(one.result(60)) for one in (*kept, *unkept))
        listed = agents(server)["data"]
        assert isinstance(listed, list)
        assert {one["id"] for one in listed} == {"1", "2"}


def test_one_whose_client_disconnects_leaves_nothing(tmp_path: Path, model: Path) -> None:
    with served(tmp_path, model) as server:
        asked: Json = {"model": "default", "prompt": LONG, "ignore_eos": True, "stream": True}
        body = json.dumps(asked | UNKEPT | {"max_tokens": 5000}).encode()
        with server.connect() as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Agent-ID: gone\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert b"200" in client.recv(64)
            running = server.ask("GET", "/v1/requests").json["data"]
            assert isinstance(running, list)
            assert [one["agent"] for one in running] == ["gone"]
            assert agents(server)["data"] == []
            store = tmp_path / "store"
            assert not [*store.glob("blocks/*/*"), *store.glob("agents/*/*")]
        until(lambda: server.ask("GET", "/v1/requests").json["data"] == [])
        assert agents(server)["data"] == []
    files, _ = on_disk(tmp_path)
    assert not [one for one in files if one.startswith(("blocks", "agents", "tmp"))]


@pytest.mark.parametrize("path", WIRES)
@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"semantic": {"keep": "no"}}, {}, "semantic.keep"),
        ({"semantic": {"keep": 0}}, {}, "semantic.keep"),
        ({"semantic": {"kept": False}}, {}, "semantic.kept"),
        ({"semantic": False}, {}, "semantic"),
        ({}, {"x-semantic-keep": "no"}, "X-Semantic-Keep"),
    ],
)
def test_a_wrong_value_is_named(
    wires: RunningServer, path: str, fields: Json, headers: dict[str, str], param: str
) -> None:
    reply = wires.ask("POST", path, {"model": "default", **WIRES[path], **fields}, headers)
    assert reply.status == 400
    error = reply.json["error"]
    message = error["message"] if isinstance(error, dict) else error
    assert str(message).startswith(f"{param}: ")


def test_a_response_that_is_not_kept_is_not_stored(wires: RunningServer) -> None:
    body = {"model": "default", **WIRES["/v1/responses"], **UNKEPT, "store": True}
    reply = wires.ask("POST", "/v1/responses", body)
    assert reply.status == 400
    assert b"store must be false" in reply.body


@pytest.fixture(scope="module")
def wires(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningServer]:
    with served(tmp_path_factory.mktemp("wires"), model) as server:
        yield server
