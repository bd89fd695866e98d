"""A session of ten turns of an agent with a model of a family: it edits a file, calls two tools at
once, looks at a picture and is interrupted; the server stops and is killed in between."""

from __future__ import annotations

import base64
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from tests.agents.agents import Agent, Stranger
from tests.agents.conversation import (
    TURN_SECONDS,
    CheckFailedError,
    Place,
    check_log,
    filled,
    launch,
    port_of,
    run_program,
    running_server,
    started,
)
from tests.agents.hands import HANDS, Hands
from tests.agents.terminal import Terminal
from tests.families.sessions import NEW, OLD, SPEAKERS, Call, Step
from tests.support.families import OURS, REAL
from tests.support.http_server import until
from tests.support.scripted_model import write_script
from tests.support.serve_process import ServeProcess
from tests.support.wires import PIXEL

FAMILIES: Final = ("harmony", "kimi", "mistral", "glm")
LEAST_CACHED: Final = 0.95
"""Of the prompts of requests that follow another one of their agent."""

_FILE, _PICTURE, _SIGN = "a.py", "pixel.png", "started"
_ESCAPE: Final = "\x1b"
_TYPING_S: Final = 1.0
"""Between keys that a terminal program takes for one paste otherwise."""
_SESSION: Final = "session-of-this-test"
_NAMED: Final = re.compile(r'"(?:sessionId|taskId)":"([^"]+)"')
# Claude Code takes white space from the ends of the lines that it writes.
_OLD, _NEW = (re.sub(r"[ \t]+\n", "\n", text) for text in (OLD, NEW))
_WHOLE: Final = "def f(x):\n{}    return 1\n"
_STOPS_BEFORE: Final = {5: ServeProcess.stop, 6: ServeProcess.kill}
_ANSWERED: Final = re.compile(r" request .*?\bagent=(\S+).*?\bprompt=(\d+).*?\bcached=(\d+)")


@dataclass(frozen=True)
class Turn:
    """A user's words, and what the model answers to them. Afterwards the file has this `inner`
    text; an `interrupted` turn ends while a tool runs."""

    steps: tuple[Step, ...]
    inner: str = _OLD
    interrupted: bool = False


def turns(hands: Hands, work: Path) -> list[Turn]:
    """The session."""
    done = [Step(text=f"Done {number}, and it works.") for number in range(10)]
    file = str(work / _FILE)
    sleep = f"cd {work}; test -e {_SIGN} || {{ touch {_SIGN}; sleep 90; }}"

    def acts(number: int, *answers: Sequence[Call]) -> tuple[Step, ...]:
        steps = [Step(f"Turn {number}, act {at}.", "", tuple(calls))
                 for at, calls in enumerate(answers)]  # fmt: skip
        return (*steps, done[number])

    def edit(old: str, new: str) -> list[list[Call]]:
        whole = (_WHOLE.format(old), _WHOLE.format(new))
        return [[call] for call in hands.edit(file, (old, new), whole)]

    both = [hands.shell("echo one"), hands.shell("echo two")]
    look = [hands.look(str(work / _PICTURE))] if hands.look else [hands.shell("true")]
    return [
        Turn(acts(0, [hands.shell("true")])),
        Turn(acts(1, *edit(_OLD, _NEW)), _NEW),
        Turn(acts(2, both), _NEW),
        Turn(acts(3, look), _NEW),
        Turn((Step("Turn 4.", "", (hands.shell(sleep),)),), _NEW, interrupted=True),
        Turn(acts(5, [hands.shell("true")]), _NEW),
        Turn(acts(6, *edit(_NEW, _OLD)), _OLD),
        Turn(acts(7, [hands.shell("echo three")]), _OLD),
        Turn(
            acts(8, [hands.shell("echo four"), hands.shell("echo five")], *edit(_OLD, _NEW)), _NEW
        ),
        Turn(acts(9), _NEW),
    ]


@dataclass(frozen=True)
class Cached:
    """What the server says of the requests that go on from another one: tokens of their prompts,
    and how many were cached; and of the one with the smallest share."""

    requests: int
    prompt: int
    cached: int
    least: float

    @property
    def share(self) -> float:
        return self.cached / self.prompt if self.prompt else 0.0


def hold_session(agent: Agent | Stranger, place: Place, family: str) -> Cached:
    """Hold it. Raises CheckFailedError."""
    speaks, hands = SPEAKERS[family], HANDS[agent.name]
    place.home.mkdir(parents=True)
    place.work.mkdir()
    (place.work / _FILE).write_text(_WHOLE.format(_OLD), encoding="utf-8")
    (place.work / _PICTURE).write_bytes(base64.b64decode(PIXEL))
    script = turns(hands, place.work)
    steps = [speaks.said(step) for turn in script for step in turn.steps]
    spoken = REAL.get(speaks.template, OURS[speaks.own])
    write_script(place.model, spoken, speaks.answers(spoken, steps))
    with running_server(place) as servers:
        place, arguments = _ready(agent, place, servers[-1].url)
        with _acting(agent, place, arguments) as act:
            for number, turn in enumerate(script):
                if number in _STOPS_BEFORE:
                    _STOPS_BEFORE[number](servers[-1])
                    servers.append(started(place, port_of(servers)))
                act(turn, number)
        servers[-1].stop()
        check_log(line for server in servers for line in server.log)
        found = _cached(line for server in servers for line in server.log)
    if found.share < LEAST_CACHED and not speaks.moves_tools:
        raise CheckFailedError(f"{found.share:.1%} of the prompts were cached")
    return found


def _ready(
    agent: Agent | Stranger, place: Place, url: str
) -> tuple[Place, Callable[[int], tuple[str, ...]]]:
    """The agent set up for the server, and its arguments for a turn."""
    hands = HANDS[agent.name]
    if isinstance(agent, Agent):
        launch(agent, place, url)
        return place, lambda number: hands.go_on if number else hands.begin
    names = {"{url}": url, "{home}": str(place.home)}
    for name, text in agent.files.items():
        (place.home / name).write_text(filled(text, names), encoding="utf-8")
    extra = {name: filled(value, names) for name, value in agent.variables.items()}
    place = replace(place, extra={**place.extra, **extra})
    for command in agent.commands[:-1]:
        run_program(place, agent, tuple(filled(part, names) for part in command))

    def arguments(number: int) -> tuple[str, ...]:
        if number and (place.home / _SESSION).exists():
            names["{session}"] = (place.home / _SESSION).read_text(encoding="utf-8")
        return tuple(filled(part, names) for part in (hands.go_on if number else hands.begin))

    return place, arguments


@contextmanager
def _acting(
    agent: Agent | Stranger, place: Place, arguments: Callable[[int], tuple[str, ...]]
) -> Iterator[Callable[[Turn, int], None]]:
    """What a user does in a turn: starts the agent, or types into its terminal."""
    screen = HANDS[agent.name].screen
    if screen is None:
        yield partial(_run_turn, agent, place, arguments)
        return
    command = (str(place.program), *screen.arguments)
    with Terminal(command, place.work, place.variables()) as terminal:
        terminal.wait(screen.greeting)
        terminal.type(_ESCAPE)
        yield partial(_type_turn, terminal, place)


def _run_turn(
    agent: Agent | Stranger,
    place: Place,
    arguments: Callable[[int], tuple[str, ...]],
    turn: Turn,
    number: int,
) -> None:
    words = (*arguments(number), f"Turn {number}.")
    if turn.interrupted:
        _interrupted(place, words)
        return
    printed = run_program(place, agent, words)
    named = _NAMED.search(printed)
    if named is not None:
        (place.home / _SESSION).write_text(named[1], encoding="utf-8")
    if turn.steps[-1].text not in printed:
        raise CheckFailedError(
            f"turn {number}: expected {turn.steps[-1].text!r} in {printed[-600:]!r}"
        )
    _check(turn, place.work, number)


def _type_turn(terminal: Terminal, place: Place, turn: Turn, number: int) -> None:
    time.sleep(_TYPING_S)
    terminal.type(f"Turn {number}.")
    time.sleep(_TYPING_S)
    terminal.type("\r")
    if turn.interrupted:
        until((place.work / _SIGN).exists)
        terminal.type(_ESCAPE)
        return
    terminal.wait(turn.steps[-1].text)
    _check(turn, place.work, number)


def _check(turn: Turn, work: Path, number: int) -> None:
    found = (work / _FILE).read_text(encoding="utf-8")
    if found != _WHOLE.format(turn.inner):
        raise CheckFailedError(f"turn {number}: the file is {found!r}")


def _interrupted(place: Place, words: tuple[str, ...]) -> None:
    """Run the agent until its tool runs, and interrupt it as Ctrl-C does."""
    program = subprocess.Popen(
        (str(place.program), *words),
        cwd=place.work,
        env=place.variables(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until((place.work / _SIGN).exists)
        program.send_signal(signal.SIGINT)
        program.wait(TURN_SECONDS)
    finally:
        program.kill()


def _cached(lines: Iterator[str]) -> Cached:
    found = [_ANSWERED.search(line) for line in lines]
    known: set[str] = set()
    later: list[tuple[int, int]] = []
    for one in found:
        if one is not None and one[1] in known:
            later.append((int(one[2]), int(one[3])))
        known.add("" if one is None else one[1])
    prompts, cached = (sum(column) for column in zip(*later, strict=True))
    return Cached(len(later), prompts, cached, min(c / p for p, c in later))
