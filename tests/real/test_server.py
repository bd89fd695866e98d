"""`semantic serve` with the real model: every wire, and three agents whose server is killed.

Each answer is compared with plain mlx-lm's to the same messages. The agents' conversation is kept
in `build/real`, for a person to read.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from experiments.smollm2 import FOLDER
from experiments.subjects import Subject
from tests.real.likely import texts
from tests.support.http_server import Address
from tests.support.serve_process import OURS, ROOT, ServeProcess
from tests.support.wires import WIRES, Heard, Json, Wire

pytestmark = pytest.mark.process

_NEW = 40
_LIVES = 2
"""Each ends while an answer streams."""
_ROUNDS = 2
"""Answers of each agent in a life."""
_LIMITS: dict[str, Json] = {
    "chat": {"max_tokens": _NEW},
    "messages": {"max_tokens": _NEW, "thinking": {"type": "disabled"}},
    "responses": {"max_output_tokens": _NEW},
    "ollama": {"options": {"num_predict": _NEW}},
}
AGENTS = {
    "Ann": ("chat", "You are Ann. You like mountains. Answer in one short sentence."),
    "Ben": ("messages", "You are Ben. You like the sea. Answer in one short sentence."),
    "Cleo": ("responses", "You are Cleo. You decide for all. Answer in one short sentence."),
}
OPENING = "Where shall the three of us go on Sunday?"


@contextmanager
def serving(subject: Subject, store: Path) -> Iterator[tuple[ServeProcess, Address]]:
    """A server of the model; it is killed at the end."""
    command = (sys.executable, "-m", "semantic", "serve", "--port", "0", "--store", str(store))
    model = ("--model", str(FOLDER / subject.name))
    process = ServeProcess((*command, *model), {**os.environ, **OURS})
    try:
        process.wait_ready()
        port = urlsplit(process.url).port
        assert port is not None
        yield process, Address(port)
    finally:
        process.kill()


class Agent:
    """One agent on its wire, and the messages as plain mlx-lm gets them."""

    def __init__(self, wire: str, system: str = "", *, streams: bool = True) -> None:
        self.wire: Wire = WIRES[wire]((), streams=streams)
        self.more: Json = dict(_LIMITS[wire])
        self.messages: list[dict[str, str]] = []
        if system:
            self.messages.append({"role": "system", "content": system})
            if wire == "messages":
                self.more["system"] = system
            elif wire == "responses":
                self.more["instructions"] = system
            else:
                self.wire.items.append({"role": "system", "content": system})

    def hear(self, text: str) -> None:
        self.wire.user(text)
        self.messages.append({"role": "user", "content": text})

    def ask(self, subject: Subject, server: Address) -> Heard:
        """Its answer, which plain mlx-lm might have given."""
        heard = self.wire.ask(server, self.more)
        assert heard.text in texts(subject, self.messages, _NEW)
        self.messages.append({"role": "assistant", "content": heard.text})
        return heard

    def begin(self, server: Address) -> HTTPConnection:
        """A request whose answer has begun to stream."""
        connection = HTTPConnection("127.0.0.1", server.port)
        body = json.dumps(self.wire.body() | self.more)
        connection.request("POST", self.wire.path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.readline()
        return connection


def test_every_wire_gives_the_answer_of_mlx_lm(subject: Subject, tmp_path: Path) -> None:
    with serving(subject, tmp_path) as (_, server):
        for wire in WIRES:
            for streams in (True, False):
                agent = Agent(wire, streams=streams)
                agent.hear("What is the capital of France?")
                assert "Paris" in agent.ask(subject, server).text
                agent.hear("And of Italy?")
                agent.ask(subject, server)


def test_three_agents_talk_and_a_killed_server_changes_no_answer(
    subject: Subject, tmp_path: Path
) -> None:
    agents = {name: Agent(*given) for name, given in AGENTS.items()}
    agents["Ann"].hear(OPENING)
    lines, first = [f"**You**: {OPENING}"], list[Heard]()
    for _ in range(_LIVES):
        with serving(subject, tmp_path) as (process, server):
            rounds = [list(round_of(agents, subject, server)) for _ in range(_ROUNDS)]
            killed = agents["Ann"].begin(server)
            process.kill()
            killed.close()
        lines += [f"**{name}**: {heard.text}" for said in rounds for name, heard in said]
        first = [heard for _, heard in rounds[0]]
    keep(subject.name, lines)
    assert sum(heard.cached or 0 for heard in first) > sum(heard.prompt for heard in first) / 2


def round_of(
    agents: dict[str, Agent], subject: Subject, server: Address
) -> Iterator[tuple[str, Heard]]:
    """Each agent answers what the one before said; the next hears it."""
    names = list(agents)
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        heard = agents[name].ask(subject, server)
        agents[following].hear(f"{name} says: {heard.text}")
        yield name, heard


def keep(name: str, lines: Sequence[str]) -> None:
    folder = ROOT / "build" / "real"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text("\n\n".join([f"# {name}", *lines, ""]), encoding="utf-8")
