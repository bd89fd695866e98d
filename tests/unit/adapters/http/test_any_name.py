"""A model that every name means: each API answers, and gives the name of the request."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from semantic.ports.serving import ServedModel
from semantic_server.http import context
from semantic_server.http.app import create_app
from semantic_server.http.logs import WarnOnce
from tests.support.fake_serving import FakeServing

Json = dict[str, object]

NAME = "gpt-9:latest"
HELLO: Json = {"messages": [{"role": "user", "content": "Hello"}]}
WIRES: dict[str, Json] = {
    "/v1/chat/completions": HELLO,
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {**HELLO, "max_tokens": 9},
    "/api/chat": HELLO,
    "/api/generate": {"prompt": "Hello"},
}


class OneModel(FakeServing):
    """Any name means the model."""

    @property
    def model(self) -> ServedModel:
        """See `ServingPort.model`."""
        return replace(super().model, any_name=True)


CLIENT = TestClient(create_app(OneModel()), "http://127.0.0.1:8000", raise_server_exceptions=False)


def events(text: str) -> list[Json]:
    """The events of a stream in lines of JSON, or as server-sent events."""
    lines = (line.removeprefix("data: ") for line in text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("path", WIRES)
def test_an_answer_gives_the_name_of_the_request(path: str) -> None:
    reply = CLIENT.post(path, json={"model": NAME, "stream": False, **WIRES[path]})
    assert (reply.status_code, reply.json()["model"]) == (200, NAME)


@pytest.mark.parametrize("path", WIRES)
def test_a_stream_gives_the_name_of_the_request(path: str) -> None:
    found = events(CLIENT.post(path, json={"model": NAME, "stream": True, **WIRES[path]}).text)
    inner = (one for event in found for one in (event, event.get("response"), event.get("message")))
    names = [one["model"] for one in inner if isinstance(one, dict) and "model" in one]
    assert names
    assert set(names) == {NAME}


def test_the_log_says_once_which_model_answers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_names", WarnOnce())
    with caplog.at_level(logging.WARNING, "semantic.server"):
        for name in ("a\nb", "a\nb", "fake"):
            CLIENT.post("/v1/chat/completions", json={"model": name, **HELLO})
    assert caplog.messages == ["requests name the model 'a\\nb': fake answers"]


def test_a_long_name_would_repeat_in_every_event() -> None:
    name = "x" * 201
    reply = CLIENT.post("/v1/chat/completions", json={"model": name, **HELLO})
    assert reply.status_code == 404
    assert CLIENT.get(f"/v1/models/{name[1:]}").json()["id"] == name[1:]


def test_lists_have_only_the_model_s_own_names() -> None:
    listed = CLIENT.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["fake", "default"]
