"""What is asked of an engine that runs in a thread of its own, and the hold on it.

Knows neither thread nor engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from semantic.domain.value_objects import CompletedGeneration, SamplingParams, TokenEvent
from semantic.ports.inbound import EngineEvent

Listener = Callable[[Sequence[EngineEvent]], None]
"""Told all that one step brought for its request, in one call; the last event of the last call is
a CompletedGeneration. It is called on the engine's thread: it must not block, and what it raises
ends its request."""


@dataclass(frozen=True, slots=True)
class Order:
    """One request: the whole prompt in tokens, and how many the answer may have."""

    agent_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""
    note: str = ""

    @property
    def most_tokens(self) -> int:
        """The most tokens that prompt and answer may have together."""
        return len(self.prompt) + self.max_tokens


@dataclass(eq=False, slots=True)
class RequestHandle:
    """The hold on an order that was taken in.

    `accepted` gives the request's uid once the engine has it, or what it is refused with: as
    `GenerationEnginePort.submit`, and OverloadedError or BackendError when the engine ended
    meanwhile. Cancelled before that, it is a cancelled future. After an error the listener
    hears nothing; otherwise it hears the request's end, once. The rest is the thread's.
    """

    order: Order
    listener: Listener
    accepted: Future[str] = field(default_factory=Future)
    uid: str | None = None
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def tell(self, events: Sequence[EngineEvent]) -> None:
        """Let the listener hear `events`, and remember what was said."""
        for event in events:
            if isinstance(event, TokenEvent):
                self.tokens.append(event.token)
                self.text.append(event.text)
        self.listener(events)

    def broken_off(self, error: str) -> CompletedGeneration:
        """The end of an accepted order whose engine is no more."""
        return CompletedGeneration(
            uid=self.uid or "",
            agent_id=self.order.agent_id,
            text="".join(self.text),
            tokens=tuple(self.tokens),
            finish_reason="error",
            prompt_tokens=len(self.order.prompt),
            cached_tokens=0,
            error=error,
        )
