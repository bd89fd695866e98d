"""`python -m benchmarks.agent_prompts`: what does a coding agent send before its user's first word?

Each agent from npm holds one turn in an empty folder, set up by `semantic launch`. Its requests
pass a recorder, and servers that refuse every prompt count them. Only counts are kept, because the
texts are their makers'. Needs `python -m experiments.smollm2`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast

from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from experiments.smollm2 import FOLDER, QUANTISED
from tests.agents.agents import AGENTS, Agent
from tests.agents.conversation import Place, launch, port_of, run_program, running_server
from tests.agents.model import CONTEXT, write_model
from tests.agents.network import NOWHERE
from tests.agents.packages import program_of
from tests.support.http_server import Address, Reply
from tests.support.serve_process import served

QUESTION: Final = "How many tokens is the largest prompt of a coding agent's first turn?"
TOKENIZERS: Final = {"semantic-tiny": "semantic-tiny", "smollm2": str(FOLDER / QUANTISED)}
"""Models, by the name that the result gives to their tokenizers."""
_ROUTES: Final = ("/v1/messages", "/v1/responses", "/v1/chat/completions")
_LIMITS: Final = ("max_tokens", "max_output_tokens", "max_completion_tokens")
_COUNT: Final = re.compile(r"the prompt has (\d+)|prompt is too long: (\d+) tokens")
_CONTEXT: Final = 1
"""Of the servers that count: they refuse each prompt, and say its tokens."""


@dataclass
class Recorder:
    """Passes requests on to the server at `port`, and keeps `asked`: paths and bodies."""

    port: int
    asked: list[tuple[str, bytes]] = field(default_factory=list)

    def reply(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        """The server's whole reply."""
        if body is not None and path.partition("?")[0] in _ROUTES:
            self.asked.append((path, body))
        return Address(self.port).ask(method, path, body, headers)


@contextmanager
def recording(port: int) -> Iterator[tuple[str, Recorder]]:
    """A recorder's address, and the recorder."""
    recorder = Recorder(port)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            self._pass_on(body)

        def do_GET(self) -> None:
            self._pass_on(None)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Log nothing."""

        def _pass_on(self, body: bytes | None) -> None:
            own = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            reply = recorder.reply(self.command, self.path, body, own)
            self.send_response(reply.status)
            self.send_header("content-type", reply.headers.get("content-type", ""))
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", recorder
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def first_turn(agent: Agent, folder: Path) -> list[tuple[str, bytes]]:
    """The paths and bodies of the requests of an agent's first turn."""
    place = Place(folder / agent.name, program_of(agent), NOWHERE)
    place.home.mkdir(parents=True)
    place.work.mkdir()
    write_model(place.model, agent.tool, agent.arguments)
    with running_server(place) as servers, recording(port_of(servers)) as (url, recorder):
        launch(agent, place, url)
        run_program(place, agent, (*agent.begin, "Say hello."))
    return recorder.asked


def counted(port: int, path: str, body: bytes) -> int:
    """The tokens of a request's rendered prompt. Raises ValueError if the server does not say."""
    reply = Address(port).ask("POST", path, body).body.decode()
    found = _COUNT.search(reply)
    if found is None:
        raise ValueError(f"the reply must name the prompt's tokens, got {reply[:300]!r}")
    return int(found[1] or found[2])


def described(agent: Agent, path: str, body: bytes) -> dict[str, Scalar]:
    """A request without its texts; `limit` is the most tokens of an answer that it asks for."""
    document = json.loads(body)
    limits = [document[name] for name in _LIMITS if name in document]
    tools = len(document.get("tools", ()))
    asked = {"limit": limits[0] if limits else None, "tools": tools, "bytes": len(body)}
    return {"agent": agent.name, "version": agent.version, "path": path.partition("?")[0], **asked}


def main(given: Sequence[str] | None = None) -> int:
    """Ask, count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(given)
    started = Run.start(
        "agent_prompts", QUESTION, model="none", parameters={"context": CONTEXT}, seed=0
    )
    with TemporaryDirectory() as name:
        folder = Path(name)
        asked = [(agent, *one) for agent in AGENTS for one in first_turn(agent, folder)]
        samples = [described(*one) for one in asked]
        for tokenizer, model in TOKENIZERS.items():
            flags = ("--model", model, "--max-model-len", str(_CONTEXT), "--served-model-name")
            with served(folder / tokenizer, *flags, "one-sentence") as server:
                for sample, (_, path, body) in zip(samples, asked, strict=True):
                    sample[tokenizer] = counted(port_of([server]), path, body)
    summary: dict[str, Json] = {
        agent.name: largest([one for one in samples if one["agent"] == agent.name])
        for agent in AGENTS
    }
    print(json.dumps(summary, indent=1))
    verdict = Verdict("each agent sends a prompt", len(AGENTS), len(summary), passed=True)
    started.finish(samples, summary, verdict).write(arguments.output / "agent_prompts.json")
    return 0


def largest(samples: Sequence[dict[str, Scalar]]) -> dict[str, Json]:
    """The request with the largest body."""
    return {**max(samples, key=lambda one: cast(int, one["bytes"]))}


if __name__ == "__main__":
    sys.exit(main())
