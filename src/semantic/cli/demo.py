"""`semantic demo`: several agents that continue from their caches, even after `kill -9`. The demo
kills the process `python -m semantic.cli.demo`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

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
"""The number of pieces of an answer to read before killing the process."""
_DISK_BYTES: Final = 16 << 30
_COUNT: Final = "Count to 99."
_KILLED: Final = "killed while it answers"

Message = dict[str, str]


class Role(NamedTuple):
    """The script of one agent. The answer to its question must contain `words`."""

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
    """An answer, its token counts, and the seconds until its first piece of text."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    seconds: float


class Batch(NamedTuple):
    """The answers of a batch by agent, with the batch's seconds and total number of tokens."""

    texts: dict[str, str]
    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Recall:
    """An agent's answers: from a cache in the pool, from a stored cache, and without a cache."""

    agent: str
    question: str
    resumed: Answer
    restored: Answer
    cold: tuple[Answer, Answer]
    missing: tuple[str, ...]

    @property
    def failures(self) -> list[str]:
        """One sentence for each wrong answer."""
        found = [f"{self.agent} was told {word} but did not say so" for word in self.missing]
        for how, answer, cold in zip(
            ("resumed", "restored"), (self.resumed, self.restored), self.cold, strict=True
        ):
            if answer.text != cold.text:
                found.append(f"{self.agent} {how} answers differently without a cache: {cold.text}")
            if not answer.cached_tokens:
                found.append(f"{self.agent} {how} computes everything again")
        return found


def demo(engine: EngineOptions, as_json: AsJson = False) -> None:
    """Three agents share one model; each recalls its conversation without computing it again.

    All three answer in one batch. Each answers a question about its conversation; then the demo
    kills the process in the middle of an answer and asks again in this process. It also asks
    without a cache, for comparison. Exits with 1 if an answer is wrong or depends on the cache.

    Caches go to a temporary folder, not to the store. The demo loads the model three times, one
    after the other.
    """
    from semantic import Engine

    given = engine.settings()
    plain = Settings(given.model, pool_bytes=given.pool_bytes, pool_blocks=given.pool_blocks)
    echo = _silent if as_json else typer.echo
    # Only the packaged model is certain to be able to answer.
    is_packaged = plain.model == DEFAULT_MODEL
    roles = CAST if is_packaged else tuple(role._replace(words=()) for role in CAST)
    with tempfile.TemporaryDirectory(prefix="semantic-demo-") as store:
        kept = replace(plain, use_disk=True, store=Path(store), disk_bytes=_DISK_BYTES)
        with child(kept, roles) as written:
            done = Batch(**json.loads(next(written)))
            for role in roles:
                echo(f"{role.agent}: {done.texts[role.agent]}\n")
            resumed = [Answer(**json.loads(next(written))) for _ in roles]
            cut = "".join(map(json.loads, islice(written, _BEFORE_KILL)))
        echo(f"{roles[0].agent}: {cut} … {_KILLED}\n")
        with Engine(kept) as after:
            restored = [_asked(after, role.agent, role.question) for role in roles]
    with Engine(plain) as cold:
        recalls = [
            _compared(cold, role, done.texts[role.agent], *answers)
            for role, *answers in zip(roles, resumed, restored, strict=True)
        ]
    for recall in recalls:
        echo(f"{recall.agent}: {recall.question}\n  {recall.restored.text}")
    failures = [failure for recall in recalls for failure in recall.failures]
    echo("\n".join(("", *table(recalls, done.tokens / done.seconds))))
    echo("\n".join(["", *(f"FAILED: {one}" for one in failures)] if failures else [_NEXT]))
    if as_json:
        found = {"model": plain.model, "batch": done._asdict(), "interrupted": cut}
        told = {"agents": [asdict(one) for one in recalls], "failures": failures}
        typer.echo(to_line({**found, **told, "passed": not failures}))
    if failures:
        raise typer.Exit(EXIT_CHECK_FAILED)


_NEXT: Final = (
    "\nEvery agent remembers, also after the kill, and every answer equals one without a cache.\n"
    "Next: semantic serve, then semantic launch; or semantic chat"
)


def _silent(_: str) -> None:
    """Replaces `typer.echo`, so that --json prints only JSON."""


def _compared(engine: Engine, role: Role, told: str, resumed: Answer, restored: Answer) -> Recall:
    """Ask the same question again without a store. Return all answers of the agent."""
    asked = [*script(role), _said(told), {"role": "user", "content": role.question}]
    again = [*asked, _said(resumed.text), asked[-1]]
    answers = (_asked(engine, role.agent, asked), _asked(engine, role.agent, again))
    lower = restored.text.lower()
    missing = tuple(word for word in role.words if word.lower() not in lower)
    return Recall(role.agent, role.question, resumed, restored, answers, missing)


def table(recalls: Sequence[Recall], tokens_per_second: float) -> list[str]:
    """Return the lines of the demo's report."""
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
    """Return the conversation before the question."""
    said = [{"role": "user", "content": role.told}, _said(role.said)]
    for i in range(role.n_sums):
        x, y = 3 + i % 17, 2 + i * 5 % 13
        said.append({"role": "user", "content": f"What is {x} plus {y}?"})
        said.append(_said(f"{x} plus {y} is {x + y}."))
    return [*said, {"role": "user", "content": role.task}]


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _asked(engine: Engine, agent: str, said: str | Sequence[Message]) -> Answer:
    """Return an agent's answer to `said`. A list of messages leaves the agent unchanged."""
    keep, begun, seconds = isinstance(said, str), time.perf_counter(), 0.0
    options: ChatOptions = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "keep": keep}
    with engine.chat(agent, said, stream=True, **options) as stream:
        for _ in stream:
            seconds = seconds or time.perf_counter() - begun
        answer = stream.answer
    engine.flush()
    return Answer(answer.text, answer.prompt_tokens, answer.cached_tokens, seconds)


@contextmanager
def child(settings: Settings, roles: Sequence[Role]) -> Iterator[Iterator[str]]:
    """Start a process that answers for agents, yield its output lines, and kill it at the end.
    Raises BackendError or exits if the process ends early."""
    given = {
        "model": settings.model,
        "pool_bytes": settings.pool_bytes,
        "pool_blocks": settings.pool_blocks,
        "use_disk": settings.use_disk,
        "store": str(settings.store),
        "disk_bytes": settings.disk_bytes,
    }
    command = (sys.executable, "-m", "semantic.cli.demo", json.dumps([given, roles]))
    with subprocess.Popen(  # noqa: S603  no shell, and no text of a request
        command, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        try:
            yield _lines(process)
        finally:
            process.kill()


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    yield from process.stdout or ()
    if code := max(process.wait(), 0):  # it has printed the reason
        raise typer.Exit(code)
    raise BackendError("the demo's process ended before it had answered")


def main(given: str) -> None:
    """Run the process that the demo kills."""
    from semantic import Engine

    be_program()
    settings, roles = json.loads(given)
    settings["store"] = Path(settings["store"])
    cast = [Role(*role) for role in roles]
    try:
        with Engine(Settings(**settings)) as engine:
            _write(_told(engine, cast)._asdict())
            for role in cast:
                _write(asdict(_asked(engine, role.agent, role.question)))
            with engine.chat(cast[0].agent, _COUNT, stream=True, max_tokens=400) as pieces:
                for text in pieces:
                    _write(text)
    except SemanticError as error:
        print_error(error)
        sys.exit(exit_code(error))


def _told(engine: Engine, roles: Sequence[Role]) -> Batch:
    begun = time.perf_counter()
    asked = [(role.agent, script(role)) for role in roles]
    answers = engine.run_batch(asked, max_tokens=BATCH_TOKENS, temperature=0)
    seconds = time.perf_counter() - begun
    texts = {one.agent: one.text for one in answers}
    return Batch(texts, seconds, sum(one.usage.completion for one in answers))


def _write(message: object) -> None:
    write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
