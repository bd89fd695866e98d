"""Vercel's AI SDK in Node, by four of its providers; `ai_sdk.cjs` asks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients import talk
from tests.clients.conftest import PACKAGES_VARIABLE

Json = dict[str, object]
Ask = Callable[[str], Json]

SCRIPT = Path(__file__).with_name("ai_sdk.cjs")


@pytest.fixture(params=["compatible", "chat", "responses", "anthropic"])
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ask(url: str, provider: str) -> Ask:
    """Runs one case of the script, and returns what it prints."""
    node = shutil.which("node")
    assert node is not None

    def run(case: str) -> Json:
        command = (node, SCRIPT, os.environ[PACKAGES_VARIABLE], url, provider, case)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        found: Json = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


def used(usage: object, name: str) -> int:
    """A figure of the SDK's usage."""
    assert isinstance(usage, dict)
    found = usage[name]
    assert isinstance(found, int)
    return found


def test_chat(ask: Ask) -> None:
    found = ask("text")
    assert found["text"] == talk.HELLO_ANSWER
    assert found["finishReason"] == "stop"
    assert used(found["usage"], "outputTokens") > 1


def test_stream(ask: Ask) -> None:
    found = ask("stream")
    pieces = found["pieces"]
    assert isinstance(pieces, list)
    assert "".join(pieces) == talk.HELLO_ANSWER
    assert len(pieces) > 1
    assert found["finishReason"] == "stop"
    assert used(found["usage"], "outputTokens") > 1


def test_turns_are_not_computed_again(ask: Ask) -> None:
    found = ask("turns")
    assert found["text"] == talk.NAME_ANSWER
    usages = found["usages"]
    assert isinstance(usages, list)
    assert used(usages[1], "cachedInputTokens") >= used(usages[0], "inputTokens")


@pytest.mark.parametrize("case", ["object", "stream_object"])
def test_an_object(ask: Ask, case: str) -> None:
    assert ask(case)["city"] in talk.CITIES


def test_a_tool_is_called(ask: Ask) -> None:
    found = ask("tool")
    heard, kinds = found["heard"], found["kinds"]
    assert isinstance(heard, list)
    assert isinstance(kinds, list)
    assert len(heard) == 1
    assert heard[0] in talk.CITIES
    assert {"tool-input-start", "tool-input-delta", "tool-call", "tool-result"} <= set(kinds)
    assert found["finishReason"] == "tool-calls"


def test_an_error_has_a_status(ask: Ask) -> None:
    found = ask("error")
    assert found["status"] == 404
    assert "nobody" in str(found["message"])


@pytest.mark.parametrize("provider", ["compatible", "chat"], indirect=True)
def test_embeddings(ask: Ask) -> None:
    vectors = ask("embeddings")["vectors"]
    assert isinstance(vectors, list)
    assert talk.are_vectors(vectors)
