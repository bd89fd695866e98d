"""A served model that is watched: how long each answer took, and how it ended.

Everything is read off the events that wires get anyway. Keeps figures, never a text.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerStarted,
    PromptProgress,
    ToolCallFailed,
    Usage,
)
from semantic.domain.errors import SemanticError
from semantic.domain.match import MatchReport
from semantic.ports.serving import Ask, Prompt, ServedModel, ServingPort


@dataclass(slots=True)
class AnswerRecord:
    """An answer in figures; times in seconds, from when it was asked for.

    `first` is when the first piece came, `gaps` what lay between two of them. `finish` is the
    reason of its end, "cancelled" when the client left, "refused" when it was never begun.
    """

    agent: str = ""
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    match: MatchReport | None = None
    first: float | None = None
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)
    finish: str = "cancelled"
    error: str | None = None

    @property
    def prefill(self) -> float:
        """Seconds that the prompt was computed."""
        return self.match.seconds if self.match is not None else 0.0

    @property
    def waited(self) -> float:
        """Seconds before its first piece in which it was queued or restored, not computed."""
        return max(0.0, (self.first or 0.0) - self.prefill)

    @property
    def decode(self) -> float:
        """Seconds from the first piece to the end."""
        return 0.0 if self.first is None else self.total - self.first

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding; None for an answer too short to have a speed."""
        n_gaps = self.usage.completion - 1
        return n_gaps / self.decode if n_gaps > 0 and self.decode > 0 else None


class Observer(Protocol):
    """Is told of every answer as it goes on. Called on the event loop: must be quick."""

    def taken_in(self, uid: str, agent: str, prompt_tokens: int) -> None:
        """A request was taken in; it waits now."""
        ...

    def prefilled(self, uid: str, done: int, total: int) -> None:
        """So many prompt tokens are in the cache."""
        ...

    def writes(self, uid: str) -> None:
        """The first piece of the answer came."""
        ...

    def ended(self, uid: str | None, record: AnswerRecord) -> None:
        """It is over; `uid` is None when it was never taken in."""
        ...


class ObservedServing:
    """Implements `ServingPort` by another one, and tells observers what happens."""

    def __init__(
        self,
        serving: ServingPort,
        observers: Sequence[Observer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._serving = serving
        self._observers = observers
        self._clock = clock

    @property
    def model(self) -> ServedModel:
        """See `ServingPort.model`."""
        return self._serving.model

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """See `ServingPort.answer`."""
        watch = _Watch(self._observers, self._clock)
        try:
            async with aclosing(self._serving.answer(ask)) as events:
                async for event in events:
                    watch.note(event)
                    yield event
        except SemanticError as error:
            watch.refused(error)
            raise
        finally:
            watch.end()

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        """See `ServingPort.tokenize`."""
        return await self._serving.tokenize(
            prompt, add_special_tokens=add_special_tokens, tenant=tenant
        )

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """See `ServingPort.detokenize`."""
        return await self._serving.detokenize(tokens)

    async def token_texts(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """See `ServingPort.token_texts`."""
        return await self._serving.token_texts(tokens)


class _Watch:
    """What is known of one answer so far."""

    def __init__(self, observers: Sequence[Observer], clock: Callable[[], float]) -> None:
        self._observers = observers
        self._clock = clock
        self._record = AnswerRecord()
        self._started = clock()
        self._last = self._started
        self._uid: str | None = None

    def note(self, event: AnswerEvent) -> None:
        match event:
            case AnswerStarted(uid, agent_id, prompt_tokens):
                self._uid = uid
                self._record.agent = agent_id
                self._record.usage = Usage(prompt_tokens, 0, 0)
                for observer in self._observers:
                    observer.taken_in(uid, agent_id, prompt_tokens)
            case PromptProgress(done, total):
                for observer in self._observers:
                    observer.prefilled(self._uid or "", done, total)
            case AnswerEnd():
                self._record.usage = event.usage
                self._record.match = event.match
                self._record.finish = event.reason
                self._record.error = event.error
            case ToolCallFailed():
                self._record.error = event.problem
            case _:
                self._piece()

    def refused(self, error: SemanticError) -> None:
        self._record.finish = "refused"
        self._record.error = type(error).__name__

    def end(self) -> None:
        self._record.total = self._clock() - self._started
        for observer in self._observers:
            observer.ended(self._uid, self._record)

    def _piece(self) -> None:
        now = self._clock()
        if self._record.first is None:
            self._record.first = now - self._started
            for observer in self._observers:
                observer.writes(self._uid or "")
        else:
            self._record.gaps.append(now - self._last)
        self._last = now
