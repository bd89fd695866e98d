"""`semantic top`: what a running server does, in lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from io import StringIO

import pytest
from pydantic import SecretStr
from rich.console import Console

from semantic.domain.errors import OperatorError
from semantic_server.cli.top import View, show_duration, watch
from semantic_server.clients.server_connection import Document, follow_overview
from semantic_server.http.settings import ServerSettings
from tests.cli.support import semantic
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
    assert "pool ######.................. 25 bytes of 100 bytes, 25%" in lines
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
    assert "no server answers at http://127.0.0.1:1" in ran.err


def test_what_is_no_overview_is_refused() -> None:
    with pytest.raises(OperatorError, match="expected an overview of this version"):
        View().apply("overview", {"object": "list"})


def test_a_view_follows_the_stream(server: RunningServer) -> None:
    view = View()
    events = follow_overview(server.url, "NONE")
    for _ in range(2):
        view.apply(*next(events))
    events.close()
    assert any("decodes" in line for line in view.lines())


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


def test_a_stream_without_an_event_is_an_error() -> None:
    with pytest.raises(OperatorError, match="ended the stream before its first event"):
        watch(lambda: iter(()), Console(file=StringIO()))


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.0, "0.0 s"), (59.0, "59.0 s"), (840, "14 min"), (8040, "2 h 14 min")]
)
def test_a_duration_in_words(seconds: float, words: str) -> None:
    assert show_duration(seconds) == words
