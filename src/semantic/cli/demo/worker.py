"""A process that answers for agents, so that the demonstration can kill and restart it.

    python -m semantic.cli.demo.worker

Both ends of the pipe are here. The process reads one JSON object a line: a `Setup`, then a
`Question` each time. It writes `{"token": text}` for each token and, once the turn is on disk,
`{"answer": Answer}`. It has no memory of its own: a conversation comes from the store.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from semantic.bootstrap import App, build_engine
from semantic.cli.conversation import Conversation, Message
from semantic.cli.driving import Driver, succeeded
from semantic.cli.edge import exit_code, print_error
from semantic.cli.terminal import write
from semantic.composition.engine_settings import Settings
from semantic.domain.errors import BackendError, SemanticError
from semantic.domain.value_objects import CompletedGeneration, TokenEvent

DISK_BYTES = 16 << 30
"""More than three conversations take, whatever the model."""
MEMORY_BYTES = 1 << 20
"""Holds no block of a usual model, so that blocks are restored from disk."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The model, the store's folder, and the pool's limits."""

    model: str
    store: str
    pool_bytes: int | None = None
    pool_blocks: int | None = None

    def settings(self) -> Settings:
        """The engine's settings."""
        return Settings(
            self.model,
            self.pool_bytes,
            self.pool_blocks,
            use_disk=True,
            store=Path(self.store),
            disk_bytes=DISK_BYTES,
            memory_bytes=MEMORY_BYTES,
        )


@dataclass(frozen=True, slots=True)
class Question:
    """An agent's next user message. Without `history` the conversation is read from the store."""

    agent: str
    question: str
    max_tokens: int
    history: list[Message] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer with its prompt, and how many prompt tokens were reused from `source`."""

    text: str
    tokens: list[int]
    prompt: list[int]
    cached_tokens: int
    source: str
    ttft_seconds: float


class Worker:
    """Handle of a worker process, which is killed on exit from the context."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "semantic.cli.demo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._send(asdict(self._setup))
        return self

    def __exit__(self, *failure: object) -> None:
        self.kill()

    def answer(self, question: Question) -> Answer:
        """The complete answer, after it was saved. Raises BackendError if the process ended."""
        for reply in self.replies(question):
            if isinstance(reply, Answer):
                return reply
        raise BackendError(f"the worker process ended while {question.agent} answered")

    def replies(self, question: Question) -> Iterator[str | Answer]:
        """The text of each token, then the answer; fewer items if the process ends."""
        self._send(asdict(question))
        if self._process.stdout is None:
            return
        for line in self._process.stdout:
            reply = json.loads(line)
            if "answer" in reply:
                yield Answer(**reply["answer"])
                return
            yield str(reply["token"])

    def kill(self) -> None:
        """Send SIGKILL and wait for the process."""
        self._process.kill()
        self._process.communicate()

    def _send(self, message: Mapping[str, object]) -> None:
        if self._process.stdin is not None:
            try:
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError as error:
                raise BackendError("the worker process ended by itself") from error


def main() -> None:
    """The process: answers until stdin ends."""
    try:
        setup = Setup(**json.loads(sys.stdin.readline()))
        app = build_engine(setup.settings())
        with closing(app.engine):
            for line in sys.stdin:
                answer = _answer(app, Question(**json.loads(line)))
                app.engine.flush()
                _reply({"answer": asdict(answer)})
    except SemanticError as error:
        print_error(error)
        sys.exit(exit_code(error))


def _answer(app: App, question: Question) -> Answer:
    conversation = Conversation(app.tokenizer)
    manifest = app.engine.manifest(question.agent)
    if question.history is not None:
        conversation.messages = list(question.history)
    elif manifest is not None:
        conversation.resume(manifest)
    prompt = conversation.next_prompt(question.question)
    driver = Driver(app.engine)
    note = conversation.note(question.question)
    uid = driver.submit(question.agent, prompt, question.max_tokens, note=note)
    done = _stream(driver, uid)
    return Answer(
        done.text,
        list(done.tokens),
        list(prompt),
        done.cached_tokens,
        "none" if done.match is None else done.match.source,
        driver.timings[uid].ttft or 0.0,
    )


def _stream(driver: Driver, uid: str) -> CompletedGeneration:
    for events in driver.steps():
        for event in events:
            if isinstance(event, TokenEvent):
                _reply({"token": event.text})
            elif isinstance(event, CompletedGeneration) and event.uid == uid:
                return succeeded(event)
    raise KeyError(uid)


def _reply(message: dict[str, object]) -> None:
    write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main()
