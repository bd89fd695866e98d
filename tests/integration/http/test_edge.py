"""What every route has in common: probes, keys, hosts, errors, the log, the description."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import threading
from collections.abc import Iterator

import pytest
from fastapi import Request
from pydantic import SecretStr

from semantic.application.models.model_manager import RunnableServing
from semantic.domain.answer import AnswerEvent
from semantic.domain.chat import Chat, ToolChoice
from semantic.domain.errors import (
    AgentNotFoundError,
    ContextOverflowError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PoolExhaustedError,
)
from semantic.ports.serving import Ask, EngineState, Prompt
from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext, serving_of
from semantic_server.http.identity import tenant_name, tenant_of
from semantic_server.http.lifecycle import Lifecycle
from semantic_server.http.logs import LOG_FIELDS
from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import FakeServing, Script
from tests.support.http_server import RunningServer, running, until
from tests.support.runnable_serving import RunnableFake

pytestmark = pytest.mark.process

SECRET = "key-that-nobody-may-read"
OPERATOR = "key-of-an-operator"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(FakeServing()) as found:
        yield found


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    keys = (SecretStr(SECRET), SecretStr("another"))
    operators = (SecretStr(OPERATOR),)
    app = create_app(FakeServing(), ServerSettings(api_keys=keys, operator_keys=operators))
    app.add_api_route("/tenant", _tenant)
    with running(app=app) as found:
        yield found


async def _tenant(request: Request) -> str:
    return tenant_of(request)


# Probes and models


def test_probes_are_answered_with_and_without_a_body(server: RunningServer) -> None:
    for path in ("/", "/api/hello", "/health", "/ready", "/version", "/metrics"):
        assert server.ask("HEAD", path).status == 200, path
        assert server.ask("GET", path).status == 200, path
    assert server.ask("GET", "/ready").json == {"status": "ready", "model": "fake"}


def test_a_reply_on_a_kept_connection_waits_for_no_acknowledgement(server: RunningServer) -> None:
    # Headers and body are two sends: the second one would wait for the client's delayed answer.
    with server.connect() as kept:
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(1)
        (own,) = [
            transport.get_extra_info("socket")
            for one in server.server.server_state.connections
            if (transport := one.transport).get_extra_info("peername") == kept.getsockname()
        ]
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_while_the_model_loads_the_process_lives_and_the_wires_ask_for_patience() -> None:
    released = threading.Event()
    opened = RunnableFake()

    async def load() -> RunnableServing:
        await asyncio.to_thread(released.wait)
        return opened

    context = ServerContext()
    app = create_app(context=context, lifecycle=Lifecycle(context, load))
    with running(app=app) as server:
        assert server.ask("GET", "/health").status == 200
        for path in ("/ready", "/v1/models"):
            reply = server.ask("GET", path)
            assert (reply.status, reply.headers.get("retry-after")) == (503, "5"), path
        released.set()
        until(lambda: server.ask("GET", "/ready").status == 200)
        assert "semantic_pool_max_bytes" in server.ask("GET", "/metrics").body.decode()
        opened.state = EngineState.FAILED
        assert server.ask("GET", "/ready").status == 503
    assert opened.closed


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    async def load() -> RunnableServing:
        raise ModelNotFoundError("no such folder")

    context = ServerContext()
    lifecycle = Lifecycle(context, load)
    with running(app=create_app(context=context, lifecycle=lifecycle)) as server:
        lifecycle.on_failure(server.server.stop)
        until(lambda: lifecycle.failure is not None)
    assert str(lifecycle.failure) == "no such folder"


def test_models_are_listed_for_both_families_of_clients(server: RunningServer) -> None:
    listed = server.ask("GET", "/v1/models").json
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert (listed["first_id"], listed["last_id"]) == ("fake", "default")
    one = server.ask("GET", "/v1/models/fake").json
    assert one["context_length"] == one["max_model_len"] == 512
    assert (one["object"], one["type"], one["created_at"]) == (
        "model",
        "model",
        "2023-11-14T22:13:20Z",
    )
    short = server.ask("GET", "/v1/models?limit=1").json
    assert (short["has_more"], short["last_id"]) == (True, "fake")


def test_an_unknown_model_is_told_which_there_are(server: RunningServer) -> None:
    reply = server.ask("GET", "/v1/models/some/other")
    assert reply.status == 404
    assert "fake, default" in str(reply.json)


@pytest.mark.parametrize("name", ["fake", "default", "/models/fake"])
def test_a_models_path_is_accepted_and_never_shown(server: RunningServer, name: str) -> None:
    chat = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/messages/count_tokens", chat),
        ("/v1/responses", {"model": name, "input": "hi"}),
        ("/v1/completions", {"model": name, "prompt": "hi"}),
    ):
        reply = server.ask("POST", path, body)
        assert reply.status == 200
        assert reply.json.get("model", "fake") == "fake"
    assert server.ask("GET", f"/v1/models/{name}").json["id"] == name
    assert "/models" not in str(server.ask("GET", "/v1/models").json)


def test_a_text_becomes_tokens_and_comes_back(server: RunningServer) -> None:
    found = server.ask("POST", "/tokenize", {"prompt": "abc", "return_token_strs": True}).json
    assert found == {
        "tokens": [97, 98, 99],
        "count": 3,
        "max_model_len": 512,
        "token_strs": ["a", "b", "c"],
    }
    assert server.ask("POST", "/detokenize", {"tokens": [97, 98]}).json == {"prompt": "ab"}
    wrong = server.ask("POST", "/detokenize", {"tokens": [97, "x"]})
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "tokens[1]")  # type: ignore[index]


def test_a_conversation_can_be_counted(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    reply = server.ask("POST", "/tokenize", {"messages": messages})
    assert (reply.status, reply.json["count"]) == (200, 3)
    wrong = server.ask("POST", "/tokenize", {"messages": [{"role": "nobody"}]})
    assert (wrong.status, "messages[0]" in str(wrong.json)) == (400, True)
    odd = server.ask("POST", "/tokenize", {"messages": messages, "return_token_strs": "yes"})
    assert odd.status == 400


def test_a_conversation_is_counted_as_a_request_of_the_same_caller_has_it() -> None:
    asked: list[tuple[Prompt, str]] = []

    class Counting(FakeServing):
        async def tokenize(
            self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
        ) -> tuple[int, ...]:
            asked.append((prompt, tenant))
            return await super().tokenize(prompt, add_special_tokens=add_special_tokens)

    settings = ServerSettings(api_keys=(SecretStr("secret"),))
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with running(Counting(), settings) as server:
        reply = server.ask("POST", "/tokenize", body, {"x-api-key": "secret"})
    assert reply.status == 200
    ((prompt, tenant),) = asked
    assert isinstance(prompt, Chat)
    assert tenant == tenant_name("secret")
    assert prompt.tool_choice == ToolChoice("none")
    assert prompt.template_options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("reader", "path", "body"),
    [
        ("models.conversation_of", "/tokenize", {"messages": []}),
        ("models.validated", "/tokenize", {"prompt": "a"}),
        ("request_body.validated", "/detokenize", {"tokens": [97]}),
        ("anthropic.routes.read_request", "/v1/messages", {"model": "fake", "max_tokens": 1}),
        ("anthropic.routes.read_chat", "/v1/messages/count_tokens", {"model": "fake"}),
        ("openai.chat.chat_request", "/v1/chat/completions", {"model": "fake"}),
        ("openai.completions.completion_request", "/v1/completions", {"model": "fake"}),
        ("openai.responses.routes.response_request", "/v1/responses", {"model": "fake"}),
        ("ollama.generation.chat_request", "/api/chat", {"model": "fake"}),
        ("ollama.generation.generate_request", "/api/generate", {"model": "fake"}),
    ],
)
def test_bodies_are_validated_beside_the_event_loop(
    reader: str, path: str, body: object, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def read(*_: object, **__: object) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            threads.append(True)
        else:
            threads.append(False)
        raise InvalidRequestError("as in the test")

    monkeypatch.setattr(f"semantic_server.http.{reader}", read)
    assert server.ask("POST", path, body).status == 400
    assert threads == [True]


# Keys, hosts, origins


def test_without_a_key_only_probes_are_answered(locked: RunningServer) -> None:
    for path in ("/", "/health", "/ready", "/version", "/api/hello"):
        assert locked.ask("GET", path).status == 200, path
    for path in ("/metrics", "/docs", "/openapi.json", "/v1/models", "/nowhere"):
        assert locked.ask("GET", path).status == 401, path


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {SECRET}"},
        {"authorization": f"bearer  {SECRET}"},
        {"x-api-key": SECRET},
        {"Authorization": "Bearer stale", "X-Api-Key": SECRET},
    ],
)
def test_a_key_opens_and_names_the_tenant(locked: RunningServer, headers: dict[str, str]) -> None:
    reply = locked.ask("GET", "/tenant", headers=headers)
    assert (reply.status, json.loads(reply.body)) == (200, tenant_name(SECRET))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {SECRET}"},
        {"Authorization": SECRET},
        {"x-api-key": SECRET[:-1]},
        {"x-api-key": ""},
        {"x-api-key": "\xff\xfe"},
    ],
)
def test_a_wrong_key_is_refused_in_the_wires_shape(
    locked: RunningServer, headers: dict[str, str]
) -> None:
    for path, kind in (
        *(("/v1/chat/completions", "error"), ("/v1/messages", "type"), ("/api/chat", "error")),
    ):
        reply = locked.ask("POST", path, {}, headers)
        assert reply.status == 401
        assert next(iter(reply.json)) == kind
        assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "localhost."]
)
def test_names_of_this_machine_are_its_own(server: RunningServer, host: str) -> None:
    assert server.ask("GET", "/health", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "10.0.0.1", "", "localhost@evil.example", "[::1"],
)
def test_a_foreign_host_is_refused(server: RunningServer, host: str) -> None:
    assert server.ask("GET", "/health", headers={"Host": host}).status == 421


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/ready?a=b", "evil.example", 200),
        ("HTTP://127.0.0.1:1/ready", "evil.example", 200),
        ("http://localhost", "localhost", 200),
        ("http://evil.example/ready", "localhost", 421),
        ("http://localhost@evil.example/ready", "localhost", 421),
        ("http:///ready", "localhost", 421),
        ("ftp://localhost/ready", "localhost", 404),
    ],
)
def test_the_host_of_a_whole_url_counts_and_its_path_is_asked_for(
    server: RunningServer, target: str, host: str, status: int
) -> None:
    with server.connect() as kept:
        kept.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert kept.recv(64).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://evil.example", 403),
        ("null", 403),
        ("http://localhost:3000", 403),
        ("http://localhost", 200),
        (None, 200),
    ],
)
def test_a_foreign_page_may_not_post(
    server: RunningServer, origin: str | None, status: int
) -> None:
    headers = {"Host": "localhost"} | ({} if origin is None else {"Origin": origin})
    assert server.ask("POST", "/tokenize", {"prompt": "a"}, headers).status == status
    assert server.ask("GET", "/health", headers=headers).status == 200


def test_hosts_and_origins_can_be_allowed() -> None:
    settings = ServerSettings(allowed_hosts=("box.lan",), allowed_origins=("https://app.lan/",))
    with running(FakeServing(), settings) as server:
        headers = {"Host": "Box.lan:80", "Origin": "https://app.lan"}
        assert server.ask("POST", "/tokenize", {"prompt": "a"}, headers).status == 200
        assert server.ask("GET", "/health", headers={"Host": "other.lan"}).status == 421


# Errors


@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        (AgentNotFoundError("no such agent"), 404, "no such agent"),
        (OverloadedError("full", retry_after=7), 503, "full"),
        (PoolExhaustedError("no room"), 503, "no room"),
        (ContextOverflowError("long", prompt_tokens=9, limit=5), 400, "context_length_exceeded"),
        (OSError(errno.EMFILE, "private words"), 503, "overloaded"),
        (OSError(errno.EIO, "private words"), 500, "internal_error"),
        (RuntimeError("private words"), 500, "internal_error"),
        (KeyError("private words"), 500, "internal_error"),
    ],
)
def test_errors_have_the_shape_of_their_wire(failure: Exception, status: int, words: str) -> None:
    app = create_app(FakeServing())

    async def fail() -> None:
        raise failure

    app.add_api_route("/fail", fail)
    app.add_api_route("/v1/messages/fail", fail)
    with running(app=app) as server:
        plain, anthropic = server.ask("GET", "/fail"), server.ask("GET", "/v1/messages/fail")
    assert plain.status == anthropic.status == status
    assert words in str(plain.json["error"])
    assert anthropic.json["type"] == "error"
    assert anthropic.json["request_id"] == anthropic.headers["request-id"]
    assert b"private" not in plain.body + anthropic.body
    if isinstance(failure, ContextOverflowError):
        message = "prompt is too long: 9 tokens > 5 maximum"
        assert anthropic.json["error"]["message"] == message  # type: ignore[index]  # its shape
    if isinstance(failure, OverloadedError):
        assert plain.headers["retry-after"] == "7"


def test_a_bug_is_in_the_log_under_the_id_that_the_client_got(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = create_app(FakeServing())

    async def fail() -> None:
        raise RuntimeError("private words")

    app.add_api_route("/fail", fail)
    with running(app=app) as server:
        reply = server.ask("GET", "/fail")
    failed = [record for record in caplog.records if record.exc_info and "failed" in record.msg]
    assert [reply.headers["x-request-id"]] == [record.args[0] for record in failed]  # type: ignore[index]


def test_wrong_paths_and_methods_are_json_too(server: RunningServer) -> None:
    lost = server.ask("GET", "/v1/messages/nowhere")
    assert (lost.status, lost.json["type"]) == (404, "error")
    wrong = server.ask("PUT", "/health", b"")
    assert (wrong.status, wrong.headers["allow"]) == (405, "GET, HEAD")
    several = server.ask("PUT", "/v1/agents/some", b"")
    assert (several.status, several.headers["allow"]) == (405, "GET, DELETE")


# Log and metrics


def test_metrics_are_about_all_tenants_and_for_operators_only(locked: RunningServer) -> None:
    for method in ("GET", "HEAD"):
        assert locked.ask(method, "/metrics", headers={"x-api-key": SECRET}).status == 403, method
        assert locked.ask(method, "/metrics", headers={"x-api-key": OPERATOR}).status == 200, method
    refused = locked.ask("GET", "/metrics", headers={"x-api-key": SECRET}).json["error"]
    assert isinstance(refused, dict)
    assert (refused["code"], "--operator-key" in refused["message"]) == ("operators_only", True)


def test_an_operators_key_has_no_tenant_and_gets_no_answer(locked: RunningServer) -> None:
    key = {"authorization": f"Bearer {OPERATOR}"}
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
        assert locked.ask("POST", path, body, headers=key).status == 403, path
    assert locked.ask("GET", "/tenant", headers=key).status == 403
    assert locked.ask("GET", "/v1/models", headers=key).status == 200


def test_one_line_is_logged_for_an_answer_and_it_holds_no_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "semantic.server")
    serving = FakeServing(lambda _: Script(cached=2))
    keys, operators = (SecretStr(SECRET),), (SecretStr(OPERATOR),)
    app = create_app(serving, ServerSettings(api_keys=keys, operator_keys=operators))
    app.add_api_route("/answer/{name}", _answer)
    with running(app=app) as server:
        key = {"x-api-key": SECRET}
        assert server.ask("GET", "/answer/private", headers=key).status == 200
        until(lambda: len(_lines(caplog)) == 1)
        metrics = server.ask("GET", "/metrics", headers={"x-api-key": OPERATOR}).body.decode()
    (facts,) = _lines(caplog)
    assert facts["route"] == "GET /answer/{name}"
    assert (facts["status"], facts["agent"], facts["model"]) == (200, "me", "semantic-tiny")
    assert (facts["prompt"], facts["cached"], facts["completion"]) == (7, 2, 6)
    assert facts["finish"] == "stop"
    secrets = SECRET, OPERATOR, "private", "Hello."
    assert not [word for word in secrets if word in caplog.text + str(facts)]
    assert 'vllm:prompt_tokens_total{model_name="semantic-tiny"} 7.0' in metrics
    assert 'vllm:prefix_cache_hits_total{model_name="semantic-tiny"} 2.0' in metrics
    assert 'finished_reason="stop",model_name="semantic-tiny"} 1.0' in metrics
    assert 'vllm:num_requests_running{model_name="semantic-tiny"} 0.0' in metrics


async def _answer(request: Request) -> list[str]:
    found: list[AnswerEvent] = []
    ask = Ask("private", serving_of(request).model.sampling, agent="me")
    async for event in serving_of(request).answer(ask):
        found.append(event)  # noqa: PERF401  # as a wire does it
    return [type(event).__name__ for event in found]


def _lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """Lines of the route that answers: those of earlier tests may come late."""
    lines = [vars(record)[LOG_FIELDS] for record in caplog.records if record.msg == "request"]
    return [line for line in lines if "answer" in line["route"]]


# The description


def test_the_description_has_every_status_and_needs_no_network(server: RunningServer) -> None:
    schema = server.ask("GET", "/openapi.json").json
    paths = schema["paths"]
    assert isinstance(paths, dict)
    assert {"/health", "/v1/models", "/tokenize"} <= paths.keys()
    for path, methods in paths.items():
        for operation in methods.values():
            statuses = operation["responses"].keys()
            assert {"400", "401", "413", "500", "503"} <= statuses, path
            assert "422" not in statuses, path
    docs = server.ask("GET", "/docs")
    assert docs.headers["content-type"].startswith("text/html")
    assert b"/v1/models" in docs.body
    assert b"http" not in docs.body.replace(b"<!doctype html>", b"")
    assert docs.headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize("path", ["/", "/docs", "/v1/models", "/health", "/nowhere"])
def test_no_browser_guesses_what_a_reply_is(server: RunningServer, path: str) -> None:
    assert server.ask("GET", path).headers["x-content-type-options"] == "nosniff"


def test_keys_are_described_only_where_they_are_asked_for(
    server: RunningServer, locked: RunningServer
) -> None:
    assert "security" not in server.ask("GET", "/openapi.json").json
    found = locked.ask("GET", "/openapi.json", headers={"x-api-key": SECRET}).json
    assert found["security"] == [{"bearer": []}, {"key": []}]
    assert found["paths"]["/health"]["get"]["security"] == []  # type: ignore[index]  # its shape
