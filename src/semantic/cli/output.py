"""Writes the answers of a batch in the order of its requests, each as early as that allows.

Knows stdout; not what was asked, nor when it is computed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from semantic.cli.driving import Timing
from semantic.cli.report import answer_json, to_line
from semantic.cli.terminal import write
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CompletedGeneration, PoolView, TokenEvent
from semantic.ports.inbound import EngineEvent


class Output(Protocol):
    """A form in which answers are written, one after the other."""

    def text(self, text: str) -> None:
        """The next piece of an answer."""
        ...

    def end(self, done: CompletedGeneration, timing: Timing, view: PoolView) -> None:
        """The answer is complete."""
        ...


class PlainText:
    """The answers and nothing else, each ended by a newline."""

    def text(self, text: str) -> None:
        """See `Output.text`."""
        write(text)

    def end(self, done: CompletedGeneration, timing: Timing, view: PoolView) -> None:
        """See `Output.end`."""
        del done, timing, view
        write("\n")


class JsonLines:
    """One JSON document a line, written when the answer is complete."""

    def __init__(self, model: str) -> None:
        self._model = model

    def text(self, text: str) -> None:
        """See `Output.text`."""

    def end(self, done: CompletedGeneration, timing: Timing, view: PoolView) -> None:
        """See `Output.end`."""
        write(to_line(answer_json(self._model, done, timing, view)) + "\n")


@dataclass(slots=True)
class _Answer:
    pieces: list[str] = field(default_factory=list)
    done: CompletedGeneration | None = None
    view: PoolView | None = None


class AnswerQueue:
    """Holds back what came before its turn."""

    def __init__(
        self,
        uids: Iterable[str],
        output: Output,
        pool: BlockPool,
        timings: Mapping[str, Timing],
    ) -> None:
        self._turns = deque(uids)
        self._output = output
        self._pool = pool
        self._timings = timings
        self._answers: dict[str, _Answer] = defaultdict(_Answer)

    @property
    def ready(self) -> bool:
        """Whether `flush` would write anything."""
        if not self._turns:
            return False
        first = self._answers[self._turns[0]]
        return bool(first.pieces) or first.done is not None

    def note(self, event: EngineEvent) -> None:
        """Take what an event says of an answer."""
        answer = self._answers[event.uid]
        if isinstance(event, TokenEvent):
            if event.text:
                answer.pieces.append(event.text)
        elif isinstance(event, CompletedGeneration):
            answer.done = event
            # As it is now: later the pool may take an idle cache back.
            answer.view = self._pool.view(event.agent_id)

    def flush(self) -> None:
        """Write all that is due."""
        while self._turns:
            uid = self._turns[0]
            answer = self._answers[uid]
            self._output.text("".join(answer.pieces))
            answer.pieces.clear()
            if answer.done is None or answer.view is None:
                return
            self._output.end(answer.done, self._timings[uid], answer.view)
            self._turns.popleft()

    def completed(self, uids: Iterable[str]) -> list[CompletedGeneration]:
        """The generations of `uids` that have ended."""
        ends = (self._answers[uid].done for uid in uids)
        return [done for done in ends if done is not None]
