"""Processes that end at any moment, and several on one store: the next process goes on.

What a process said before it was killed is compared with a cold run of plain mlx-lm.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self, TypedDict, cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm import load

from semantic.adapters.stores.disk.store import DiskStore
from tests.support.durable import EVERY_ARCHITECTURE
from tests.support.durable_worker import MAX_TOKENS
from tests.support.lanes import THOROUGH, examples
from tests.support.own_process import OwnProcess
from tests.support.reference import generate

pytestmark = pytest.mark.process

_ROOT = Path(__file__).resolve().parents[2]
_EMBEDDED = _ROOT / "src/semantic/models/semantic-tiny"
_EOS = frozenset({0})
_KILLS = examples(5, thorough=25)
_MOST_LIVES = 4 * _KILLS
_MOMENTS = ("go", "asked", "turn", "flushing", "safe")
"""Signs of the worker after which it is killed, each once in as many lives."""
_MOST_SPINS = {"go": 1 << 21, "asked": 1 << 19}
"""Steps of an empty loop from the sign to the latest kill, for as long as what has begun takes."""
_FEW_SPINS = 1 << 15
"""The same where what has begun takes less time."""
_MOST_LINES = 6
"""That many lines of a kind are awaited at most."""
_STUCK_S = 120.0
"""Seconds after which a worker that says nothing is taken for stuck."""
_CHECKED_TURNS = 4
"""Of each life so many turns are computed again, cold."""


class Turn(TypedDict):
    """As the worker says it."""

    agent: str
    prompt: list[int]
    tokens: list[int]
    cached: int
    source: str


class Found(TypedDict):
    """What was saved of an agent: all its tokens, and how many were the last prompt."""

    tokens: list[int]
    n_prompt: int


def past_of(turn: Turn) -> tuple[int, ...]:
    """What the agent holds after the turn."""
    return (*turn["prompt"], *turn["tokens"])


@functools.cache
def embedded_model() -> Module:
    """The embedded model as plain mlx-lm loads it, in the type that the engine computes with."""
    model = cast(Module, load(str(_EMBEDDED))[0])
    if mx.default_device() == mx.Device(mx.cpu):
        model.set_dtype(mx.float32)
    return model


def require_right(turns: Sequence[Turn], draw: random.Random) -> None:
    """Some of these answers are those of a cold run; the last ones always."""
    older = list(turns[:-1])
    for turn in (*turns[-1:], *draw.sample(older, min(len(older), _CHECKED_TURNS - 1))):
        expected = generate(embedded_model(), turn["prompt"], MAX_TOKENS, _EOS)
        assert turn["tokens"] == expected, (turn["agent"], len(turn["prompt"]), turn["cached"])


class Worker:
    """One process. It loads the model at once and waits to be let go; killed at the end."""

    def __init__(self, folder: Path, seed: int, agents: Sequence[str]) -> None:
        self._said: list[str] = []
        self._process = OwnProcess("tests.support.durable_worker:main", folder, seed, *agents)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def go(self) -> None:
        """Return when the model is loaded and the store is being opened."""
        self.await_lines("loaded")
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def await_lines(self, event: str, n: int = 1) -> None:
        """Return when it has said `n` more lines of that kind."""
        watch = threading.Timer(_STUCK_S, self._process.kill)
        watch.start()
        try:
            while n:
                line = self._process.stdout.readline()
                assert line.endswith("\n"), f"it ended before it said {event!r}"
                self._said.append(line)
                n -= json.loads(line)["event"] == event
        finally:
            watch.cancel()

    def kill(self) -> Life:
        """End it now, wherever it is; what it had said."""
        self._process.kill()
        return self._rest(-9)

    def stop(self) -> Life:
        """Let it end by itself after the turns it is in."""
        return self._rest(0)

    def _rest(self, status: int) -> Life:
        code, said, errors = self._process.finish(_STUCK_S)
        assert code == status, errors
        assert "Traceback" not in errors, errors
        return Life("".join(self._said) + said)


class Life:
    """What a process said; a line that it was killed in does not count."""

    def __init__(self, out: str) -> None:
        said = [json.loads(line) for line in out.splitlines(keepends=True) if line[-1] == "\n"]
        self.found: dict[str, Found] | None = None
        self.turns: list[Turn] = []
        self.damaged: int | None = None
        self._n_safe = 0
        for one in said:
            match one.pop("event"):
                case "opened":
                    self.found = one["found"]
                case "turn":
                    self.turns.append(one)
                case "safe":
                    self._n_safe = len(self.turns)
                case "closed":
                    self.damaged = one["damaged"]

    @property
    def safe(self) -> dict[str, int]:
        """The number of each agent's last turn before the last flush."""
        return {turn["agent"]: i for i, turn in enumerate(self.turns[: self._n_safe])}


def require_sound(folder: Path) -> None:
    """Every byte of the store is what it should be."""
    store = DiskStore.open(folder, 1 << 30)
    report = store.check(read_data=True)
    damaged = store.stats()[0].counts["damaged"]
    store.close()
    assert report.is_clean, report.damaged
    assert not report.foreign
    assert damaged == 0


def workers(folder: Path, agents: Sequence[str], n: int) -> Generator[Worker, None, None]:
    """At most `n` processes one after the other; the next loads while one runs."""
    with ExitStack() as running:
        waiting = running.enter_context(Worker(folder, 0, agents))
        for seed in range(1, n + 1):
            current, waiting = waiting, running.enter_context(Worker(folder, seed, agents))
            yield current


def moments(draw: random.Random) -> Iterator[str]:
    """Kinds of lines, without end: each once before any comes again."""
    while True:
        yield from draw.sample(_MOMENTS, len(_MOMENTS))


def await_end(worker: Worker, moment: str, draw: random.Random) -> None:
    """Return in the middle of what the worker does after a line of the kind `moment`.

    Lines are counted and seconds are not: a slow machine says as much before a kill as a fast one.
    """
    if moment != "go":
        worker.await_lines(moment, draw.randint(1, _MOST_LINES))
    for _ in range(draw.randrange(_MOST_SPINS.get(moment, _FEW_SPINS))):
        pass


@pytest.mark.long
def test_agents_go_on_after_kill_9_at_any_moment(tmp_path: Path) -> None:
    folder, agents = tmp_path / "store", ["ann", "ben", "cay"]
    seed = random.randrange(10**6) if THOROUGH else 1
    sys.stdout.write(f"seed {seed}\n")  # shown when the test fails
    draw = random.Random(seed)
    answered: dict[str, list[tuple[int, ...]]] = {agent: [] for agent in agents}
    saved: dict[str, int] = dict.fromkeys(agents, 0)
    n_resumed = 0

    def has_seen_enough(n_lives: int) -> bool:
        enough = all(len(turns) > _KILLS // 4 for turns in answered.values())
        return n_lives >= _KILLS and n_resumed > _KILLS // 2 and enough

    with closing(workers(folder, agents, _MOST_LIVES)) as lives:
        for n_lives, (worker, moment) in enumerate(zip(lives, moments(draw), strict=False), 1):
            worker.go()
            await_end(worker, moment, draw)
            life = worker.kill()
            if life.found is not None:
                for agent, past in answered.items():
                    require_newest(life.found.get(agent), past, len(past) - saved[agent])
            for agent, number in life.safe.items():
                before = sum(turn["agent"] == agent for turn in life.turns[: number + 1])
                saved[agent] = len(answered[agent]) + before
            n_resumed += resumed(life)
            for turn in life.turns:
                answered[turn["agent"]].append(past_of(turn))
            require_right(life.turns, draw)
            require_sound(folder)
            if has_seen_enough(n_lives):
                break
        else:
            raise AssertionError(f"{n_resumed} agents went on in {_MOST_LIVES} lives")


def require_newest(found: Found | None, past: Sequence[tuple[int, ...]], n_lost: int) -> None:
    """What is saved is one of the last turns of `past`, or one that there was no time to say.

    The last `n_lost` of `past` were not flushed.
    """
    n_older = max(0, len(past) - n_lost - 1)
    if found is None:
        assert len(past) == n_lost, "a turn that was flushed is gone"
        return
    tokens, n_prompt = tuple(found["tokens"]), found["n_prompt"]
    assert tokens not in past[:n_older], "an older turn came back"
    if tokens in past:
        return
    expected = generate(embedded_model(), tokens[:n_prompt], MAX_TOKENS, _EOS)
    assert list(tokens[n_prompt:]) == expected


def resumed(life: Life) -> int:
    """How many agents went on with all that was saved of them."""
    found = life.found or {}
    firsts = {turn["agent"]: turn for turn in reversed(life.turns)}
    n = 0
    for agent, turn in firsts.items():
        past = found[agent]["tokens"] if agent in found else []
        if past and turn["prompt"][: len(past)] == past:
            assert turn["cached"] == len(past), turn
            n += 1
    return n


def test_two_processes_share_agents_and_one_is_killed(tmp_path: Path) -> None:
    folder, draw = tmp_path / "store", random.Random(1)
    for turns_of_first in (1, 30) if THOROUGH else (10,):
        with (
            Worker(folder, 1, ["ann", "ben", "cay"]) as first,
            Worker(folder, 2, ["ben", "cay", "dan"]) as second,
        ):
            first.go()
            second.go()
            first.await_lines("turn", turns_of_first)
            killed = first.kill()
            second.await_lines("turn", 10)
            ended = second.stop()
        assert ended.damaged == 0
        assert len(ended.turns) >= 10
        require_right(killed.turns, draw)
        require_right(ended.turns, draw)
        require_sound(folder)


def test_another_process_goes_on_with_the_same_bytes_and_tokens(tmp_path: Path) -> None:
    """The first is killed, with all its stores open."""
    function = "tests.support.durable_resume:main"
    with closing(OwnProcess(function, tmp_path, *EVERY_ARCHITECTURE)) as first:
        saved = dict(_fields(first.stdout.readline()) for _ in EVERY_ARCHITECTURE)
        first.kill()
        assert first.wait() == -9
    with closing(OwnProcess(function, tmp_path, *EVERY_ARCHITECTURE)) as second:
        code, said, errors = second.finish(_STUCK_S)
    assert code == 0, errors
    went_on = dict(map(_fields, said.splitlines()))
    assert went_on.keys() == saved.keys() == set(EVERY_ARCHITECTURE)
    for architecture, (*_, left) in saved.items():
        assert went_on[architecture][:4] == [left, "571", "571", "disk"], architecture


def _fields(line: str) -> tuple[str, list[str]]:
    architecture, *fields = line.rstrip("\n").split("\t")
    return architecture, fields
