"""A process that answers questions to agents, for the demonstration to kill and start again.

    python -m semantic.cli.demo_worker

Reads one JSON object a line, first `Setup`, then a `Question` each time; writes a line for each
token, `{"token": text}`, and one at the end of each answer, `{"answer": Answer}`, when all that
was said is on disk. It remembers nothing itself: what an agent was told comes out of the store.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from semantic.bootstrap import App, Settings, build_engine
from semantic.cli.conversation import Conversation, Message
from semantic.cli.driving import Driver, succeeded
from semantic.cli.edge import exit_code, print_error
from semantic.cli.terminal import write
from semantic.domain.errors import SemanticError
from semantic.domain.value_objects import CompletedGeneration, TokenEvent

_DISK_BYTES = 16 << 30
"""More than three conversations take; a disk with less drops what does not fit."""
_MEMORY_BYTES = 1 << 20
"""Next to nothing: what is restored must come from disk."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Which model to run, with which pool, on which store."""

    model: str
    store: str
    pool_bytes: int | None = None
    pool_blocks: int | None = None

    def settings(self) -> Settings:
        """What bootstrap needs."""
        return Settings(
            self.model,
            self.pool_bytes,
            self.pool_blocks,
            use_disk=True,
            store=Path(self.store),
            disk_bytes=_DISK_BYTES,
            memory_bytes=_MEMORY_BYTES,
        )


@dataclass(frozen=True, slots=True)
class Question:
    """What an agent is asked; with `history` what was said before, else the store knows."""

    agent: str
    question: str
    max_tokens: int
    history: list[Message] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What it answered, to which tokens, and how many of them it did not compute."""

    text: str
    tokens: list[int]
    prompt: list[int]
    cached_tokens: int
    source: str
    ttft_seconds: float


def main() -> None:
    """The worker: until stdin ends, or somebody kills it."""
    try:
        setup = Setup(**json.loads(sys.stdin.readline()))
        app = build_engine(setup.settings())
        with closing(app.engine):
            for line in sys.stdin:
                answer = answer_one(app, Question(**json.loads(line)))
                app.engine.flush()
                _send({"answer": asdict(answer)})
    except SemanticError as error:
        print_error(error)
        sys.exit(exit_code(error))


def answer_one(app: App, asked: Question) -> Answer:
    """Answer, and write each token as it comes."""
    conversation = Conversation(app.tokenizer)
    manifest = app.engine.manifest(asked.agent)
    if asked.history is not None:
        conversation.messages = list(asked.history)
    elif manifest is not None:
        conversation.resume(manifest)
    prompt = conversation.ask(asked.question)
    driver = Driver(app.engine)
    note = conversation.note(asked.question)
    uid = driver.submit(asked.agent, prompt, asked.max_tokens, note=note)
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
                _send({"token": event.text})
            elif isinstance(event, CompletedGeneration) and event.uid == uid:
                return succeeded(event)
    raise KeyError(uid)


def _send(message: dict[str, object]) -> None:
    write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main()
