"""Open WebUI as its makers ship it, given nothing but the server's address on both of its wires.

Its own server is started without a browser, and asked over HTTP as its page does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.clients import talk
from tests.support.ports import free_port

Json = dict[str, object]

_START_SECONDS: Final = 400.0
_TASKS: Final = ("title", "tags", "follow_up", "queries", "emoji")
_WIRES: Final = {"ollama": f"{talk.MODEL}:latest", "openai": talk.MODEL}


class WebUI:
    """A running Open WebUI, as the person who signed up first."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._token = ""

    def text(self, path: str, body: object = None) -> str:
        """What a request gets; with a body it is a POST. Raises urllib.error.HTTPError."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return str(reply.read(), "utf-8")

    def ask(self, path: str, body: object = None) -> Json:
        """`text` as a JSON object."""
        found = json.loads(self.text(path, body))
        assert isinstance(found, dict)
        return found

    def sign_up(self) -> None:
        """Become its administrator."""
        person = {"name": "Ada", "email": "ada@example.org", "password": "a-Password-1234"}
        self._token = str(self.ask("/api/v1/auths/signup", person)["token"])

    def is_up(self) -> bool:
        """Whether it answers."""
        try:
            return self.ask("/health") == {"status": True}
        except OSError:
            return False


@pytest.fixture(scope="module")
def webui(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebUI]:
    home = tmp_path_factory.mktemp("open-webui")
    port = free_port()
    command = (str(Path(sys.executable).with_name("open-webui")), "serve")
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            (*command, "--host", "127.0.0.1", "--port", str(port)),
            env=_environment(url, home),
            cwd=home,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            found = WebUI(f"http://127.0.0.1:{port}")
            until = time.monotonic() + _START_SECONDS
            while not found.is_up():
                assert process.poll() is None, (home / "log").read_text()[-2000:]
                assert time.monotonic() < until, "it does not answer"
                time.sleep(1)
            found.sign_up()
            yield found
        finally:
            process.terminate()
            process.wait(30)


def _environment(url: str, home: Path) -> Mapping[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HOME": str(home),
        "DATA_DIR": str(home),
        "WEBUI_SECRET_KEY": "of a test",
        "OLLAMA_BASE_URL": url,
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "RAG_EMBEDDING_ENGINE": "ollama",
        "RAG_OLLAMA_BASE_URL": url,
        "RAG_EMBEDDING_MODEL": talk.EMBEDDING_MODEL,
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
        "ANONYMIZED_TELEMETRY": "false",
        "SCARF_NO_ANALYTICS": "true",
        "DO_NOT_TRACK": "true",
    }


def asked(model: str, **fields: object) -> Json:
    """A conversation of one message."""
    return {"model": model, "messages": [{"role": "user", "content": talk.HELLO}], **fields}


def answer_in(reply: Json) -> str:
    """The text of a whole reply of its own wire."""
    choices = reply["choices"]
    assert isinstance(choices, list)
    return str(choices[0]["message"]["content"])


def test_models_of_both_wires_are_listed(webui: WebUI) -> None:
    rows = webui.ask("/api/models")["data"]
    assert isinstance(rows, list)
    listed = {(row["id"], row["owned_by"]) for row in rows}
    assert {(model, wire) for wire, model in _WIRES.items()} <= listed
    assert webui.ask("/ollama/api/version")["version"]
    assert webui.ask("/ollama/api/ps")["models"]
    assert webui.ask("/ollama/api/show", {"model": _WIRES["ollama"]})["capabilities"]


@pytest.mark.parametrize("model", _WIRES.values(), ids=_WIRES)
def test_chat(webui: WebUI, model: str) -> None:
    assert answer_in(webui.ask("/api/chat/completions", asked(model))) == talk.HELLO_ANSWER


@pytest.mark.parametrize("model", _WIRES.values(), ids=_WIRES)
def test_stream(webui: WebUI, model: str) -> None:
    lines = webui.text("/api/chat/completions", asked(model, stream=True)).split("\n\n")
    *parts, last = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    deltas = [json.loads(part)["choices"] for part in parts]
    texts = [choices[0]["delta"].get("content") or "" for choices in deltas if choices]
    assert ("".join(texts), last) == (talk.HELLO_ANSWER, "[DONE]")


@pytest.mark.parametrize("task", _TASKS)
@pytest.mark.parametrize("model", _WIRES.values(), ids=_WIRES)
def test_tasks(webui: WebUI, model: str, task: str) -> None:
    """What it asks in the background: titles, tags, further questions, searches, a symbol."""
    body = asked(model, chat_id="1", message_id="2", prompt=talk.HELLO, type="retrieval")
    assert answer_in(webui.ask(f"/api/v1/tasks/{task}/completions", body))


def test_settings_of_a_chat(webui: WebUI) -> None:
    """What its page sends once a person has set it."""
    params = {"temperature": 0.0, "top_k": 40, "num_ctx": 2048, "repeat_last_n": 64, "seed": 1}
    reply = webui.ask("/api/chat/completions", asked(_WIRES["ollama"], params=params))
    assert answer_in(reply) == talk.HELLO_ANSWER


def test_a_stop_is_honoured(webui: WebUI) -> None:
    body = asked(_WIRES["ollama"], stop=[talk.COUNT_STOP])
    body["messages"] = [{"role": "user", "content": talk.COUNT}]
    assert answer_in(webui.ask("/api/chat/completions", body)) == talk.COUNT_TO_STOP


def test_vectors_of_documents(webui: WebUI) -> None:
    """What it asks before it can search a document, whichever way its page is set."""
    body = {"model": f"{talk.EMBEDDING_MODEL}:latest", "input": list(talk.EMBEDDED)}
    found = webui.ask("/ollama/api/embed", body)["embeddings"]
    assert talk.are_vectors(found)  # type: ignore[arg-type]
    rows = webui.ask("/api/embeddings", body)["data"]
    assert isinstance(rows, list)
    assert talk.are_vectors([row["embedding"] for row in rows])


def test_a_document_is_read_and_found(webui: WebUI) -> None:
    """Its own store of vectors, filled with ours."""
    text = {"content": talk.WEATHER_FOUND, "name": "weather"}
    assert webui.ask("/api/v1/retrieval/process/text", text)["status"] is True


def test_what_it_may_not_pull_is_said(webui: WebUI) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        webui.text("/ollama/api/pull", {"model": "org/name"})
    assert "semantic models pull" in caught.value.read().decode()
