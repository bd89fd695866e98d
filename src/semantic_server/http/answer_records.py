"""Measures answers, and reports cache misses. Stores figures and errors, never prompts."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Annotated, Protocol, TypeAlias

from pydantic import BaseModel, Field

from semantic.application.cache.agent_notes import cache_miss_reason
from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerStarted,
    PromptProgress,
    ToolCallFailed,
    Usage,
)
from semantic.domain.errors import SemanticError
from semantic.domain.match import MatchEnd, MatchReport
from semantic.domain.request_parts import Change, Difference, PartKind
from semantic.ports.serving import Ask, Prompt, ServedModel, ServingPort
from semantic_server.http.errors import CANCELLED, failure_of, problem_of

Events: TypeAlias = AsyncGenerator[AnswerEvent, None]


@dataclass(slots=True)
class AnswerRecord:
    """Measurements of one answer. Times are in seconds since its request."""

    agent: str = ""
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    match: MatchReport | None = None
    ttft: float | None = None
    """The time to the first piece of the answer."""
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """The times between two pieces of the answer."""
    finish: str = "cancelled"
    """The finish reason, "cancelled" or "refused"."""
    error: str | None = None
    """The error, as its client sees it."""
    status: int = CANCELLED
    unread_calls: int = 0
    """Tool calls that do not parse."""
    model: str = ""

    @property
    def prefill(self) -> float:
        """Seconds of prefill."""
        return self.match.seconds if self.match is not None else 0.0

    @property
    def queue_time(self) -> float:
        """Seconds of queueing and of restoring blocks."""
        return max(0.0, (self.ttft or 0.0) - self.prefill)

    @property
    def decode(self) -> float:
        """Seconds from the first piece of the answer to its end."""
        return 0.0 if self.ttft is None else self.total - self.ttft

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of decode, or None for fewer than two tokens."""
        n_gaps = self.usage.completion - 1
        return n_gaps / self.decode if n_gaps > 0 and self.decode > 0 else None


class Observer(Protocol):
    """Receives the progress of every answer on the event loop. Its methods must not block."""

    def accepted(self, uid: str, agent: str, prompt_tokens: int) -> None:
        """The engine accepted and queued the request."""
        del uid, agent, prompt_tokens

    def prefilled(self, uid: str, done: int, total: int) -> None:
        """Prefill has processed `done` of `total` prompt tokens."""
        del uid, done, total

    def first_token(self, uid: str) -> None:
        """The model generated the first piece of the answer."""
        del uid

    def finished(self, uid: str | None, record: AnswerRecord) -> None:
        """The answer ended. `uid` is None for a rejected request."""


def _unchanged(events: Events) -> Events:
    return events


class InstrumentedServing:
    """A `ServingPort` that notifies observers."""

    def __init__(
        self,
        serving: ServingPort,
        observers: Sequence[Observer],
        clock: Callable[[], float] = time.monotonic,
        *,
        model: str = "",
        name: str | None = None,
        through: Callable[[Events], Events] = _unchanged,
    ) -> None:
        """`model` is "" if the server has only one. `name` is another first name for answers, or
        None. `through` wraps the stream of events."""
        self._name = name
        self._of = model
        self._through = through
        self._serving = serving
        self._observers = observers
        self._clock = clock

    @property
    def model(self) -> ServedModel:
        model = self._serving.model
        return model if self._name is None else replace(model, names=(self._name, *model.names))

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """See `ServingPort.answer`. Also raises the errors that `through` raises."""
        timer = _AnswerTimer(self._observers, self._clock, self._of)
        try:
            async with (
                aclosing(self._serving.answer(ask)) as answer,
                aclosing(self._through(answer)) as events,
            ):
                async for event in events:
                    timer.observe(event)
                    yield event
        except SemanticError as error:
            timer.reject(error)
            raise
        finally:
            timer.finish()

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        return await self._serving.tokenize(
            prompt, add_special_tokens=add_special_tokens, tenant=tenant
        )

    async def detokenize(self, tokens: Sequence[int], tenant: str = "") -> str:
        return await self._serving.detokenize(tokens, tenant)

    async def token_texts(self, tokens: Sequence[int], tenant: str = "") -> tuple[str, ...]:
        return await self._serving.token_texts(tokens, tenant)


class _AnswerTimer:
    def __init__(
        self, observers: Sequence[Observer], clock: Callable[[], float], model: str
    ) -> None:
        self._observers = observers
        self._clock = clock
        self._record = AnswerRecord(model=model)
        self._started = clock()
        self._last = self._started
        self._uid: str | None = None

    def observe(self, event: AnswerEvent) -> None:
        match event:
            case AnswerStarted(uid, agent_id, prompt_tokens):
                self._uid = uid
                self._record.agent = agent_id
                self._record.usage = Usage(prompt_tokens, 0, 0)
                for observer in self._observers:
                    observer.accepted(uid, agent_id, prompt_tokens)
            case PromptProgress(done, total):
                for observer in self._observers:
                    observer.prefilled(self._uid or "", done, total)
            case AnswerEnd():
                self._record.usage = event.usage
                self._record.match = event.match
                self._record.finish = event.reason
                failure = failure_of(event)
                self._record.status = HTTPStatus.OK if failure is None else failure.status
                self._record.error = None if failure is None else str(failure)
            case ToolCallFailed():
                self._record.unread_calls += 1
            case _:
                self._piece()

    def reject(self, error: SemanticError) -> None:
        if self._uid is None:
            self._record.finish = "refused"
        problem = problem_of(error)
        self._record.error, self._record.status = problem.message, problem.status

    def finish(self) -> None:
        self._record.total = self._clock() - self._started
        for observer in self._observers:
            observer.finished(self._uid, self._record)

    def _piece(self) -> None:
        now = self._clock()
        if self._record.ttft is None:
            self._record.ttft = now - self._started
            for observer in self._observers:
                observer.first_token(self._uid or "")
        else:
            self._record.gaps.append(now - self._last)
        self._last = now


class LostPart(BaseModel):
    """The part of the request that changed. `number` counts tools or messages from 1."""

    kind: PartKind
    change: Change
    number: int | None
    name: Annotated[str | None, Field(description="Name of a tool or option; a message's role.")]


class LostTokens(BaseModel):
    """Cached tokens that the engine computed again, and the seconds that this took."""

    tokens: int
    seconds: float
    differs_at: Annotated[int | None, Field(description="Position of the first differing token.")]
    part: LostPart | None
    end: MatchEnd
    reason: Annotated[str, Field(description="Cause in words.")]


def usage_extension(usage: Usage) -> dict[str, object]:
    """Return the member `semantic` of an API's usage object."""
    match = usage.match
    lost = lost_tokens(match)
    own: dict[str, object] = {"lost": None if lost is None else lost.model_dump(mode="json")}
    if match is not None and match.any_chip:
        own["any_chip"] = True
    if usage.noted:
        own["images_noted"] = usage.noted
    if usage.lane is not None:
        own["exact_batch"] = usage.exact and not usage.lane.problem
    return {"semantic": own}


def lost_tokens(match: MatchReport | None) -> LostTokens | None:
    """Return the cache miss that `match` reports, or None."""
    if match is None or match.lost is None:
        return None
    lost = match.lost
    return LostTokens(
        tokens=lost.tokens,
        seconds=lost.seconds,
        differs_at=match.differs_at,
        part=None if lost.part is None else _part(lost.part),
        end=match.end,
        reason=cache_miss_reason(match),
    )


def _part(part: Difference) -> LostPart:
    return LostPart(kind=part.kind, change=part.change, number=part.number, name=part.name)
