"""Steps an engine until its requests have finished, and measures latency."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from semantic.domain.errors import BackendError
from semantic.domain.value_objects import CompletedGeneration, SamplingParams, TokenEvent
from semantic.ports.generation import Clock, EngineEvent, GenerationEnginePort


@dataclass(slots=True)
class Timing:
    """The seconds at which a request began, got its first token, and ended."""

    submitted: float
    first_token: float | None = None
    ended: float | None = None
    n_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Seconds from the begin to the first token, or None."""
        return None if self.first_token is None else self.first_token - self.submitted

    @property
    def total(self) -> float | None:
        """Seconds that the whole request takes, or None before its end."""
        return None if self.ended is None else self.ended - self.submitted

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first token, or None for fewer than two tokens."""
        if self.first_token is None or self.ended is None or self.n_tokens < 2:  # noqa: PLR2004
            return None
        return (self.n_tokens - 1) / max(self.ended - self.first_token, 1e-9)


class Driver:
    """Runs requests on an engine until all have finished."""

    def __init__(self, engine: GenerationEnginePort, clock: Clock = time.perf_counter) -> None:
        self._engine = engine
        self._clock = clock
        self._in_flight: set[str] = set()
        self.timings: dict[str, Timing] = {}

    def submit(
        self,
        agent_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        tenant: str = "",
        note: str = "",
    ) -> str:
        """Queue a request. Raises the same errors as `GenerationEnginePort.submit`."""
        started = self._clock()
        uid = self._engine.submit(
            agent_id, prompt, max_tokens=max_tokens, sampling=sampling, tenant=tenant, note=note
        )
        self.timings[uid] = Timing(started)
        self._in_flight.add(uid)
        return uid

    def steps(self) -> Iterator[list[EngineEvent]]:
        """Yield the events of each step. The caller may submit requests between steps."""
        while self._in_flight:
            events = self._engine.step_once()
            for event in events:
                self._record(event)
            yield events

    def finish(self, uid: str) -> CompletedGeneration:
        """Step until `uid` has finished. Raises BackendError if the request failed."""
        for events in self.steps():
            for event in events:
                if isinstance(event, CompletedGeneration) and event.uid == uid:
                    return succeeded(event)
        raise KeyError(uid)

    def _record(self, event: EngineEvent) -> None:
        timing = self.timings.get(event.uid)
        if timing is None:
            return
        if isinstance(event, TokenEvent):
            timing.n_tokens += 1
            if timing.first_token is None:
                timing.first_token = self._clock()
        elif isinstance(event, CompletedGeneration):
            timing.ended = self._clock()
            self._in_flight.discard(event.uid)


def succeeded(done: CompletedGeneration) -> CompletedGeneration:
    """Return `done` if its request succeeded. Otherwise raises BackendError."""
    if done.finish_reason == "error":
        raise BackendError(done.error or "the model failed")
    return done
