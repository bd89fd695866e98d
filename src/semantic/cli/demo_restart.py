"""The demonstration's second part: a process is killed in mid-answer, and its agents remember.

The agents talk on in a worker process that keeps them in a store on disk. It is killed, as by
`kill -9`, while an agent answers; another one is started, which is told nothing but the questions.
Knows processes and the store's folder; no engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from semantic.bootstrap import Settings
from semantic.cli.conversation import Message
from semantic.cli.demo_script import INTERRUPTED, SMALL_TALK, Role
from semantic.cli.demo_worker import Answer, Question, Setup
from semantic.cli.report import show_seconds
from semantic.domain.errors import BackendError

_ANSWER_TOKENS = 64
_LONG_ANSWER_TOKENS = 400
_TOKENS_BEFORE_KILL = 12

Say = Callable[[str], None]
Cold = Callable[[Sequence[int]], tuple[Sequence[int], str, float]]
"""Answers a prompt without any cache: tokens, text, and seconds to the first token."""


@dataclass(frozen=True, slots=True)
class Survival:
    """What one agent answered in the new process, beside the same prompt without a cache."""

    agent: str
    question: str
    answer: str
    cold_answer: str
    missing: tuple[str, ...]
    same_tokens: bool
    prompt_tokens: int
    restored_tokens: int
    source: str
    ttft_cold_seconds: float
    ttft_restored_seconds: float

    @property
    def failures(self) -> list[str]:
        """What did not hold, in words."""
        found = []
        if self.missing:
            found.append(f"{self.agent} forgot {', '.join(self.missing)} in the restart")
        if not self.same_tokens:
            found.append(
                f"{self.agent} answered differently after the restart than without a cache: "
                f"{self.cold_answer}"
            )
        if not self.restored_tokens or self.source != "disk":
            found.append(f"nothing of {self.agent} was restored from disk")
        return found


@dataclass(frozen=True, slots=True)
class Restart:
    """The whole part: what was being said at the kill, and what each agent knew afterwards."""

    interrupted: str
    agents: tuple[Survival, ...]

    @property
    def failures(self) -> list[str]:
        """What did not hold, in words."""
        return [failure for agent in self.agents for failure in agent.failures]


class Worker:
    """A process that answers. It ends with its context, or when it is killed."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "semantic.cli.demo_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._send(asdict(self._setup))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def ask(self, asked: Question) -> Answer:
        """The answer, when it is complete and saved. Raises BackendError when there is none."""
        for reply in self.replies(asked):
            if isinstance(reply, Answer):
                return reply
        raise BackendError(f"the worker process ended while {asked.agent} answered")

    def replies(self, asked: Question) -> Iterator[str | Answer]:
        """The pieces of the answer as they come, and the answer."""
        self._send(asdict(asked))
        if self._process.stdout is None:
            return
        for line in self._process.stdout:
            reply = json.loads(line)
            if "answer" in reply:
                yield Answer(**reply["answer"])
                return
            yield str(reply["token"])

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()
        self._process.communicate()

    def _send(self, message: Mapping[str, object]) -> None:
        if self._process.stdin is not None:
            try:
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError as error:
                raise BackendError("the worker process ended by itself") from error


def restart(
    settings: Settings,
    histories: Mapping[str, Sequence[Message]],
    cast: Sequence[Role],
    cold: Cold,
    say: Say,
) -> Restart:
    """Play the part on a store of its own, which is gone afterwards.

    `histories` is what was said to each agent. Raises BackendError when a worker does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="semantic-demo-") as folder:
        store = str(Path(folder) / "store")
        setup = Setup(settings.model, store, settings.pool_bytes, settings.pool_blocks)
        with Worker(setup) as worker:
            say("\nThe agents talk on in another process, which keeps them on disk.")
            for role in cast:
                asked = Question(role.agent, SMALL_TALK, _ANSWER_TOKENS, [*histories[role.agent]])
                say(f"{role.agent}: {worker.ask(asked).text}")
            interrupted = _interrupt(worker, cast[0])
            say(f"{cast[0].agent}: {interrupted} … killed with SIGKILL")
        with Worker(setup) as worker:
            say("A new process is asked; nobody tells it what was said before.")
            answers = [
                worker.ask(Question(role.agent, role.question, _ANSWER_TOKENS)) for role in cast
            ]
        pairs = zip(cast, answers, strict=True)
        return Restart(interrupted, tuple(_compare(role, answer, cold) for role, answer in pairs))


def _interrupt(worker: Worker, role: Role) -> str:
    """Kill the worker while it answers; what it had said."""
    said = ""
    asked = Question(role.agent, INTERRUPTED, _LONG_ANSWER_TOKENS)
    for number, reply in enumerate(worker.replies(asked), start=1):
        if isinstance(reply, Answer):
            raise BackendError("the worker process had answered before it could be killed")
        said += reply
        if number == _TOKENS_BEFORE_KILL:
            worker.kill()
            return said
    raise BackendError(f"the worker process ended while {role.agent} answered")


def _compare(role: Role, answer: Answer, cold: Cold) -> Survival:
    tokens, text, ttft = cold(answer.prompt)
    return Survival(
        agent=role.agent,
        question=role.question,
        answer=answer.text,
        cold_answer=text,
        missing=role.misses(answer.text),
        same_tokens=list(tokens) == answer.tokens,
        prompt_tokens=len(answer.prompt),
        restored_tokens=answer.cached_tokens,
        source=answer.source,
        ttft_cold_seconds=ttft,
        ttft_restored_seconds=answer.ttft_seconds,
    )


def to_text(agent: Survival) -> list[str]:
    """One agent's part, in lines."""
    times = agent.ttft_cold_seconds / max(agent.ttft_restored_seconds, 1e-9)
    cold, restored = map(show_seconds, (agent.ttft_cold_seconds, agent.ttft_restored_seconds))
    computed = agent.prompt_tokens - agent.restored_tokens
    reused = f"{agent.restored_tokens} of {agent.prompt_tokens} prompt tokens from {agent.source}"
    return [
        "",
        f"{agent.agent} was asked: {agent.question}",
        f"  answered: {agent.answer}",
        f"  restored: {reused}; {computed} prefilled",
        f"  TTFT:     {cold} cold, {restored} restored ({times:.1f} times faster)",
    ]
