"""`semantic models ps`, `load` and `unload`: the models of a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from semantic_server.http.settings import ServerSettings
from tests.cli.support import Ran, semantic
from tests.support.fake_serving import FakeServing
from tests.support.http_server import running
from tests.support.model_server import KEY, OPERATOR, Several, several

pytestmark = pytest.mark.process


@pytest.fixture
def server() -> Iterator[Several]:
    with several() as one:
        yield one


def models(command: str, server: Several, *arguments: str) -> Ran:
    return semantic("models", command, "--url", server.server.url, *arguments)


def test_models_are_listed_loaded_and_unloaded(server: Several) -> None:
    listed = models("ps", server)
    assert (listed.code, len(listed.out.splitlines())) == (0, 4)
    assert "llama" in listed.out
    assert "unloaded" in listed.out
    loaded = models("load", server, "llama")
    assert (loaded.code, loaded.out) == (0, "llama is loaded\n")
    rows = json.loads(models("ps", server, "--json").out)["models"]
    assert [row["state"] for row in rows] == ["unloaded", "unloaded", "loaded"]
    assert rows[-1]["memory_bytes"] == 1
    name_with_a_slash = models("load", server, "org/qwen", "--json")
    assert json.loads(name_with_a_slash.out)["id"] == "org/qwen"
    unloaded = models("unload", server, "llama")
    assert (unloaded.code, unloaded.out) == (0, "llama is unloaded\n")


def test_an_unknown_model_is_one_line_with_the_one_that_is_meant(server: Several) -> None:
    ran = models("load", server, "lama")
    assert ran.code != 0
    assert len(ran.error_lines) == 1
    assert "did you mean llama?" in ran.err


def test_a_server_of_one_model_is_listed_and_keeps_it() -> None:
    with running(FakeServing()) as one:
        ran = semantic("models", "ps", "--url", one.url)
        assert (ran.code, "never" in ran.out) == (0, True)
        refused = semantic("models", "unload", "fake", "--url", one.url)
        assert (refused.code != 0, "--model-ttl" in refused.err) == (True, True)


def test_a_tenants_key_loads_nothing_and_an_operators_does(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, operators = (SecretStr(KEY),), (SecretStr(OPERATOR),)
    with several(ServerSettings(api_keys=keys, operator_keys=operators)) as one:
        monkeypatch.setenv("SEMANTIC_API_KEY", KEY)
        refused = models("load", one, "llama")
        assert (refused.code != 0, "operator" in refused.err) == (True, True)
        monkeypatch.setenv("SEMANTIC_API_KEY", OPERATOR)
        assert models("load", one, "llama").out == "llama is loaded\n"


def test_without_a_server_one_line_says_so() -> None:
    ran = semantic("models", "ps", "--url", "http://127.0.0.1:9")
    assert (ran.code != 0, len(ran.error_lines)) == (True, 1)
