"""`semantic code`: from nothing to a coding agent's turns, with a real server and a hub of ours."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semantic.cli.models.choosing import suggestions
from semantic.composition.framework import read_device
from semantic_server.clients.shared_server import answers
from tests.agents.model import ANSWER, write_model
from tests.cli.support import ROOT
from tests.support.model_hub import Hub, running_hub
from tests.support.ports import free_port
from tests.support.serve_process import OURS, served

pytestmark = [pytest.mark.process, pytest.mark.mlx]

AGENT = """#!{python}
import json, os, sys, time
from urllib.request import Request, urlopen

def ask(messages):
    provider = settings["provider"]["semantic"]
    (model,) = provider["models"]
    body = {{"model": model, "messages": messages, "temperature": 0}}
    request = Request(provider["options"]["baseURL"] + "/chat/completions",
        json.dumps(body).encode(), {{"content-type": "application/json", "x-agent-id": "it"}})
    answer = json.load(urlopen(request))
    return answer["choices"][0]["message"], answer["usage"]

settings = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])
first = {{"role": "user", "content": "<tool_response>" + "word " * 200}}
said, before = ask([first])
_, usage = ask([first, said, {{"role": "user", "content": "and again"}}])
report = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "text": said["content"]}}
report["cached"] = usage["prompt_tokens_details"]["cached_tokens"]
report["prompt"] = usage["prompt_tokens"]
report["restored"] = before["prompt_tokens_details"]["cached_tokens"]
json.dump(report, open(sys.argv[1], "w"))
while not os.path.exists(sys.argv[1] + ".end"):
    time.sleep(0.02)
sys.exit(7)
"""


class Place:
    """A user's folders, a project, the port of a server, and programs that stand for agents."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder, self.hub, self.port = folder, hub, free_port()
        self.project = folder / "project"
        self.bin = folder / "bin"
        for one in (self.project, self.bin, folder / "home"):
            one.mkdir()
        self.install("opencode")

    def install(self, name: str) -> None:
        path = self.bin / name
        path.write_text(AGENT.format(python=sys.executable))
        path.chmod(0o755)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "semantic", "code", str(self.project), *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command("--port", str(self.port), *arguments),
            cwd=ROOT,
            env={
                **OURS,
                "HOME": str(self.folder / "home"),
                "PATH": str(self.bin),
                "XDG_STATE_HOME": str(self.folder / "state"),
                "XDG_CONFIG_HOME": str(self.folder / "config"),
                "SEMANTIC_STORE": str(self.folder / "store"),
                "HF_HUB_CACHE": str(self.folder / "hub"),
                "HF_ENDPOINT": self.hub.url,
                "HF_HUB_OFFLINE": "0",
                "LANG": "C.UTF-8",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        with self.start(*arguments) as process:
            text, _ = process.communicate(timeout=120)
            return process.returncode, text

    def report(self, name: str = "report") -> Path:
        return self.folder / name

    def end(self, name: str = "report") -> None:
        """Let an agent end after its turns."""
        self.report(name).with_suffix(".end").touch()

    @property
    def is_served(self) -> bool:
        return answers("127.0.0.1", self.port)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "one"
    write_model(folder, "none", "{}")
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with running_hub() as hub:
        yield Place(tmp_path, hub)


def until(is_so: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not is_so():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def choice() -> tuple[str, str]:
    """The name and the hub id of the model that this machine gets."""
    found = [one.model for one in suggestions(read_device()) if one.is_for_coding]
    if not found:
        pytest.skip("this machine is too small for each known model")
    return found[0].name, found[0].hub_id


def test_from_nothing_to_an_agents_second_turn(place: Place, model: Path) -> None:
    name, hub_id = choice()
    place.hub.add(hub_id, model)
    code, text = place.run("--", str(place.report()))
    assert code == 2, text
    assert f"model: {name}, " in text
    assert "to fetch\n" in text
    assert "add --yes" in text
    assert not (place.folder / "hub").exists()
    place.end()
    code, text = place.run("--yes", "--", str(place.report()), "more")
    assert code == 7, text
    report = json.loads(place.report().read_text())
    assert report["arguments"] == [str(place.report()), "more"]
    assert report["folder"] == str(place.project)
    assert report["text"] == ANSWER
    assert report["cached"] > report["prompt"] * 0.8
    assert not place.is_served
    assert f"with {hub_id}, 131072 tokens of context" in text
    place.hub.restart()  # the hub has nothing now, and the second start needs nothing
    code, text = place.run("--", str(place.report()))
    assert (code, "to fetch" in text) == (7, False)
    assert report["restored"] == 0
    assert json.loads(place.report().read_text())["restored"] > report["prompt"] * 0.8


def test_the_last_of_two_agents_stops_the_server(place: Place, model: Path) -> None:
    with place.start("--model", str(model), "--", str(place.report("a"))) as first:
        until(place.report("a").exists, first)
        with place.start("--", str(place.report("b"))) as second:
            until(place.report("b").exists, second)
            place.end("a")
            assert first.wait(60) == 7
            assert place.is_served
            second.send_signal(signal.SIGTERM)
            assert second.wait(60) == 128 + signal.SIGTERM
            assert "answers already" in (second.stdout or sys.stdin).read()
    assert not place.is_served


def test_a_server_that_ran_before_goes_on(place: Place, tmp_path: Path) -> None:
    with served(tmp_path / "own") as server:
        place.port = int(server.url.rpartition(":")[2])
        place.end()
        code, text = place.run("--", str(place.report()))
        assert (code, "semantic-tiny has 8192 tokens of context" in text) == (2, True)
        assert place.run("--force", "--", str(place.report()))[0] == 7
        code, text = place.run("--force", "--model", "gpt-oss-20b")
        assert code == 2
        assert "expected one of semantic-tiny, default; --port starts another server" in text
        assert place.is_served


def test_what_cannot_be_done_is_one_line_and_changes_nothing(place: Place, model: Path) -> None:
    code, text = place.run("--agent", "codex", "--model", str(model))
    assert (code, "cannot find codex" in text) == (4, True)
    (place.bin / "npm").write_text("#!/bin/sh\necho $* > $HOME/said; exit 3\n")
    (place.bin / "npm").chmod(0o755)
    code, text = place.run("--agent", "codex", "--model", str(model), "--yes")
    assert (code, "npm ended with 3" in text) == (4, True)
    said = (place.folder / "home" / "said").read_text()
    assert said == "install -g @openai/codex\n"
    code, text = place.run("--model", "semantic-tiny")
    assert (code, "semantic-tiny has 8192 tokens of context" in text) == (2, True)
    assert not place.is_served


def test_a_server_that_cannot_start_says_why(place: Place, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    write_model(copy, "none", "{}")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, text = place.run("--model", str(copy))
    assert code == 4, text
    assert "cannot start the server: " in text
    assert "its log: " in text
