"""`semantic demo`: agents in one batch, resumed from their caches, and restored after `kill -9`.

Answers of the same questions by a process without a store show that no answer depends on a cache.
Each process is `python -m semantic.cli.demo`, which has the library's `Engine`: it reads a line of
JSON for each request, and writes lines with pieces of an answer and with the answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self, cast

import typer

from semantic.cli.edge import EXIT_CHECK_FAILED, exit_code, print_error
from semantic.cli.options import AsJson, EngineOptions
from semantic.cli.report import show_seconds, to_line
from semantic.cli.terminal import write
from semantic.composition.engine_settings import DEFAULT_MODEL, Settings
from semantic.composition.framework import be_program
from semantic.domain.errors import BackendError, SemanticError

if TYPE_CHECKING:
    from semantic.library.chat_options import ChatOptions
    from semantic.library.engine import Engine

BATCH_TOKENS: Final = 100
ANSWER_TOKENS: Final = 64
_BEFORE_KILL: Final = 12
"""Pieces of an answer."""
_DISK_BYTES: Final = 16 << 30
_COUNT: Final = "Count to 99."
_KILLED: Final = "killed while it answers"

Message = dict[str, str]


class Role(NamedTuple):
    """An agent: what it is told and says to that, how many sums follow, its task, its question and
    the words that the answer must have."""

    agent: str
    told: str
    said: str
    n_sums: int
    task: str
    question: str
    words: tuple[str, ...]


CAST: Final = (
    Role(
        "ada", "My name is Vera and I live in Lisbon. I have a parrot.", "Nice to meet you, Vera.",
        5, "Tell me a long story about a dragon.",
        "What is my name, my city and my pet?", ("Vera", "Lisbon", "parrot"),
    ),
    Role(
        "ben", "My favourite colour is teal. My favourite food is ramen. I work as a pilot.",
        "Thank you. I will remember that.", 40, "Count to 60.",
        "What is my favourite colour, my favourite food and my job?", ("teal", "ramen", "pilot"),
    ),
    Role(
        "cleo", "My hobby is chess. Remember the code velvet 42.",
        "Thank you. I will remember that.", 100, "Tell me a long story about an owl.",
        "What is my hobby and what is the code?", ("chess", "velvet 42"),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, with the tokens of its prompt, those that were cached, and the seconds to its
    first piece."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    seconds: float


class Batch(NamedTuple):
    """Answers by agent, the seconds of all together and their tokens."""

    texts: dict[str, str]
    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Recall:
    """An agent's answers: its cache in the pool, in a new process, and to both without one."""

    agent: str
    question: str
    resumed: Answer
    restored: Answer
    cold: tuple[Answer, Answer]
    missing: tuple[str, ...]

    @property
    def failures(self) -> list[str]:
        """One sentence for each expectation that does not hold."""
        found = [f"{self.agent} was told {word} and did not say so" for word in self.missing]
        for how, answer, cold in zip(
            ("resumed", "restored"), (self.resumed, self.restored), self.cold, strict=True
        ):
            if answer.text != cold.text:
                found.append(f"{self.agent} {how} answers otherwise without a cache: {cold.text}")
            if not answer.cached_tokens:
                found.append(f"{self.agent} {how} computes everything again")
        return found


def demo(engine: EngineOptions, as_json: AsJson = False) -> None:
    """Three agents share one model; each recalls its conversation without computing it again.

    All three answer in one batch. Each is asked about its conversation, then the process is
    killed in the middle of an answer and a new one is asked again. A process without a store
    answers the same for comparison. Exits with 1 when an answer is wrong or depends on the cache.

    Caches are written to a temporary folder, not to the store. The processes load the model one
    after the other.
    """
    settings = engine.settings()
    echo = _silent if as_json else typer.echo
    # Another model than the packaged one need not be able to answer.
    is_packaged = settings.model == DEFAULT_MODEL
    roles = CAST if is_packaged else tuple(role._replace(words=()) for role in CAST)
    histories = {role.agent: script(role) for role in roles}
    with tempfile.TemporaryDirectory(prefix="semantic-demo-") as store:
        with Process(settings, store) as process:
            done = process.batch(histories)
            for role in roles:
                echo(f"{role.agent}: {done.texts[role.agent]}\n")
            resumed = [process.answer(role.agent, role.question) for role in roles]
            pieces = process.pieces(roles[0].agent, _COUNT, 4 * ANSWER_TOKENS)
            cut = "".join(str(piece) for piece, _ in zip(pieces, range(_BEFORE_KILL), strict=False))
            process.kill()
            echo(f"{roles[0].agent}: {cut} … {_KILLED}\n")
        with Process(settings, store) as process:
            restored = [process.answer(role.agent, role.question) for role in roles]
    with Process(settings) as process:
        recalls: list[Recall] = []
        for role, *answers in zip(roles, resumed, restored, strict=True):
            history = [*histories[role.agent], _said(done.texts[role.agent])]
            recalls.append(_compared(process, role, history, *answers))
    for recall in recalls:
        echo(f"{recall.agent} is asked: {recall.question}\n  {recall.restored.text}")
    failures = [failure for recall in recalls for failure in recall.failures]
    echo("\n".join(("", *table(recalls, done.tokens / done.seconds))))
    echo("\n".join(["", *(f"FAILED: {one}" for one in failures)] if failures else [_NEXT]))
    if as_json:
        found = {"model": settings.model, "batch": done._asdict(), "interrupted": cut}
        told = {"agents": [asdict(one) for one in recalls], "failures": failures}
        typer.echo(to_line({**found, **told, "passed": not failures}))
    if failures:
        raise typer.Exit(EXIT_CHECK_FAILED)


_NEXT: Final = (
    "\nEvery agent remembers, also after the kill, and every answer equals one without a cache.\n"
    "Next: semantic serve, then semantic launch; or semantic chat"
)


def _silent(_: str) -> None:
    """Replaces `typer.echo` with --json."""


def _compared(
    process: Process, role: Role, history: Sequence[Message], resumed: Answer, restored: Answer
) -> Recall:
    """Ask the same of a process that has no cache of it."""
    asked = [*history, {"role": "user", "content": role.question}]
    again = [*asked, _said(resumed.text), asked[-1]]
    cold = (process.answer(role.agent, asked), process.answer(role.agent, again))
    lower = restored.text.lower()
    missing = tuple(word for word in role.words if word.lower() not in lower)
    return Recall(role.agent, role.question, resumed, restored, cold, missing)


def table(recalls: Sequence[Recall], tokens_per_second: float) -> list[str]:
    """Four lines: one for each way to answer, all agents together, and the batch."""
    ways = {
        "without a cache": [one.cold[0] for one in recalls],
        "resumed": [one.resumed for one in recalls],
        "after kill -9": [one.restored for one in recalls],
    }
    cold = sum(one.seconds for one in ways["without a cache"])
    lines: list[str] = []
    for way, answers in ways.items():
        computed = sum(one.prompt_tokens - one.cached_tokens for one in answers)
        seconds = sum(one.seconds for one in answers)
        factor = typer.style(f"{cold / max(seconds, 1e-9):.1f} x", bold=True)
        times = f"first tokens after {show_seconds(seconds)}"
        sooner = f", {factor} sooner" if lines else ""
        lines.append(f"{way:16} {computed:6,} tokens computed, {times}{sooner}")
    rate = typer.style(f"{tokens_per_second:.0f} tokens/s", bold=True)
    return [*lines, f"{'in one batch':16} {len(recalls):6,} agents, {rate} together"]


def script(role: Role) -> list[Message]:
    """What is said before, and the task: the facts, then sums."""
    said = [{"role": "user", "content": role.told}, _said(role.said)]
    for i in range(role.n_sums):
        x, y = 3 + i % 17, 2 + i * 5 % 13
        said.append({"role": "user", "content": f"What is {x} plus {y}?"})
        said.append(_said(f"{x} plus {y} is {x + y}."))
    return [*said, {"role": "user", "content": role.task}]


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Process:
    """A process that answers for agents; it is killed at the end."""

    def __init__(self, settings: Settings, store: str = "") -> None:
        self._first = {
            "model": settings.model,
            "pool_bytes": settings.pool_bytes,
            "pool_blocks": settings.pool_blocks,
            "store": store,
        }

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "semantic.cli.demo"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._send(self._first)
        return self

    def __exit__(self, *failure: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL and wait for the process."""
        self._process.kill()
        self._process.communicate()

    def batch(self, said: Mapping[str, object]) -> Batch:
        """Answers of agents in one batch."""
        self._send({"batch": said})
        return Batch(**json.loads(self._line()))

    def answer(self, agent: str, said: str | Sequence[Message]) -> Answer:
        """An answer of at most `ANSWER_TOKENS`."""
        *_, answer = self.pieces(agent, said, ANSWER_TOKENS)
        return cast("Answer", answer)

    def pieces(
        self, agent: str, said: str | Sequence[Message], max_tokens: int
    ) -> Iterator[str | Answer]:
        """The pieces of an answer, then all of it."""
        self._send({"agent": agent, "said": said, "max_tokens": max_tokens})
        while True:
            reply = json.loads(self._line())
            if isinstance(reply, dict):
                yield Answer(**reply)
                return
            yield str(reply)

    def _line(self) -> str:
        """The next line. Raises as the process ended: with its exit code, or BackendError."""
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            if code > 0:  # it has said why
                raise typer.Exit(code)
            raise BackendError("the process of the demonstration ended before it had answered")
        return line

    def _send(self, message: Mapping[str, object]) -> None:
        with suppress(BrokenPipeError):  # the next line says it
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()


def main() -> None:
    """The process: answers until its input ends."""
    from semantic import Engine

    be_program()
    try:
        first = json.loads(sys.stdin.readline())
        store = first.pop("store")
        settings = Settings(**first)
        if store:
            settings = replace(settings, use_disk=True, store=Path(store), disk_bytes=_DISK_BYTES)
        with Engine(settings) as engine:
            for line in sys.stdin:
                given = json.loads(line)
                if "batch" in given:
                    _reply(_told(engine, given["batch"])._asdict())
                    continue
                for piece in _answered(engine, **given):
                    _reply(piece)
    except SemanticError as error:
        print_error(error)
        sys.exit(exit_code(error))


def _told(engine: Engine, said: Mapping[str, Sequence[Message]]) -> Batch:
    begun = time.perf_counter()
    answers = engine.run_batch(list(said.items()), max_tokens=BATCH_TOKENS, temperature=0)
    seconds = time.perf_counter() - begun
    texts = {one.agent: one.text for one in answers}
    return Batch(texts, seconds, sum(one.usage.completion for one in answers))


def _answered(
    engine: Engine, agent: str, said: str | Sequence[Message], max_tokens: int
) -> Iterator[str | dict[str, object]]:
    """The pieces of an answer, then all of it; to a whole conversation it keeps nothing."""
    keep = isinstance(said, str)
    options: ChatOptions = {"max_tokens": max_tokens, "temperature": 0, "keep": keep}
    begun, seconds = time.perf_counter(), 0.0
    with engine.chat(agent, said, stream=True, **options) as stream:
        for text in stream:
            seconds = seconds or time.perf_counter() - begun
            yield text
        answer = stream.answer
    engine.flush()
    yield asdict(Answer(answer.text, answer.prompt_tokens, answer.cached_tokens, seconds))


def _reply(message: str | Mapping[str, object]) -> None:
    write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main()
