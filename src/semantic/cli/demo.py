"""`semantic demo`: three agents in one batch, preempted, resumed, and compared with cold runs.

Then all of it again across a process that is killed: see `demo_restart`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace

import typer

from semantic.bootstrap import App
from semantic.cli.conversation import Conversation, Message, has_chat_template
from semantic.cli.demo_restart import Restart, restart
from semantic.cli.demo_restart import to_text as survival_text
from semantic.cli.demo_script import CAST, LATE, Role, script
from semantic.cli.demo_view import Row, View, choose_view
from semantic.cli.driving import Driver, succeeded
from semantic.cli.edge import EXIT_CHECK_FAILED
from semantic.cli.options import AsJson, EngineOptions
from semantic.cli.progress import ProgressBar
from semantic.cli.report import Json, show_bytes, show_seconds, to_line
from semantic.domain.errors import IntegrityError, InvalidRequestError
from semantic.domain.value_objects import CompletedGeneration, PrefillEvent, TokenEvent
from semantic.ports.inbound import EngineEvent

_STORY_TOKENS = 120
_ANSWER_TOKENS = 64
_LATE_BY = 4
"""Tokens that the first agent has written when the late one joins."""
_COLD = "cold run"
"""Agent and tenant of the runs to compare with: a tenant each, so that they share no block."""


@dataclass(frozen=True, slots=True)
class Recall:
    """What one agent answered when it was resumed, beside the same prompt without a cache."""

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
        """What did not hold, in words."""
        found = []
        if self.missing:
            found.append(f"{self.agent} was told {', '.join(self.missing)} and did not say so")
        if not self.same_tokens:
            found.append(f"{self.agent} answered differently without a cache: {self.cold_answer}")
        return found


def demo(engine: EngineOptions, as_json: AsJson = False) -> None:
    """Three agents share one model; each remembers what it was told, and fast.

    All three answer in one batch, one of them joining late. Then each is idle, its cache in the
    pool; it is resumed and asked what it was told, and the same prompt is run without a cache
    to compare. Then they talk on in a process that is killed in the middle of an answer, and are
    asked again in a new one. Exits with 1 when an answer is wrong or depends on the cache.

    It keeps its caches in a temporary folder; the store is left alone. The other process loads the
    model as well.
    """
    settings = replace(engine.settings(), use_disk=False)
    with ProgressBar() as progress:
        app = progress.load(settings)
    with closing(app.engine):
        if not has_chat_template(app.tokenizer):
            raise InvalidRequestError("the demonstration needs a model with a chat template")
        with choose_view(quiet=as_json) as view:
            stage = Stage(app, view)
            together = stage.tell_stories()
            recalls = [stage.recall(role) for role in CAST]
        say = _silent if as_json else typer.echo
        if not as_json:
            typer.echo(f"\n{together} agents decoded in one batch; {LATE} joined late.")
            for recall in recalls:
                typer.echo("\n".join(to_text(recall)))
        played = restart(settings, stage.histories(), CAST, stage.cold_run, say)
    failures = [failure for recall in recalls for failure in recall.failures] + played.failures
    if as_json:
        typer.echo(to_line(to_json(engine.model, together, recalls, played, failures)))
    else:
        for survival in played.agents:
            typer.echo("\n".join(survival_text(survival)))
        typer.echo("\n" + "\n".join(_verdict(failures)))
    if failures:
        raise typer.Exit(EXIT_CHECK_FAILED)


class Stage:
    """The agents with their conversations, on one engine."""

    def __init__(self, app: App, view: View) -> None:
        self._app = app
        self._view = view
        self._driver = Driver(app.engine)
        self._cold_runs = itertools.count()
        self._rows = {role.agent: Row(role.agent) for role in CAST}
        self._talks = {role.agent: Conversation(app.tokenizer) for role in CAST}
        for role in CAST:
            self._talks[role.agent].messages += script(role, app.tokenizer)

    def tell_stories(self) -> int:
        """Let all agents answer in one batch; the most that got a token in the same step."""
        together = 0
        late = [role for role in CAST if role.agent == LATE]
        for role in CAST:
            if role not in late:
                self._submit(role)
        for events in self._driver.steps():
            for event in events:
                self._note(event)
            together = max(together, sum(isinstance(event, TokenEvent) for event in events))
            self._show()
            if late and max(row.tokens for row in self._rows.values()) >= _LATE_BY:
                self._submit(late.pop())
        return together

    def recall(self, role: Role) -> Recall:
        """Resume an idle agent with its question, then run the same prompt without a cache."""
        prompt = self._talks[role.agent].ask(role.question)
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

    def histories(self) -> dict[str, list[Message]]:
        """What was said to each agent, its story included."""
        return {agent: talk.messages for agent, talk in self._talks.items()}

    def cold_run(self, prompt: Sequence[int]) -> tuple[Sequence[int], str, float]:
        """The answer to `prompt` without a cache, and the seconds to its first token."""
        done, ttft = self._measure_cold(prompt)
        return done.tokens, done.text, ttft

    def _show(self) -> None:
        self._view.update(tuple(self._rows.values()))

    def _submit(self, role: Role) -> None:
        prompt = self._talks[role.agent].ask(role.task)
        self._driver.submit(role.agent, prompt, _STORY_TOKENS)
        row = self._rows[role.agent]
        row.state, row.prompt_tokens = "waiting", len(prompt)

    def _note(self, event: EngineEvent) -> None:
        row = self._rows[event.agent_id]
        if isinstance(event, PrefillEvent):
            row.state = "prefill"
        elif isinstance(event, TokenEvent):
            row.state, row.tokens, row.text = "decode", row.tokens + 1, row.text + event.text
        else:
            row.state = "idle in the pool"
            self._end_story(succeeded(event))
        row.blocks = self._app.pool.view(row.agent).n_blocks

    def _end_story(self, done: CompletedGeneration) -> None:
        task = next(role.task for role in CAST if role.agent == done.agent_id)
        self._talks[done.agent_id].answered(task, done.text, done.tokens)

    def _measure_cold(self, prompt: Sequence[int]) -> tuple[CompletedGeneration, float]:
        """`_measure`, with nothing that was cached. Raises IntegrityError when something was."""
        tenant = f"{_COLD} {next(self._cold_runs)}"
        done, ttft = self._measure(_COLD, prompt, tenant)
        if done.cached_tokens:
            raise IntegrityError(f"a tenant of its own found {done.cached_tokens} cached tokens")
        self._app.engine.forget(_COLD, tenant=tenant)
        return done, ttft

    def _measure(
        self, agent: str, prompt: Sequence[int], tenant: str = ""
    ) -> tuple[CompletedGeneration, float]:
        """Answer alone; the answer and the seconds to its first token."""
        uid = self._driver.submit(agent, prompt, _ANSWER_TOKENS, tenant=tenant)
        done = self._driver.finish(uid)
        return done, self._driver.timings[uid].ttft or 0.0


def to_text(recall: Recall) -> list[str]:
    """One agent's recall, in lines."""
    times = recall.ttft_cold_seconds / max(recall.ttft_resumed_seconds, 1e-9)
    cold, resumed = map(show_seconds, (recall.ttft_cold_seconds, recall.ttft_resumed_seconds))
    held = f"{recall.blocks} blocks, {show_bytes(recall.n_bytes)}"
    reused = f"{recall.cached_tokens} of {recall.prompt_tokens} prompt tokens reused"
    return [
        "",
        f"{recall.agent} was told: {recall.told}",
        f"  asked:    {recall.question}",
        f"  answered: {recall.answer}",
        f"  cache:    {held}; {reused}",
        f"  TTFT:     {cold} cold, {resumed} resumed ({times:.1f} times faster)",
    ]


def to_json(
    model: str,
    together: int,
    recalls: Sequence[Recall],
    played: Restart,
    failures: Sequence[str],
) -> Json:
    """The whole demonstration as one document."""
    return {
        "model": model,
        "decoded_together": together,
        "agents": [asdict(recall) for recall in recalls],
        "restart": asdict(played),
        "failures": list(failures),
        "passed": not failures,
    }


def _silent(said: str) -> None:
    """For a reader who wants JSON alone."""
    del said


def _verdict(failures: Sequence[str]) -> list[str]:
    if failures:
        return [f"FAILED: {failure}" for failure in failures]
    return ["Every agent remembered, also after the kill; every answer equals one without a cache."]
