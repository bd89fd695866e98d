"""Processes that end at any moment, and several on one store: the next process goes on.

What a process said before it was killed is compared with a cold run of plain mlx-lm.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TypedDict, cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm import load

from semantic.adapters.stores.disk.store import DiskStore
from tests.support.durable import EVERY_ARCHITECTURE, digest_of, running, text
from tests.support.durable_worker import MAX_TOKENS
from tests.support.lanes import THOROUGH, examples
from tests.support.reference import generate

pytestmark = pytest.mark.process

_ROOT = Path(__file__).resolve().parents[2]
_EMBEDDED = _ROOT / "src/semantic/models/semantic-tiny"
_EOS = frozenset({0})
_KILLS = examples(5, thorough=25)
_MOST_LIVES = 4 * _KILLS
"""On a machine that has much else to do, most are killed before they have said anything."""
_LONGEST_LIFE = 1.2
"""Seconds from the opening of the store to the latest kill."""
_CHECKED_TURNS = 4
"""Of each life so many turns are computed again, cold."""


class Turn(TypedDict):
    """As the worker says it."""

    agent: str
    prompt: list[int]
    tokens: list[int]
    cached: int
    source: str
    end: str


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
    """One process. It loads the model at once and waits to be let go."""

    def __init__(self, folder: Path, seed: int, agents: Sequence[str]) -> None:
        module = "tests.support.durable_worker"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(seed), *agents],
            cwd=_ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def go(self) -> None:
        """Return when the model is loaded and the store is being opened."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.kill()
        assert json.loads(line) == {"event": "loaded"}
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def kill(self) -> Life:
        """End it now, wherever it is; what it had said."""
        self._process.kill()
        return self._rest(-9)

    def stop(self) -> Life:
        """Let it end by itself after the turns it is in."""
        return self._rest(0)

    def _rest(self, status: int) -> Life:
        out, err = self._process.communicate(timeout=60)
        assert self._process.returncode == status, err
        assert "Traceback" not in err, err
        return Life(out)


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


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}"}


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
    waiting = Worker(folder, 0, agents)
    try:
        for seed in range(1, n + 1):
            current, waiting = waiting, Worker(folder, seed, agents)
            yield current
    finally:
        waiting.kill()


@pytest.mark.long
def test_agents_go_on_after_kill_9_at_any_moment(tmp_path: Path) -> None:
    folder, agents = tmp_path / "store", ["ann", "ben", "cay"]
    seed = random.randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")  # shown when the test fails
    draw = random.Random(seed)
    answered: dict[str, list[tuple[int, ...]]] = {agent: [] for agent in agents}
    saved: dict[str, int] = dict.fromkeys(agents, 0)
    n_resumed = 0

    def has_seen_enough(n_lives: int) -> bool:
        enough = all(len(turns) > _KILLS // 4 for turns in answered.values())
        return n_lives >= _KILLS and n_resumed > _KILLS // 2 and enough

    lives = workers(folder, agents, _MOST_LIVES)
    for n_lives, worker in enumerate(lives, 1):
        worker.go()
        time.sleep(draw.uniform(0, _LONGEST_LIFE))
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
    lives.close()


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
            assert turn["cached"] == len(past) or turn["end"] == "slower", turn
            n += turn["cached"] == len(past)
    return n


def test_two_processes_share_agents_and_one_is_killed(tmp_path: Path) -> None:
    folder, draw = tmp_path / "store", random.Random(1)
    for life_of_first in (0.3, 2.0) if THOROUGH else (1.0,):
        first = Worker(folder, 1, ["ann", "ben", "cay"])
        second = Worker(folder, 2, ["ben", "cay", "dan"])
        first.go()
        second.go()
        time.sleep(life_of_first)
        killed = first.kill()
        time.sleep(1.0)
        ended = second.stop()
        assert ended.damaged == 0
        assert ended.turns
        require_right(killed.turns, draw)
        require_right(ended.turns, draw)
        require_sound(folder)


def test_another_process_goes_on_with_the_same_bytes_and_tokens(tmp_path: Path) -> None:
    saved = {}
    for architecture in EVERY_ARCHITECTURE:
        with running(architecture, tmp_path / architecture) as life:
            life.ask("ann", text(560, seed=1), 10)
            saved[architecture] = digest_of(life.bodies("ann"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.durable_resume", str(tmp_path), *EVERY_ARCHITECTURE],
        cwd=_ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{architecture}\t{digest}\t570\t570\tdisk" for architecture, digest in saved.items()
    ]
