"""One agent's conversation: it is set up by `semantic launch`, asked twice, and goes on after the
server was stopped and after it was killed. In each turn it runs a tool. What it reports must be
what a warm server gives. At last it is set up anew for a server that wants a key."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tests.agents.agents import Agent, Program, Report, Stranger
from tests.agents.model import ANSWER, CONTEXT, write_model
from tests.support.ports import free_port
from tests.support.serve_process import OURS, ROOT, ServeProcess

LEAST_CACHED: Final = 0.95
"""Of the prompt, from the second turn on."""

TURN_SECONDS: Final = 300
_SHORTEST_PROMPT: Final = 4_000
"""Tokens. An agent's own prompt has more: less would say that it was not sent."""
_TURNS: Final = ("Say hello.", "Say it again.", "And after a restart?", "And after a crash?")
_REQUESTS: Final = 2
"""Of an agent that gets a call it cannot run: the call, and the answer to what became of it."""
_KEY: Final = "the-key-of-this-user"
_KEY_VARIABLE: Final = "SEMANTIC_API_KEY"
_STOPS_BEFORE: Final = {2: ServeProcess.stop, 3: ServeProcess.kill}
"""How the server ends before a turn, by the turn's position."""


class CheckFailedError(Exception):
    """An agent did not get what it should; the text says what."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one conversation is held: a folder of its own, and the agent's program.

    `extra` are variables that the agent gets beside those of an empty account.
    """

    folder: Path
    program: Path
    extra: Mapping[str, str]

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def variables(self) -> dict[str, str]:
        """An account that has nothing, and knows nothing of who runs this."""
        plain = {
            "HOME": str(self.home),
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
        }
        return {**plain, **self.extra}


def hold(agent: Agent, place: Place) -> Iterator[Report]:
    """The agent's report of each turn, as soon as it is known to be good.

    Raises CheckFailedError, ReportError for a report of failure, ServerFailedError.
    """
    place.home.mkdir(parents=True)
    place.work.mkdir()
    write_model(place.model, agent.tool, agent.arguments)
    before: Report | None = None
    with running_server(place) as servers:
        launch(agent, place, servers[-1].url)
        for position, words in enumerate(_TURNS):
            if position in _STOPS_BEFORE:
                _STOPS_BEFORE[position](servers[-1])
                servers.append(started(place, port_of(servers)))
            how = agent.go_on if position else agent.begin
            told = agent.read(run_program(place, agent, (*how, words)))
            report = told.since(before) if before is not None and agent.sums_up else told
            before = told
            _check(report, position)
            yield report
        servers[-1].stop()
        servers.append(started(place, port_of(servers), SEMANTIC_API_KEYS=_KEY))
        _ask_with_key(agent, place, servers[-1].url)
        check_log(line for server in servers for line in server.log)


def meet(agent: Stranger, place: Place) -> None:
    """An agent whose model calls a tool that it does not have gets the call, and goes on.

    Raises CheckFailedError, ServerFailedError.
    """
    place.home.mkdir(parents=True)
    place.work.mkdir()
    write_model(place.model, "no_such_tool", '{"command": "true"}')
    with running_server(place) as servers:
        names = {"{url}": servers[-1].url, "{home}": str(place.home)}
        for name, text in agent.files.items():
            (place.home / name).write_text(filled(text, names), encoding="utf-8")
        extra = {name: filled(value, names) for name, value in agent.variables.items()}
        place = replace(place, extra={**place.extra, **extra})
        for command in agent.commands:
            printed = run_program(place, agent, tuple(filled(part, names) for part in command))
        if ANSWER.strip() not in printed:
            raise CheckFailedError(f"expected {ANSWER!r}, got {printed[-600:]!r}")
        servers[-1].stop()
        asked = [line for line in servers[-1].log if "POST /v1/chat/completions" in line]
        if len(asked) != _REQUESTS:
            raise CheckFailedError(f"expected {_REQUESTS} requests, got {len(asked)}")
        check_log(iter(servers[-1].log))


def filled(text: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(name, value)
    return text


@contextmanager
def running_server(place: Place) -> Iterator[list[ServeProcess]]:
    """All servers of the conversation, the running one last; it is stopped at the end."""
    servers = [started(place, free_port())]
    try:
        yield servers
        servers[-1].stop()
    finally:
        servers[-1].kill()


def port_of(servers: Sequence[ServeProcess]) -> int:
    """The port of all servers of a conversation."""
    return int(servers[0].url.rpartition(":")[2])


def started(place: Place, port: int, **variables: str) -> ServeProcess:
    command = (
        *(sys.executable, "-m", "semantic", "serve", "--port", str(port)),
        *("--model", str(place.model), "--served-model-name", "one-sentence"),
        *("--store", str(place.folder / "store")),
    )
    server = ServeProcess(command, {**place.variables(), **OURS, **variables})
    server.wait_ready()
    return server


def _ask_with_key(agent: Agent, place: Place, url: str) -> None:
    """A server that wants a key gets the user's own, and no file has it."""
    place = replace(place, extra={**place.extra, _KEY_VARIABLE: _KEY})
    launch(agent, place, url)
    report = agent.read(run_program(place, agent, (*agent.begin, _TURNS[0])))
    if report.text.strip() != ANSWER.strip():
        raise CheckFailedError(f"with a key: expected {ANSWER!r}, got {report.text!r:.300}")
    files = [path for path in place.home.rglob("*") if path.is_file()]
    told = [path for path in files if _KEY.encode() in path.read_bytes()]
    if told:
        raise CheckFailedError(f"the key is in {', '.join(map(str, told))}")


def launch(agent: Agent, place: Place, url: str) -> None:
    """The settings are those that a user would get."""
    command = (sys.executable, "-m", "semantic", "launch", agent.name, "--url", url, "--write")
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**place.variables(), **OURS},
        capture_output=True,
        text=True,
        check=False,
        timeout=TURN_SECONDS,
    )
    if done.returncode:
        raise CheckFailedError(f"semantic launch ended with {done.returncode}: {done.stderr}")


def run_program(place: Place, agent: Program, arguments: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(
            (str(place.program), *arguments),
            cwd=place.work,
            env=place.variables(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=TURN_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise CheckFailedError(f"{agent.name} did not end in {TURN_SECONDS} seconds") from None
    if done.returncode:
        told = f"{done.stderr.strip()} {done.stdout.strip()}"[-900:]
        raise CheckFailedError(f"{agent.name} ended with {done.returncode}: {told}")
    return done.stdout


def _check(report: Report, position: int) -> None:
    turn = f"turn {position + 1}"
    if report.text.strip() != ANSWER.strip():
        raise CheckFailedError(f"{turn}: expected {ANSWER!r}, got {report.text!r:.300}")
    if report.prompt_tokens < _SHORTEST_PROMPT:
        raise CheckFailedError(f"{turn}: a prompt of {report.prompt_tokens} tokens is not its own")
    if report.context not in {None, CONTEXT}:
        raise CheckFailedError(f"{turn}: it takes the context for {report.context}, not {CONTEXT}")
    if position and report.cached_share < LEAST_CACHED:
        raise CheckFailedError(
            f"{turn}: {report.cached_tokens} of {report.prompt_tokens} tokens were cached; "
            f"expected {LEAST_CACHED:.0%}"
        )


def check_log(lines: Iterator[str]) -> None:
    bad = [line for line in lines if " error " in line or "status=5" in line]
    if bad:
        raise CheckFailedError("the server's log tells of a failure: " + " | ".join(bad[:3]))
