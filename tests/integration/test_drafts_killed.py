"""Processes that are killed in the middle of drafted answers: the next one goes on, drafts from
what is saved, and no answer changes.

Each answer is that of an engine without drafts and store, and a greedy one that of mlx-lm.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from semantic.domain.value_objects import SamplingParams
from tests.support.drafted import DRAFTED
from tests.support.drafted_worker import LONGEST_ANSWER, Life, params_of
from tests.support.lanes import THOROUGH, more
from tests.support.own_process import OwnProcess
from tests.support.reference import is_answer
from tests.support.rig import Rig
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.process

KINDS = ("gemma3", *more("llama", "deepseek_v3", "moe"))
"""Windows, full attention, latents and experts."""
SCHEDULES = 20 if THOROUGH else 1
_MOMENTS = ("drafted", "drafted", "said", "asked", "turn", "safe")
"""Kinds of lines after which a worker is killed; "drafted" is of an answer with drafts."""
_MOST_LINES = {"drafted": 30, "said": 60, "asked": 8, "turn": 8, "safe": 2}
_MOST_SPINS = 1 << 16
"""Steps of an empty loop from a line to the kill, for as long as some steps take."""
_TURNS = 8
"""Turns of a life that ends in order."""
_CHUNKS = (64, 100, 300, 5000)
"""Tokens of a prompt computed at once, to find out where rounding decides."""
_STUCK_S = 120.0
"""Seconds after which a worker that says nothing is taken for stuck."""


@dataclass(slots=True)
class Turn:
    """A turn as far as a worker said it."""

    agent: str
    prompt: tuple[int, ...]
    how: str
    n: int
    tokens: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    cached: int = 0
    source: str = ""
    reason: str | None = None
    """None of a turn that was killed."""


class Told:
    """What a worker said of a life; a line that it was killed in does not count."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.found: dict[str, list[int]] = {}
        self.turns: dict[str, Turn] = {}
        self.preempted = 0
        self.damaged: int | None = None
        for line in lines:
            if line.endswith("\n"):
                self._hear(json.loads(line))

    def _hear(self, said: dict[str, object]) -> None:
        match said:
            case {"event": "opened", "found": dict(found)}:
                self.found = found
            case {"event": "asked", "uid": str(uid), "agent": str(agent), "prompt": list(prompt),
                  "how": str(how), "n": int(n)}:  # fmt: skip
                self.turns[uid] = Turn(agent, tuple(prompt), how, n)
            case {"event": "said", "tokens": dict(tokens), "drafted": dict(drafted)}:
                for uid, new in tokens.items():
                    self.turns[uid].tokens += new
                for uid, (n_drafted, n_accepted) in drafted.items():
                    turn = self.turns[uid]
                    turn.drafted, turn.accepted = n_drafted, n_accepted
            case {"event": "turn", "uid": str(uid), "tokens": list(tokens), "reason": str(reason),
                  "cached": int(cached), "source": str(source),
                  "counts": [int(n_drafted), int(n_accepted)]}:  # fmt: skip
                turn = self.turns[uid]
                assert turn.tokens == tokens, "the steps' tokens are not the answer"
                turn.drafted, turn.accepted = n_drafted, n_accepted
                turn.reason, turn.cached, turn.source = reason, cached, source
            case {"event": "closed", "damaged": int(damaged), "preempted": int(preempted)}:
                self.damaged, self.preempted = damaged, preempted

    @property
    def killed(self) -> list[Turn]:
        """Turns that had not ended."""
        return [turn for turn in self.turns.values() if turn.reason is None]

    @property
    def resumed(self) -> list[Turn]:
        """Agents' first turns, if they continue all that was saved of the agent."""
        firsts = {turn.agent: turn for turn in reversed(self.turns.values())}
        return [
            turn
            for agent, turn in firsts.items()
            if turn.how == "on" and turn.reason == "length" and agent in self.found
        ]


def is_of(kind: str, said: dict[str, object]) -> bool:
    """Whether a line is of the kind."""
    match said:
        case {"event": "said", "drafted": dict(drafted)} if kind == "drafted":
            return any(n_drafted for n_drafted, _ in drafted.values())
    return said["event"] == kind


class Worker:
    """One process with a model. It is killed at the end."""

    def __init__(self, kind: str) -> None:
        self._process = OwnProcess("tests.support.drafted_worker:main", kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def live(self, life: Life) -> Told:
        """Let the agents live, to the end."""
        self._begin(life)
        lines: list[str] = []
        self._await("closed", 1, lines)
        return Told(lines)

    def live_until_killed(self, life: Life, moment: str, draw: random.Random) -> Told:
        """Let the agents live, and kill them in the middle of something after a line of the kind
        `moment`."""
        self._begin(life)
        lines: list[str] = []
        self._await("opened", 1, lines)
        if moment == "drafted" and draw.random() < 0.8:
            self._await("safe", 1, lines)
        self._await(moment, draw.randint(1, _MOST_LINES[moment]), lines)
        for _ in range(draw.randrange(_MOST_SPINS)):
            pass
        self._process.kill()
        code, said, errors = self._process.finish(_STUCK_S)
        assert code == -9, errors
        assert "Traceback" not in errors, errors
        return Told([*lines, *said.splitlines(keepends=True)])

    def _begin(self, life: Life) -> None:
        self._process.stdin.write(json.dumps(life._asdict()) + "\n")
        self._process.stdin.flush()

    def _await(self, event: str, n: int, lines: list[str]) -> None:
        """Read lines until there were `n` of a kind."""
        watch = threading.Timer(_STUCK_S, self._process.kill)
        watch.start()
        try:
            while n:
                line = self._process.stdout.readline()
                if not line.endswith("\n"):
                    _, _, errors = self._process.finish(_STUCK_S)
                    raise AssertionError(f"it ended before it said {event!r}:\n{errors}")
                lines.append(line)
                n -= is_of(event, json.loads(line))
        finally:
            watch.cancel()


def workers(kind: str) -> Generator[Worker, None, None]:
    """Processes one after the other; the next loads while one runs."""
    with ExitStack() as running:
        waiting = running.enter_context(Worker(kind))
        while True:
            current, waiting = waiting, running.enter_context(Worker(kind))
            yield current


class Expected:
    """Answers without drafts and without a store."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def require(self, turns: Sequence[Turn]) -> None:
        """These are the turns' answers, as far as they came."""
        self._compute([turn.prompt for turn in turns])
        for turn in turns:
            self._require_tokens(turn)
            assert turn.reason in {None, "cancelled"} or len(turn.tokens) == turn.n, turn
            assert turn.accepted <= min(turn.drafted, len(turn.tokens)), turn

    def _require_tokens(self, turn: Turn) -> None:
        """The tokens are expected, or part from these where rounding decides: without drafts and
        store too, another division of the prompt or other kernels choose another token there."""
        expected = self._known[turn.prompt]
        at = n_alike(turn.tokens, expected)
        if at < len(turn.tokens):
            others = [
                self._answer_of(turn, lane, chunk)
                for lane in (" in pages", DRAFTED)
                for chunk in _CHUNKS
            ]
            assert at in {n_alike(one, expected) for one in others}, (turn, expected, others)

    def _answer_of(self, turn: Turn, lane: str, chunk: int) -> Sequence[int]:
        rig = Rig(self._kind + lane, chunk=chunk, answers=lambda _: ())
        params = params_of(turn.prompt)
        return rig.answer("ann", turn.prompt, len(turn.tokens), sampling=params).tokens

    def _compute(self, prompts: Sequence[tuple[int, ...]]) -> None:
        rig = Rig(f"{self._kind} in pages", columns=400)
        asked = {
            rig.engine.submit(
                f"agent-{i}", prompt, max_tokens=LONGEST_ANSWER, sampling=params_of(prompt)
            ): prompt
            for i, prompt in enumerate(dict.fromkeys(prompts))
            if prompt not in self._known
        }
        model = tiny_model(self._kind)
        for uid, done in rig.run().items():
            assert done.finish_reason == "length", done.error
            assert done.drafted == 0
            self._known[asked[uid]] = done.tokens
            if params_of(asked[uid]) == SamplingParams():
                assert is_answer(model, asked[uid], done.tokens, LONGEST_ANSWER)
        rig.forget_all()


def n_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are equal before the first that differ."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(slots=True)
class Seen:
    """What happened in all schedules of a kind."""

    n_killed: int = 0
    n_open: int = 0
    """Lives that were killed in the middle of an answer with drafts."""
    n_restored: int = 0
    n_preempted: int = 0
    n_cancelled: int = 0
    """Answers with drafts that were cancelled in the middle."""
    drafted: int = 0
    accepted: int = 0
    recalled: list[Turn] = field(default_factory=list, repr=False)
    """Turns whose answers had been saved before a kill. They came first in the next life."""

    def add(self, told: Told) -> None:
        turns = list(told.turns.values())
        self.n_killed += told.damaged is None
        self.n_open += any(turn.drafted and turn.tokens for turn in told.killed)
        self.n_preempted += told.preempted
        cancelled = [turn for turn in turns if turn.reason == "cancelled"]
        self.n_cancelled += sum(turn.drafted > 0 < len(turn.tokens) for turn in cancelled)
        self.n_restored += sum(turn.cached for turn in turns if turn.source == "disk")
        self.drafted += sum(turn.drafted for turn in turns)
        self.accepted += sum(turn.accepted for turn in turns)
        self.recalled += [turn for turn in turns if turn.how == "recalled" and turn.reason]


def require_resumed(told: Told) -> None:
    """Agents went on with all that was saved of them, and nothing saved was damaged."""
    assert not told.damaged
    for turn in told.resumed:
        found = told.found[turn.agent]
        assert turn.cached >= len(found) or list(turn.prompt[: len(found)]) != found, turn


@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_changes_when_a_process_is_killed(kind: str, tmp_path: Path) -> None:
    first = random.randrange(10**6) if THOROUGH else 1
    sys.stdout.write(f"seed {first}\n")  # shown when the test fails
    expected, seen = Expected(kind), Seen()
    with closing(workers(kind)) as processes:
        worker = next(processes)
        for seed in range(first, first + SCHEDULES):
            folder, draw = str(tmp_path / f"store-{seed}"), random.Random(seed)
            moments = ["drafted", *draw.choices(_MOMENTS, k=draw.randint(0, 2) if THOROUGH else 0)]
            lives: list[Told] = []
            for moment in moments:
                life = Life(folder, f"{seed} {len(lives)}", None)
                lives.append(worker.live_until_killed(life, moment, draw))
                worker = next(processes)
            lives.append(worker.live(Life(folder, f"{seed} last", _TURNS)))
            expected.require([turn for told in lives for turn in told.turns.values()])
            for told in lives:
                require_resumed(told)
                seen.add(told)
    sys.stdout.write(f"{seen}\n")
    assert seen.n_open >= seen.n_killed // 2, "kills were not in the middle of drafted answers"
    assert seen.n_restored, "nothing came from the disk"
    assert 0 < seen.accepted < seen.drafted
    asked_again = sum(len(turn.tokens) for turn in seen.recalled)
    assert sum(turn.accepted for turn in seen.recalled) > asked_again / 2 > 0
