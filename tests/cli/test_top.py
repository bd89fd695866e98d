"""`semantic top`: what a running server does, in lines."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import termios
from collections.abc import Iterator
from io import StringIO

import pytest
from pydantic import SecretStr
from rich.console import Console

from semantic.domain.errors import OperatorError
from semantic_server.cli.top import View, show_duration, watch
from semantic_server.clients.server_connection import Document, follow_overview
from semantic_server.http.settings import ServerSettings
from tests.cli.support import command_line, environment, imported, semantic
from tests.support.http_server import RunningServer
from tests.support.model_server import several
from tests.support.page_world import busy, serving

pytestmark = pytest.mark.process

KEY, OPERATOR = "the key of a", "the key of the operator"
KEYED = ServerSettings(api_keys=(SecretStr(KEY),), operator_keys=(SecretStr(OPERATOR),))


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with serving(busy().agents) as found:
        messages = [{"role": "user", "content": "x" * 50}]
        asked = {"model": "fake", "agent_id": "ann", "messages": messages}
        assert found.ask("POST", "/v1/chat/completions", asked).status == 200
        yield found


def test_a_server_is_shown_once_where_there_is_no_terminal(server: RunningServer) -> None:
    ran = semantic("top", "--url", server.url)
    assert ran.code == 0
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert lines[0] == "fake, version 1.2.3, ready"
    saved = " s of prefill saved today; the cache had 80 % of 50 prompt tokens."
    assert re.fullmatch(rf"\d+\.\d{re.escape(saved)}", lines[1])
    assert "pool 25 bytes of 100 bytes, 25% ######.................." in lines
    assert any(line.startswith("decodes decoding 20 ") for line in lines)
    assert any(line.startswith("reads prefill 0 % 4,000 ") for line in lines)
    assert any(line.startswith("ann stop 40 of 50 9 ") for line in lines)


def test_several_models_have_a_line_each() -> None:
    with several() as one:
        one.ask("POST", "/v1/models/llama/load")
        ran = semantic("top", "--url", one.server.url)
    lines = [line.split() for line in ran.out.splitlines()]
    head = next(at for at, line in enumerate(lines) if line[:2] == ["model", "state"])
    assert lines[head][2:] == [
        *("memory", "weights", "pool", "agents", "running", "waiting", "tok/s", "unloaded")
    ]
    assert lines[head + 1] == ["org/qwen", "unloaded", "1", "bytes", "0", "0", "when", "needed"]
    assert lines[head + 2][:3] == ["llama", "idle", "for"]
    assert lines[head + 2][-6:] == ["25%", "1", "0", "0", "when", "needed"]


def test_as_json_it_is_what_the_server_sends(server: RunningServer) -> None:
    document = json.loads(semantic("top", "--url", server.url, "--json").out)
    assert (document["object"], document["role"]) == ("overview", "local")


def test_a_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(busy().agents, KEYED) as server:
        ran = semantic("top", "--url", server.url)
        assert (ran.code, "requires an API key" in ran.err) == (4, True)
        monkeypatch.setenv("SEMANTIC_API_KEY", KEY)
        assert "pool" not in semantic("top", "--url", server.url).out
        monkeypatch.setenv("OTHER", OPERATOR)
        ran = semantic("top", "--url", server.url, "--key-variable", "OTHER")
        assert "pool" in ran.out
        monkeypatch.setenv("OTHER", "wrong")
        ran = semantic("top", "--url", server.url, "--key-variable", "OTHER")
        assert "status 401" in ran.err


def test_without_a_server_one_line_says_so() -> None:
    ran = semantic("top", "--url", "http://127.0.0.1:1")
    assert (ran.code, len(ran.err.splitlines())) == (4, 1)
    assert "cannot reach http://127.0.0.1:1" in ran.err


def test_what_is_no_overview_is_refused() -> None:
    with pytest.raises(OperatorError, match="expected an overview of this version"):
        View().apply("overview", {"object": "list"})


def test_a_view_follows_the_stream(server: RunningServer) -> None:
    view = View()
    events = follow_overview(server.url, "NONE")
    for _ in range(2):
        view.apply(*next(events))
    events.close()
    assert any("decodes" in line for line in view.lines(None))


@pytest.mark.parametrize(("width", "shown"), [(60, 5), (80, 7), (120, 8)])
def test_figures_fit_the_terminal(width: int, shown: int, server: RunningServer) -> None:
    """A line loses whole columns from its end, and the middle of a name."""
    document = json.loads(semantic("top", "--url", server.url, "--json").out)
    changes, name = document["changes"], f"agent {'x' * 40} of many 1"
    changes["requests"][0] |= {"agent": name, "prompt_tokens": 123_456, "cached_tokens": 123_000}
    changes["saved"]["today"] |= {"prompt_tokens": 1 << 40, "seconds": 90_000.0}
    changes["models"] = [
        dict.fromkeys(("idle_for", "expires_in", "tokens_per_second"))
        | {"id": name, "state": "loaded", "pinned": True, "memory_bytes": 9 << 30}
        | {"weights_bytes": 8 << 30, "pool": [1, 2], "agents": 1, "running": 1, "waiting": 0}
    ]
    view = View()
    view.apply("overview", document)
    lines = list(view.lines(width))
    assert max(map(len, lines)) <= width
    assert any(re.match("agent x.*of many 1  .* 123,456  123,000  ", line) for line in lines)
    heads = ("agent", "state", "prompt", "cached", "answer", "for", "preempted", "model")
    assert next(line for line in lines if line.startswith("agent  ")).split() == [*heads[:shown]]


def test_top_imports_no_part_of_a_server(server: RunningServer) -> None:
    """They take longer than all else that it does."""
    modules, out = imported("top", "--url", server.url)
    assert "fake, version 1.2.3, ready" in out
    assert "semantic_server.cli.top" in modules
    not_for_top = ("fastapi", "rich.console", "semantic_server.http", "starlette", "uvicorn")
    assert [name for name in not_for_top if name in modules] == []


def test_an_ended_stream_is_followed_again(server: RunningServer) -> None:
    overview = next(follow_overview(server.url, "NONE"))
    slept: list[float] = []
    screen = StringIO()

    def follow() -> Iterator[tuple[str, Document]]:
        if len(slept) == 1:
            raise OperatorError("no server answers")
        yield overview

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(follow, Console(file=screen, force_terminal=True, width=120, height=30), sleep)
    shown = screen.getvalue()
    assert "prefill 0 %" in shown
    assert shown.count("the server ended the stream; next attempt in 2 s") == 2
    assert shown.count("no server answers; next attempt in 2 s") == 1


def test_q_ends_it_and_restores_the_terminal(server: RunningServer) -> None:
    ours, its = pty.openpty()
    before, shown = termios.tcgetattr(its), b""
    command, there = command_line("top", "--url", server.url), environment() | {"TERM": "xterm"}
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=there) as ran:
        try:
            while b"decodes" not in shown:
                assert select.select([ours], [], [], 60)[0]
                shown += os.read(ours, 1 << 16)
            os.write(ours, b"xq")
            assert ran.wait(60) == 0
        finally:
            ran.kill()
    assert termios.tcgetattr(its) == before
    os.close(ours)
    os.close(its)


def test_a_stream_without_an_event_is_an_error() -> None:
    with pytest.raises(OperatorError, match="ended the stream before its first event"):
        watch(lambda: iter(()), Console(file=StringIO()))


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.0, "0.0 s"), (59.0, "59.0 s"), (840, "14 min"), (8040, "2 h 14 min")]
)
def test_a_duration_in_words(seconds: float, words: str) -> None:
    assert show_duration(seconds) == words
