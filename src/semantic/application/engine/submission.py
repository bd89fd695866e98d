"""Submission: a request for an engine thread, the handle on it and the listener to its events.

Knows neither thread nor engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from semantic.domain.entities import AgentBlocks
from semantic.domain.identity import NO_HINTS, Hints
from semantic.domain.value_objects import CompletedGeneration, SamplingParams, TokenEvent
from semantic.ports.inbound import EngineEvent

Listener = Callable[[Sequence[EngineEvent]], None]
"""Called once per step with all events of its request, on the engine's thread: it must not block,
and an exception from it ends the request. The last event of the last call is a
CompletedGeneration."""


@dataclass(frozen=True, slots=True)
class Submission:
    """The arguments of `GenerationEnginePort.submit`, not validated yet."""

    agent_id: str
    prompt: str | Sequence[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""
    note: str = ""
    cache: AgentBlocks | None = None
    append: bool = False
    keep: bool = True
    hints: Hints = NO_HINTS

    @property
    def max_total_tokens(self) -> int:
        """The most tokens of a prompt in token ids and its answer together."""
        return len(self.prompt) + self.max_tokens


@dataclass(eq=False, slots=True)
class RequestHandle:
    """The handle on a submission that an engine thread has queued.

    `accepted` resolves to the request's uid once the engine has validated it; it raises as
    `GenerationEnginePort.submit`, and OverloadedError or BackendError if the engine ends before.
    Cancelled before that, it is a cancelled future. After an error `listener` is never called;
    otherwise it receives the request's end exactly once. The other fields are the thread's.
    """

    submission: Submission
    listener: Listener
    accepted: Future[str] = field(default_factory=Future)
    uid: str | None = None
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def notify(self, events: Sequence[EngineEvent]) -> None:
        """Record the tokens in `events` and pass them to the listener."""
        for event in events:
            if isinstance(event, TokenEvent):
                self.tokens.append(event.token)
                self.text.append(event.text)
        self.listener(events)

    def failed(self, error: str) -> CompletedGeneration:
        """Completion for an accepted request whose engine failed."""
        return CompletedGeneration(
            uid=self.uid or "",
            agent_id=self.submission.agent_id,
            text="".join(self.text),
            tokens=tuple(self.tokens),
            finish_reason="error",
            prompt_tokens=len(self.submission.prompt),
            cached_tokens=0,
            error=error,
        )
