"""`semantic demo`: several agents that continue from their caches, even after `kill -9`. The demo
kills the process `python -m semantic.cli.demo`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import typer

from semantic.cli.conversation import Message, message
from semantic.cli.edge import EXIT_CHECK_FAILED, exit_code, print_error
from semantic.cli.options import AsJson, EngineOptions
from semantic.cli.report import show_seconds, to_line
from semantic.composition.engine_settings import DEFAULT_MODEL, Settings
from semantic.composition.framework import be_program
from semantic.domain.errors import BackendError, SemanticError

if TYPE_CHECKING:
    from semantic.library.engine import Engine

_BEFORE_KILL: Final = 12  # pieces of an answer
_DISK_BYTES: Final = 16 << 30
_COLUMNS: Final = 79


class Role(NamedTuple):
    """The script of one agent. The packaged model's answer to `question` must contain `words`."""

    agent: str
    told: str
    n_sums: int
    task: str
    question: str
    words: tuple[str, ...]


CAST: Final = (
    Role(
        "ada", "My name is Vera. I took a train. I live in Lisbon and I have a parrot.",
        5, "Tell me a long story about a fox.",
        "What is my name, my city and my pet?", ("Vera", "Lisbon", "parrot"),
    ),
    Role(
        "ben", "I work as a pilot. We land late and my favourite food is ramen.",
        40, "Count to 60.", "What is my job and my favourite food?", ("pilot", "ramen"),
    ),
    Role(
        "cleo", "It rains all week, so my hobby is chess. Remember the code velvet 42.",
        100, "Count from 41 to 99.",
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


@dataclass(frozen=True, slots=True)
class Recall:
    """An agent's answers: from a cache in the pool, from a stored cache, and without a cache."""

    role: Role
    resumed: Answer
    restored: Answer
    cold: Answer

    @property
    def failures(self) -> list[str]:
        """One sentence for each wrong answer."""
        agent, text = self.role.agent, self.restored.text.lower()
        missing = (word for word in self.role.words if word.lower() not in text)
        found = [f"{agent} was told {word} but did not say so" for word in missing]
        for how, answer in (("resumed", self.resumed), ("restored", self.restored)):
            if answer.text != self.cold.text:
                found.append(f"{agent} {how} answers differently without a cache: {self.cold.text}")
            if not answer.cached_tokens:
                found.append(f"{agent} {how} computes everything again")
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

    echo: Callable[[str], None] = (lambda _: None) if as_json else typer.echo
    given = engine.settings()
    plain = Settings(given.model, pool_bytes=given.pool_bytes, pool_blocks=given.pool_blocks)
    is_toy = plain.model == DEFAULT_MODEL
    roles = CAST if is_toy else tuple(role._replace(words=()) for role in CAST)
    echo(f"Three agents hear a story each and answer in one batch, from {engine.model}.")
    with tempfile.TemporaryDirectory(prefix="semantic-demo-") as store:
        kept = replace(plain, use_disk=True, store=Path(store), disk_bytes=_DISK_BYTES)
        with child(kept, roles) as written:
            told, seconds, n_tokens = json.loads(next(written))
            for role in roles:
                echo(shown(role.agent, role.told, told[role.agent]))
            resumed = [Answer(**json.loads(next(written))) for _ in roles]
            cut = "".join(map(json.loads, islice(written, _BEFORE_KILL)))
        echo("\nkill -9 in the middle of an answer:")
        echo(shown(roles[0].agent, roles[0].task, f"{cut} …"))
        echo("\nA new process asks each agent about its story.")
        with Engine(kept) as after:
            restored = [_asked(after, role.agent, role.question) for role in roles]
    for role, answer in zip(roles, restored, strict=True):
        echo(shown(role.agent, role.question, answer.text))
    with Engine(plain) as cold:
        without = [_asked(cold, role.agent, script(role, told[role.agent])) for role in roles]
    recalls = [Recall(*one) for one in zip(roles, resumed, restored, without, strict=True)]
    failures = [failure for recall in recalls for failure in recall.failures]
    echo("\n".join(("", *table(recalls, n_tokens / seconds), "")))
    if as_json:
        batch = {"texts": told, "seconds": seconds, "tokens": n_tokens}
        agents = [{**asdict(one), "role": one.role._asdict()} for one in recalls]
        found = {"model": plain.model, "batch": batch, "interrupted": cut, "agents": agents}
        typer.echo(to_line({**found, "failures": failures, "passed": not failures}))
    if failures:
        echo("\n".join(f"FAILED: {one}" for one in failures))
        raise typer.Exit(EXIT_CHECK_FAILED)
    further = "models suggest" if is_toy else f"serve --model {engine.model}"
    echo(f"Every answer equals one without a cache.\nNext: semantic {further}")


def shown(agent: str, asked: str, answer: str) -> str:
    """Return a question to an agent and its answer, in two lines of a narrow terminal."""
    cut = [textwrap.shorten(text, _COLUMNS - 8, placeholder=" …") for text in (asked, answer)]
    return f"{agent:5} < {cut[0]}\n{'':5} > {cut[1]}"


def table(recalls: Sequence[Recall], tokens_per_second: float) -> list[str]:
    """Return the lines of the demo's report."""
    ways = {
        "without a cache": [one.cold for one in recalls],
        "resumed": [one.resumed for one in recalls],
        "after kill -9": [one.restored for one in recalls],
    }
    cold = sum(one.seconds for one in ways["without a cache"])
    lines: list[str] = []
    for way, answers in ways.items():
        computed = sum(one.prompt_tokens - one.cached_tokens for one in answers)
        seconds = sum(one.seconds for one in answers)
        factor = typer.style(f"{cold / max(seconds, 1e-9):.1f} x", bold=True)
        after = f"text after {show_seconds(seconds)}{f', {factor} sooner' * bool(lines)}"
        lines.append(f"{way:16} {computed:6,} tokens computed, {after}")
    rate = typer.style(f"{tokens_per_second:.0f} tokens/s", bold=True)
    return [*lines, f"{'in one batch':16} {len(recalls):6,} agents, {rate} together"]


def script(role: Role, answer: str | None = None) -> list[Message]:
    """Return the conversation up to the task, or with the `answer` to it, up to the question."""
    said = [message("user", role.told), message("assistant", "Thank you. I will remember that.")]
    for i in range(role.n_sums):
        x, y = 3 + i % 17, 2 + i * 5 % 13
        said.append(message("user", f"What is {x} plus {y}?"))
        said.append(message("assistant", f"{x} plus {y} is {x + y}."))
    said.append(message("user", role.task))
    asked = () if answer is None else (message("assistant", answer), message("user", role.question))
    return [*said, *asked]


def _asked(engine: Engine, agent: str, said: str | Sequence[Message]) -> Answer:
    """Return an agent's answer to `said`. The agent stays unchanged."""
    begun, seconds = time.perf_counter(), 0.0
    with engine.chat(agent, said, stream=True, max_tokens=64, temperature=0, keep=False) as stream:
        for _ in stream:
            seconds = seconds or time.perf_counter() - begun
        answer = stream.answer
    return Answer(answer.text, answer.prompt_tokens, answer.cached_tokens, seconds)


@contextmanager
def child(settings: Settings, roles: Sequence[Role]) -> Iterator[Iterator[str]]:
    """Start a process that answers for agents, yield its output lines, and kill it at the end.
    Raises BackendError or exits if the process ends early."""
    given = (settings.model, settings.pool_bytes, settings.pool_blocks, str(settings.store), roles)
    command = (sys.executable, "-m", "semantic.cli.demo", json.dumps(given))
    # In a group of its own, because Ctrl-C is for this process, which kills the other.
    with subprocess.Popen(  # noqa: S603  no shell, and no text of a request
        command, stdout=subprocess.PIPE, encoding="utf-8", process_group=0
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
    model, pool_bytes, pool_blocks, store, cast = json.loads(given)
    roles = [Role(*role) for role in cast]
    kept = Settings(model, pool_bytes, pool_blocks, use_disk=True, store=Path(store))
    try:
        with Engine(replace(kept, disk_bytes=_DISK_BYTES)) as engine:
            begun = time.perf_counter()
            asked = [(role.agent, script(role)) for role in roles]
            answers = engine.run_batch(asked, max_tokens=100, temperature=0)
            seconds = time.perf_counter() - begun
            texts = {one.agent: one.text for one in answers}
            n_tokens = sum(one.usage.completion for one in answers)
            typer.echo(json.dumps((texts, seconds, n_tokens)))
            engine.flush()
            for role in roles:
                typer.echo(json.dumps(asdict(_asked(engine, role.agent, role.question))))
            agent, task = roles[0].agent, roles[0].task
            for _ in range(_BEFORE_KILL):  # a model may answer in a few words
                with engine.chat(agent, task, stream=True, keep=False) as pieces:
                    for text in pieces:
                        typer.echo(json.dumps(text))
    except SemanticError as error:
        print_error(error)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main(sys.argv[1])
