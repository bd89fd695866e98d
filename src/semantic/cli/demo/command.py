"""`semantic demo`: three agents in one batch, resumed from the pool, restored after `kill -9`.

Each answer that used a cache is compared, token by token, with one computed without. Knows the
engine and the worker process; the texts are in `script`.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from semantic.bootstrap import App
from semantic.cli.conversation import Conversation, has_chat_template
from semantic.cli.demo.script import CAST, INTERRUPTED, LATE, SMALL_TALK, Role, script
from semantic.cli.demo.worker import Answer, Question, Setup, Worker
from semantic.cli.driving import Driver, succeeded
from semantic.cli.edge import EXIT_CHECK_FAILED
from semantic.cli.options import AsJson, EngineOptions
from semantic.cli.progress import ProgressBar
from semantic.cli.report import Json, show_bytes, show_seconds, to_line
from semantic.domain.errors import BackendError, IntegrityError, InvalidRequestError
from semantic.domain.value_objects import CompletedGeneration, PrefillEvent, TokenEvent
from semantic.ports.generation import EngineEvent

if TYPE_CHECKING:
    from rich.table import Table

STORY_TOKENS = 120
"""Maximum length of an answer in the shared batch."""
ANSWER_TOKENS = 64
"""Maximum length of every other answer, the interrupted one excepted."""
INTERRUPTED_TOKENS = 400
"""Far more than are generated before the kill."""
TOKENS_BEFORE_LATE = 4
"""Tokens that the first agent has generated when the late one joins the batch."""
TOKENS_BEFORE_KILL = 12
COLD_AGENT = "cold run"
"""Agent of the runs without a cache; each has a tenant of its own, so none shares a block."""
TAIL_CHARACTERS = 240
"""Characters of an answer shown in the table: its end is the part that changes."""


def demo(engine: EngineOptions, as_json: AsJson = False) -> None:
    """Three agents share one model; each recalls its conversation without computing it again.

    All three answer in one batch, one of them joining late. Then each is resumed from its idle
    cache with a question about its conversation, and the same prompt is run without a cache to
    compare. Then the conversations continue in a process that is killed in the middle of an
    answer, and the questions are repeated in a new one. Exits with 1 when an answer is wrong or
    depends on the cache.

    Caches are written to a temporary folder, not to the store. The other processes load the model
    as well.
    """
    echo = _silent if as_json else typer.echo
    with ProgressBar() as progress:
        app = progress.load(replace(engine.settings(), use_disk=False))
    with closing(app.engine):
        if not has_chat_template(app.tokenizer):
            raise InvalidRequestError("the demonstration needs a model with a chat template")
        with _view(quiet=as_json) as show:
            stage = Stage(app, show)
            together = stage.tell_stories()
            recalls = [stage.recall(role) for role in CAST]
        echo(f"\n{together} agents decoded in one batch; {LATE} joined late.")
        for recall in recalls:
            echo("\n".join(recall.lines()))
        restart = stage.restart(echo)
    for survival in restart.agents:
        echo("\n".join(survival.lines()))
    failures = [failure for recall in recalls for failure in recall.failures] + restart.failures
    echo("\n" + "\n".join(_verdict(failures)))
    if as_json:
        document: Json = {
            "model": engine.model,
            "decoded_together": together,
            "agents": [asdict(recall) for recall in recalls],
            "restart": asdict(restart),
            "failures": failures,
            "passed": not failures,
        }
        typer.echo(to_line(document))
    if failures:
        raise typer.Exit(EXIT_CHECK_FAILED)


# Results


@dataclass(frozen=True, slots=True)
class Recall:
    """An agent's answer when resumed from the pool, and the same prompt run without a cache."""

    agent: str
    told: str
    question: str
    answer: str
    cold_answer: str
    missing: tuple[str, ...]
    same_tokens: bool
    prompt_tokens: int
    cached_tokens: int
    blocks: int
    n_bytes: int
    ttft_cold_seconds: float
    ttft_resumed_seconds: float

    @property
    def failures(self) -> list[str]:
        """One sentence for each expectation that did not hold."""
        found = []
        if self.missing:
            found.append(f"{self.agent} was told {', '.join(self.missing)} and did not say so")
        if not self.same_tokens:
            found.append(f"{self.agent} answered differently without a cache: {self.cold_answer}")
        return found

    def lines(self) -> list[str]:
        """The result as text."""
        held = f"{self.blocks} blocks, {show_bytes(self.n_bytes)}"
        reused = f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens reused"
        return [
            "",
            f"{self.agent} was told: {self.told}",
            f"  asked:    {self.question}",
            f"  answered: {self.answer}",
            f"  cache:    {held}; {reused}",
            _ttft_line(self.ttft_cold_seconds, self.ttft_resumed_seconds, "resumed"),
        ]


@dataclass(frozen=True, slots=True)
class Survival:
    """An agent's answer in the new process, and the same prompt run without a cache."""

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
        """One sentence for each expectation that did not hold."""
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

    def lines(self) -> list[str]:
        """The result as text."""
        reused = f"{self.restored_tokens} of {self.prompt_tokens} prompt tokens from {self.source}"
        computed = self.prompt_tokens - self.restored_tokens
        return [
            "",
            f"{self.agent} was asked: {self.question}",
            f"  answered: {self.answer}",
            f"  restored: {reused}; {computed} prefilled",
            _ttft_line(self.ttft_cold_seconds, self.ttft_restored_seconds, "restored"),
        ]


@dataclass(frozen=True, slots=True)
class Restart:
    """The text generated before the kill, and each agent's answer afterwards."""

    interrupted: str
    agents: tuple[Survival, ...]

    @property
    def failures(self) -> list[str]:
        """One sentence for each expectation that did not hold."""
        return [failure for agent in self.agents for failure in agent.failures]


def _ttft_line(cold_seconds: float, seconds: float, how: str) -> str:
    times = cold_seconds / max(seconds, 1e-9)
    cold, fast = show_seconds(cold_seconds), show_seconds(seconds)
    return f"  TTFT:     {cold} cold, {fast} {how} ({times:.1f} times faster)"


def _verdict(failures: Sequence[str]) -> list[str]:
    if failures:
        return [f"FAILED: {failure}" for failure in failures]
    return ["Every agent remembered, also after the kill; every answer equals one without a cache."]


def _silent(_: str) -> None:
    """Replaces `typer.echo` with --json."""


# What is run


class Stage:
    """The agents and their conversations on one engine; reports progress to `show`."""

    def __init__(self, app: App, show: Show) -> None:
        self._app = app
        self._update = show
        self._driver = Driver(app.engine)
        self._cold_runs = itertools.count()
        self._rows = {role.agent: Row(role.agent) for role in CAST}
        self._talks = {role.agent: Conversation(app.tokenizer) for role in CAST}
        for role in CAST:
            self._talks[role.agent].messages += script(role, app.tokenizer)

    def tell_stories(self) -> int:
        """Run all agents in one batch; the most that got a token in the same step."""
        together = 0
        late = [role for role in CAST if role.agent == LATE]
        for role in CAST:
            if role not in late:
                self._submit(role)
        for events in self._driver.steps():
            for event in events:
                self._record(event)
            together = max(together, sum(isinstance(event, TokenEvent) for event in events))
            self._show()
            if late and max(row.tokens for row in self._rows.values()) >= TOKENS_BEFORE_LATE:
                self._submit(late.pop())
        return together

    def recall(self, role: Role) -> Recall:
        """Resume an idle agent with its question, then run the same prompt without a cache."""
        prompt = self._talks[role.agent].next_prompt(role.question)
        row = self._rows[role.agent]
        row.state, row.prompt_tokens, row.tokens, row.text = "resumed", len(prompt), 0, ""
        self._show()
        done, ttft = self._measure(role.agent, prompt)
        view = self._app.pool.view(role.agent)
        row.state, row.tokens, row.text = "cold run", len(done.tokens), done.text
        row.blocks = view.n_blocks
        self._show()
        cold, ttft_cold = self._measure_cold(prompt)
        row.state = "done"
        self._show()
        return Recall(
            agent=role.agent,
            told=role.told,
            question=role.question,
            answer=done.text,
            cold_answer=cold.text,
            missing=role.misses(done.text),
            same_tokens=done.tokens == cold.tokens,
            prompt_tokens=done.prompt_tokens,
            cached_tokens=done.cached_tokens,
            blocks=view.n_blocks,
            n_bytes=view.n_bytes,
            ttft_cold_seconds=ttft_cold,
            ttft_resumed_seconds=ttft,
        )

    def restart(self, echo: Callable[[str], None]) -> Restart:
        """Continue in a worker process, kill it in mid-answer, and question the agents in a new
        one that has only the store.

        The store is in a temporary folder. Raises BackendError when a worker does not answer.
        """
        settings = self._app.settings
        with tempfile.TemporaryDirectory(prefix="semantic-demo-") as folder:
            store = str(Path(folder) / "store")
            setup = Setup(settings.model, store, settings.pool_bytes, settings.pool_blocks)
            with Worker(setup) as worker:
                echo("\nThe agents talk on in another process, which keeps them on disk.")
                for role in CAST:
                    history = self._talks[role.agent].messages
                    question = Question(role.agent, SMALL_TALK, ANSWER_TOKENS, history)
                    echo(f"{role.agent}: {worker.answer(question).text}")
                interrupted = _interrupt(worker, CAST[0].agent)
                echo(f"{CAST[0].agent}: {interrupted} … killed with SIGKILL")
            with Worker(setup) as worker:
                echo(
                    "A new process gets the questions only; the conversations come from the store."
                )
                answers = [
                    worker.answer(Question(role.agent, role.question, ANSWER_TOKENS))
                    for role in CAST
                ]
            compared = itertools.starmap(self._compare, zip(CAST, answers, strict=True))
            return Restart(interrupted, tuple(compared))

    def _compare(self, role: Role, answer: Answer) -> Survival:
        cold, ttft = self._measure_cold(answer.prompt)
        return Survival(
            agent=role.agent,
            question=role.question,
            answer=answer.text,
            cold_answer=cold.text,
            missing=role.misses(answer.text),
            same_tokens=list(cold.tokens) == answer.tokens,
            prompt_tokens=len(answer.prompt),
            restored_tokens=answer.cached_tokens,
            source=answer.source,
            ttft_cold_seconds=ttft,
            ttft_restored_seconds=answer.ttft_seconds,
        )

    def _show(self) -> None:
        self._update(tuple(self._rows.values()))

    def _submit(self, role: Role) -> None:
        prompt = self._talks[role.agent].next_prompt(role.task)
        self._driver.submit(role.agent, prompt, STORY_TOKENS)
        row = self._rows[role.agent]
        row.state, row.prompt_tokens = "waiting", len(prompt)

    def _record(self, event: EngineEvent) -> None:
        row = self._rows[event.agent_id]
        if isinstance(event, PrefillEvent):
            row.state = "prefill"
        elif isinstance(event, TokenEvent):
            row.state, row.tokens, row.text = "decode", row.tokens + 1, row.text + event.text
        else:
            row.state = "idle in the pool"
            done = succeeded(event)
            task = next(role.task for role in CAST if role.agent == done.agent_id)
            self._talks[done.agent_id].add_turn(task, done.text, done.tokens)
        row.blocks = self._app.pool.view(row.agent).n_blocks

    def _measure_cold(self, prompt: Sequence[int]) -> tuple[CompletedGeneration, float]:
        """`_measure` under a tenant of its own. Raises IntegrityError on a cache hit."""
        tenant = f"{COLD_AGENT} {next(self._cold_runs)}"
        done, ttft = self._measure(COLD_AGENT, prompt, tenant)
        if done.cached_tokens:
            raise IntegrityError(f"a tenant of its own found {done.cached_tokens} cached tokens")
        self._app.engine.forget(COLD_AGENT, tenant=tenant)
        return done, ttft

    def _measure(
        self, agent: str, prompt: Sequence[int], tenant: str = ""
    ) -> tuple[CompletedGeneration, float]:
        """The answer in a batch of one, and the seconds to its first token."""
        uid = self._driver.submit(agent, prompt, ANSWER_TOKENS, tenant=tenant)
        done = self._driver.finish(uid)
        return done, self._driver.timings[uid].ttft or 0.0


def _interrupt(worker: Worker, agent: str) -> str:
    """Kill the worker while it answers; the text it had generated."""
    text = ""
    replies = worker.replies(Question(agent, INTERRUPTED, INTERRUPTED_TOKENS))
    for number, reply in enumerate(replies, start=1):
        if isinstance(reply, Answer):
            raise BackendError("the worker process had answered before it could be killed")
        text += reply
        if number == TOKENS_BEFORE_KILL:
            worker.kill()
            return text
    raise BackendError(f"the worker process ended while {agent} answered")


# What is shown meanwhile

State = Literal[
    "not here yet",
    "waiting",
    "prefill",
    "decode",
    "idle in the pool",
    "resumed",
    "cold run",
    "done",
]


@dataclass(slots=True)
class Row:
    """Progress of one agent."""

    agent: str
    state: State = "not here yet"
    prompt_tokens: int = 0
    blocks: int = 0
    tokens: int = 0
    text: str = ""


Show = Callable[[Sequence[Row]], None]
"""Called with all rows whenever one has changed."""


@contextmanager
def _view(*, quiet: bool) -> Iterator[Show]:
    """A table on a terminal, lines in a pipe, nothing with `quiet`."""
    if quiet:
        yield lambda _: None
    elif sys.stdout.isatty():
        with table_view() as show:
            yield show
    else:
        yield line_view()


def line_view() -> Show:
    """Prints a line whenever an agent's state changes."""
    shown: dict[str, State] = {}

    def show(rows: Sequence[Row]) -> None:
        for row in rows:
            if row.state != shown.get(row.agent, "not here yet"):
                shown[row.agent] = row.state
                typer.echo(f"{row.agent}: {_line(row)}")

    return show


@contextmanager
def table_view() -> Iterator[Show]:
    """A table that is redrawn in place."""
    from rich.live import Live

    with Live(refresh_per_second=12) as live:
        yield lambda rows: live.update(_table(rows))


def _line(row: Row) -> str:
    match row.state:
        case "idle in the pool":
            return f"idle, {row.blocks} blocks stay in the pool; answered: {row.text}"
        case "done":
            return f"answered: {row.text}"
        case _:
            return f"{row.state}, {row.prompt_tokens} prompt tokens"


def _table(rows: Sequence[Row]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True)
    for name in ("agent", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt", "blocks", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("answer", ratio=1)
    for row in rows:
        tail = row.text if len(row.text) <= TAIL_CHARACTERS else f"…{row.text[-TAIL_CHARACTERS:]}"
        counts = map(str, (row.prompt_tokens, row.blocks, row.tokens))
        table.add_row(row.agent, row.state, *counts, Text(tail))
    return table
