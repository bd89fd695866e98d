"""Several models behind HTTP: each wire finds the one that is named, and waits for its load."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
from pydantic import SecretStr

from semantic.domain.errors import (
    AgentNotFoundError,
    BackendError,
    ContextOverflowError,
    InvalidRequestError,
    ModelNotFoundError,
    OperatorError,
    SemanticError,
)
from semantic.ports.agents import EVERY_AGENT, AgentFilter, AgentPage, Tenant, TenantId
from semantic_server.http.logs import LOG_FIELDS
from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import FakeServing
from tests.support.http_server import Reply, running, until
from tests.support.model_server import KEY, OPERATOR, several
from tests.support.runnable_serving import NoAgents
from tests.support.served_agents import AgentsWorld

pytestmark = pytest.mark.process

Json = dict[str, object]

MESSAGES = [{"role": "user", "content": "hi"}]
WIRES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}


def test_all_models_are_listed_with_their_state() -> None:
    with several() as one:
        chat = {"model": "llama", "messages": MESSAGES}
        assert one.ask("POST", "/v1/chat/completions", chat).status == 200
        listed = one.ask("GET", "/v1/models").json["data"]
        assert isinstance(listed, list)
        found = {row["id"]: row["state"] for row in listed}
        assert found == {"org/qwen": "unloaded", "default": "unloaded", "llama": "loaded"}
        assert listed[-1]["memory_bytes"] == 1
        assert listed[-1]["running"] == listed[-1]["waiting"] == 0
        short = one.ask("GET", "/v1/models?limit=2").json
        assert (short["has_more"], short["last_id"]) == (True, "default")


def test_why_is_told_with_the_model_of_the_agent_and_loads_no_other() -> None:
    world = AgentsWorld()
    world.turn("ada", 40)
    world.turn("ada", 30, first=9)
    with several() as one:
        one.loader.agents["llama"] = world.agents
        found = one.ask("GET", "/v1/agents/ada/why?model=llama")
        assert (found.status, found.json["id"]) == (200, "ada")
        assert one.loader.loads == {"llama": 1}


class OfOneTenant(NoAgents):
    """Agents of one tenant: another one does not exist."""

    def __init__(self, tenant: str) -> None:
        self.tenant = TenantId(tenant)

    async def tenants(self) -> Sequence[TenantId]:
        return (self.tenant,)

    async def page(
        self, tenant: Tenant, limit: int, after: str | None = None, only: AgentFilter = EVERY_AGENT
    ) -> AgentPage:
        if tenant != self.tenant:
            raise AgentNotFoundError(f"there is no tenant {tenant}")
        return await super().page(tenant, limit, after, only)


def test_an_operator_lists_the_agents_of_a_model_that_a_tenant_has_none_of() -> None:
    settings = ServerSettings(api_keys=(SecretStr(KEY),), operator_keys=(SecretStr(OPERATOR),))
    with several(settings, capacity=2) as one:
        one.loader.agents |= {"llama": OfOneTenant("t1"), "org/qwen": OfOneTenant("t2")}
        for name in ("llama", "org/qwen"):
            assert one.ask("POST", f"/v1/models/{name}/load", key=OPERATOR).status == 200
        assert one.ask("GET", "/v1/agents?model=llama", key=OPERATOR).json["data"] == []
        assert one.ask("GET", "/v1/agents?tenant=t2&model=llama", key=OPERATOR).status == 200
        assert one.ask("GET", "/v1/agents?tenant=t3&model=llama", key=OPERATOR).status == 404


@pytest.mark.parametrize("path", WIRES)
def test_each_wire_reaches_the_model_that_is_named(path: str) -> None:
    with several() as one:
        for name, own in (("llama", "llama"), ("default", "org/qwen"), ("./llama", "llama")):
            reply = one.ask("POST", path, {"model": name, **WIRES[path]})
            assert (reply.status, reply.json["model"]) == (200, own)
        assert one.loader.loads == {"llama": 2, "org/qwen": 1}
        wrong = one.ask("POST", path, {"model": "lama", **WIRES[path]})
        assert wrong.status == 404
        assert "this server has: org/qwen, default, llama; did you mean llama?" in str(wrong.json)


def test_tokens_are_those_of_the_model_that_is_named() -> None:
    with several() as one:
        assert one.ask("POST", "/tokenize", {"model": "llama", "prompt": "ab"}).json["count"] == 2
        assert one.ask("POST", "/detokenize", {"model": "llama", "tokens": [97]}).status == 200
        assert one.ask("POST", "/tokenize", {"model": "nothing", "prompt": "ab"}).status == 404
        body = {"model": "llama", "messages": MESSAGES}
        assert one.ask("POST", "/v1/messages/count_tokens", body).json == {"input_tokens": 2}
        assert one.loader.loads == {"llama": 1}


SIGNS = {"/v1/messages": b"event: ping", "/v1/responses": b"event: response.in_progress"}


@pytest.mark.parametrize("path", WIRES)
def test_a_stream_that_waits_for_a_model_shows_that_the_server_lives(path: str) -> None:
    with several(ServerSettings(keep_alive=0.02), opened=False) as one:
        body = json.dumps({"model": "llama", "stream": True, **WIRES[path]}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with one.server.connect() as client:
            client.sendall(head.encode() + body)
            got = b""
            while got.count(SIGNS.get(path, b": keep-alive")) < 2:
                got += client.recv(4096)
            assert one.state("llama") == "loading"
            one.open()
            while b"Hello." not in got:
                got += client.recv(4096)
        assert one.loader.loads == {"llama": 1}


def test_a_client_that_leaves_while_a_model_is_loaded_is_forgotten() -> None:
    with several(opened=False) as one:
        body = json.dumps({"model": "llama", "prompt": "hi"}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        with one.server.connect() as client:
            client.sendall(head.replace("Host: a", "Host: localhost").encode() + body)
            until(lambda: one.ask("GET", "/v1/models/llama").json["waiting"] == 1)
        until(lambda: one.ask("GET", "/v1/models/llama").json["waiting"] == 0)
        one.open()
        until(lambda: one.state("llama") == "loaded")


@pytest.mark.parametrize(
    "error",
    [
        BackendError("/secret/folder"),
        ModelNotFoundError("cannot load the model in /secret/folder"),
        ContextOverflowError("a secret prefix is too long", prompt_tokens=9, limit=8),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_model_that_cannot_be_loaded_is_an_error_of_the_server_that_tells_no_more(
    error: SemanticError,
) -> None:
    with several() as one:
        one.loader.failures["llama"] = error
        reply = one.ask("POST", "/v1/completions", {"model": "llama", "prompt": "hi"})
        assert reply.status == 503
        assert "secret" not in reply.body.decode()
        assert (
            one.ask("POST", "/v1/completions", {"model": "default", "prompt": "hi"}).status == 200
        )


def test_the_log_names_the_model_that_answered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "semantic.server")
    with several() as one:
        for name in ("llama", "org/qwen"):
            one.ask("POST", "/v1/completions", {"model": name, "prompt": "hi"})
    found = [getattr(record, LOG_FIELDS, {}) for record in caplog.records]
    assert [fields["model"] for fields in found if "finish" in fields] == ["llama", "org/qwen"]


def test_metrics_are_those_of_each_model() -> None:
    with several() as one:
        for _ in range(2):
            one.ask("POST", "/v1/completions", {"model": "llama", "prompt": "hi"})
        one.ask("POST", "/v1/completions", {"model": "org/qwen", "prompt": "hi"})
        lines = one.ask("GET", "/metrics").body.decode().splitlines()
        done = [line for line in lines if line.startswith("vllm:request_success_total")]
        assert sorted(line.split("{")[1] for line in done) == [
            'finished_reason="stop",model_name="llama"} 2.0',
            'finished_reason="stop",model_name="org/qwen"} 1.0',
        ]
        assert 'semantic_pool_max_bytes{model_name="org/qwen"} 100.0' in lines
        assert not any('semantic_pool_max_bytes{model_name="llama"}' in line for line in lines)


def test_an_operator_loads_and_unloads() -> None:
    with several() as one:
        loaded = one.ask("POST", "/v1/models/org/qwen/load")
        assert (loaded.status, loaded.json["state"]) == (200, "loaded")
        unloaded = one.ask("POST", "/v1/models/org/qwen/unload")
        assert (unloaded.status, unloaded.json["state"]) == (200, "unloaded")
        unknown = one.ask("POST", "/v1/models/org/qwem/load")
        assert (unknown.status, "did you mean org/qwen?" in str(unknown.json)) == (404, True)
        assert one.loader.loads == {"org/qwen": 1}


def test_tenants_neither_load_nor_see_what_others_do() -> None:
    keys, operators = (SecretStr(KEY),), (SecretStr(OPERATOR),)
    with several(ServerSettings(api_keys=keys, operator_keys=operators)) as one:
        for action in ("load", "unload"):
            assert one.ask("POST", f"/v1/models/llama/{action}").status == 401
            refused = one.ask("POST", f"/v1/models/llama/{action}", key=KEY)
            assert (refused.status, "operators_only" in str(refused.json)) == (403, True)
        assert one.ask("POST", "/v1/models/llama/load", key=OPERATOR).json["running"] == 0
        assert "running" not in one.ask("GET", "/v1/models/llama", key=KEY).json
        assert one.ask("GET", "/v1/models/llama", key=OPERATOR).json["running"] == 0


def test_agents_are_those_of_the_first_model_or_of_one_that_is_named() -> None:
    with several() as one:
        assert one.ask("GET", "/v1/agents?model=llama").status == 200
        assert one.loader.loads == {"llama": 1}
        assert one.ask("GET", "/v1/agents").status == 200
        assert one.loader.loads == {"llama": 1, "org/qwen": 1}
        assert one.ask("GET", "/v1/agents?model=lama").status == 404
        assert one.ask("GET", "/v1/requests").json["data"] == []


def test_the_plus_sign_of_an_adapters_name_may_be_unencoded() -> None:
    with several(names=("base", "base+sql")) as one:
        for query in ("base+sql", "base%2Bsql"):
            assert one.ask("GET", f"/v1/agents?model={query}").status == 200
        assert one.loader.loads == {"base+sql": 1}
        assert one.ask("GET", "/v1/agents?model=base+sqk").status == 404


WRONG_NAMES: tuple[object, ...] = (
    *("", "LLAMA", "llama\0", "llama\r\nX: y", "llama+sql", "x" * 99_999, "\ud800"),
    *(5, ["llama"]),
)
MORE_WIRES: dict[str, dict[str, object]] = {
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["hi"]},
    "/api/v0/chat/completions": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/api/show": {},
    "/api/embed": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [97]},
}


def test_what_names_no_model_is_refused_on_every_wire_and_loads_none() -> None:
    with several() as one:
        assert one.ask("POST", "/v1/models/llama/load").status == 200
        for path, body in {**WIRES, **MORE_WIRES}.items():
            for name in WRONG_NAMES:
                reply = one.ask("POST", path, {"model": name, **body})
                assert reply.status in {400, 404}, (path, str(name)[:20])
                assert len(reply.body) < 1000
                assert str(reply.json["error"]) != ""
        assert one.loader.loads == {"llama": 1}
        assert one.state("llama") == "loaded"


def test_a_response_is_continued_by_another_model_and_by_no_other_tenant() -> None:
    other = "key-of-another-tenant"
    settings = ServerSettings(api_keys=(SecretStr(KEY), SecretStr(other)))
    with several(settings) as one:
        first = one.ask("POST", "/v1/responses", {"model": "llama", "input": "hi"}, KEY).json
        more = {"model": "default", "input": "more", "previous_response_id": first["id"]}
        reply = one.ask("POST", "/v1/responses", more, KEY)
        assert (reply.status, reply.json["model"]) == (200, "org/qwen")
        stored = one.ask("GET", f"/v1/responses/{first['id']}", key=KEY)
        assert (stored.status, stored.json["model"]) == (200, "llama")
        refused = one.ask("POST", "/v1/responses", more, other)
        assert (refused.status, "previous_response_not_found" in str(refused.json)) == (400, True)
        assert one.ask("GET", f"/v1/responses/{first['id']}", key=other).status == 404
        assert one.loader.loads == {"llama": 1, "org/qwen": 1}


def test_an_unload_waits_for_the_stream_of_its_model_and_stops_no_other() -> None:
    with several(capacity=2) as one:
        held = one.loader.held = asyncio.Event()
        chat = {"model": "llama", "messages": MESSAGES}
        replies: list[Reply] = []

        def ask(path: str, body: object) -> threading.Thread:
            thread = threading.Thread(target=lambda: replies.append(one.ask("POST", path, body)))
            thread.start()
            return thread

        threads = [ask("/v1/chat/completions", {**chat, "stream": True})]
        until(lambda: one.ask("GET", "/v1/models/llama").json["running"] == 1)
        one.loader.held = None
        threads += [ask("/v1/models/llama/unload", {})]
        beside = one.ask("POST", "/v1/chat/completions", {**chat, "model": "default"})
        assert (beside.status, replies) == (200, [])
        one.loop.call_soon_threadsafe(held.set)
        for thread in threads:
            thread.join(60)
        assert [reply.status for reply in replies] == [200, 200]
        assert any(b"Hello." in reply.body and b"[DONE]" in reply.body for reply in replies)
        assert one.state("llama") == "unloaded"
        assert one.loader.loads == {"llama": 1, "org/qwen": 1}


def test_a_server_of_one_model_neither_unloads_it_nor_has_others() -> None:
    with running(FakeServing()) as server:
        assert server.ask("GET", "/v1/models/fake").json["state"] == "loaded"
        reply = server.ask("POST", "/v1/models/fake/unload")
        assert (reply.status, "--model-ttl" in str(reply.json)) == (400, True)
        assert server.ask("GET", "/v1/agents?model=fak").status == 503
        chat = {"model": "fak", "messages": MESSAGES}
        assert "did you mean fake?" in str(server.ask("POST", "/v1/chat/completions", chat).json)


def test_a_server_that_stops_while_a_model_is_loaded_ends() -> None:
    with several(ServerSettings(stop_timeout=1), opened=False) as one:
        body = {"model": "llama", "prompt": "hi"}
        asked = threading.Thread(target=lambda: one.ask("POST", "/v1/completions", body))
        asked.start()
        until(lambda: one.state("llama") == "loading")
    asked.join(60)
    assert not asked.is_alive()
    assert one.loader.events[-1] == "close"


CHAT = {"messages": MESSAGES, "stream": False}


def test_ollamas_wire_loads_keeps_and_unloads() -> None:
    with several() as one:
        kept = {"model": "llama:latest", "keep_alive": "1h", **CHAT}
        assert one.ask("POST", "/api/chat", kept).json["model"] == "llama:latest"
        assert one.loader.loads == {"llama": 1}
        [running] = cast(list[Json], one.ask("GET", "/api/ps").json["models"])
        assert running["name"] == "llama:latest"
        left = datetime.fromisoformat(str(running["expires_at"])) - datetime.now(UTC)
        assert timedelta(minutes=30) < left <= timedelta(hours=1)
        load = one.ask("POST", "/api/generate", {"model": "org/qwen", "stream": False})
        assert load.json["done_reason"] == "load"
        assert (one.state("org/qwen"), one.state("llama")) == ("loaded", "unloaded")
        unload = {"model": "org/qwen:latest", "stream": False, "keep_alive": 0}
        assert one.ask("POST", "/api/generate", unload).json["done_reason"] == "unload"
        assert one.state("org/qwen") == "unloaded"
        assert one.ask("GET", "/api/ps").json == {"models": []}
        wrong = one.ask("POST", "/api/chat", {"model": "lama", **CHAT})
        assert (wrong.status, "did you mean llama?" in str(wrong.json["error"])) == (404, True)
        shown = one.ask("POST", "/api/show", {"model": "llama"}).json
        assert shown["capabilities"] == ["completion", "tools"]
        names = [
            row["name"] for row in cast(list[Json], one.ask("GET", "/api/tags").json["models"])
        ]
        assert names == ["org/qwen:latest", "default:latest", "llama:latest"]


def test_a_tenant_does_not_decide_how_long_a_model_stays() -> None:
    settings = ServerSettings(api_keys=(SecretStr(KEY),))
    with several(settings) as one:
        body = {"model": "llama", "keep_alive": 0, "stream": False}
        assert one.ask("POST", "/api/chat", {**body, **CHAT}, KEY).status == 200
        assert one.ask("POST", "/api/generate", body, KEY).json["done_reason"] == "load"
        [running] = cast(list[Json], one.ask("GET", "/api/ps", key=KEY).json["models"])
        assert str(running["expires_at"]).startswith("9999")


# Models of the hub


def pulling(*patterns: str, **fields: object) -> ServerSettings:
    return ServerSettings.model_validate({"allow_pull": patterns, **fields})


def lines_of(body: bytes) -> list[Json]:
    return [json.loads(line) for line in body.splitlines()]


def test_a_model_that_may_be_pulled_is_fetched_and_served() -> None:
    with several(pulling("org/*")) as one:
        got = lines_of(one.ask("POST", "/api/pull", {"model": "org/new:latest"}).body)
        arriving = {"status": "pulling cccccccccccc", "digest": "c" * 40, "total": 9}
        assert got == [
            {"status": "pulling manifest"},
            {**arriving, "completed": 3},
            {**arriving, "completed": 9},
            {"status": "verifying sha256 digest"},
            {"status": "writing manifest"},
            {"status": "success"},
        ]
        assert one.state("org/new") == "unloaded"
        chat = {"model": "org/new", "messages": MESSAGES, "stream": False}
        assert one.ask("POST", "/api/chat", chat).status == 200
        again = one.ask("POST", "/api/pull", {"name": "org/new", "stream": False})
        assert (again.status, again.json) == (200, {"status": "success"})
        assert [event for event in one.loader.events if "fetch" in event] == ["fetch org/new"]


@pytest.mark.parametrize(
    ("allowed", "name", "problem"),
    [
        ((), "org/new", "restart with --allow-pull"),
        (("org/*",), "other/new", "cannot pull 'other/new': expected one of org/*"),
        (("org/new",), "org/new2", "cannot pull"),
        (("org/new",), "x" * 5000, "cannot pull"),
    ],
)
def test_what_may_not_be_pulled_is_refused(
    allowed: tuple[str, ...], name: str, problem: str
) -> None:
    with several(pulling(*allowed)) as one:
        for stream in (True, False):
            reply = one.ask("POST", "/api/pull", {"model": name, "stream": stream})
            assert reply.status == 403
            assert problem in str(reply.json["error"])
        assert one.loader.events == []


def test_with_keys_only_operators_pull() -> None:
    settings = pulling("org/*", api_keys=(KEY,), operator_keys=(OPERATOR,))
    with several(settings) as one:
        body = {"model": "org/new", "stream": False}
        assert one.ask("POST", "/api/pull", body, KEY).status == 403
        assert one.loader.events == []
        assert one.ask("POST", "/api/pull", body, OPERATOR).status == 200


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (ModelNotFoundError("the hub has no model"), 404),
        (InvalidRequestError("it does not fit"), 400),
        (OperatorError("no connection to the hub"), 502),
    ],
)
def test_a_pull_that_fails_says_why(failure: SemanticError, status: int) -> None:
    with several(pulling("org/*")) as one:
        one.loader.failures["org/new"] = failure
        reply = one.ask("POST", "/api/pull", {"model": "org/new", "stream": False})
        assert (reply.status, reply.json["error"]) == (status, str(failure))
        streamed = lines_of(one.ask("POST", "/api/pull", {"model": "org/new"}).body)
        assert streamed[-1]["error"] == str(failure)
        assert {"status": "success"} not in streamed
        assert one.ask("GET", "/v1/models/org/new").status == 404


def test_a_client_that_leaves_stops_its_pull_and_lets_the_next_one_in() -> None:
    with several(pulling("org/*"), opened=False) as one:
        body = b'{"model": "org/new"}'
        head = f"POST /api/pull HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with one.server.connect() as client:
            client.sendall(head.encode() + body)
            got = b""
            while b'"completed": 3' not in got:
                got += client.recv(4096)
        until(lambda: one.loader.cancelled == 1)
        one.open()
        reply = one.ask("POST", "/api/pull", {"model": "org/new", "stream": False})
        assert reply.json == {"status": "success"}


def test_many_who_pull_one_model_fetch_it_once() -> None:
    with several(pulling("org/*"), opened=False) as one:
        replies: list[int] = []

        def ask() -> None:
            body = {"model": "org/new", "stream": False}
            replies.append(one.ask("POST", "/api/pull", body).status)

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        until(lambda: bool(one.loader.events))
        one.open()
        for thread in threads:
            thread.join()
        assert replies == [200] * 5
        assert one.loader.events == ["fetch org/new"]


@pytest.mark.parametrize(
    ("method", "route", "instead"),
    [
        ("POST", "create", "start it with --model FOLDER"),
        ("POST", "copy", "semantic models alias"),
        ("DELETE", "delete", "semantic models rm"),
        ("POST", "push", "this server publishes nothing"),
    ],
)
def test_what_changes_models_is_refused_by_name(method: str, route: str, instead: str) -> None:
    with several() as one:
        reply = one.ask(method, f"/api/{route}", {"model": "llama"})
        assert reply.status == 403
        assert str(reply.json["error"]).startswith(f"/api/{route}: ")
        assert instead in str(reply.json["error"])
