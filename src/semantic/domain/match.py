"""MatchReport: how much of its prompt a request reused, and why not more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from semantic.domain.request_parts import Difference


class MatchEnd(StrEnum):
    """Why a prompt's reusable prefix ended where it did."""

    COMPLETE = "complete"
    """The request used everything cached for this agent."""
    NEW = "new"
    """No cached prefix of this prompt."""
    DIVERGED = "diverged"
    """The prompt differs from the agent's cached tokens."""
    MISSING = "missing"
    """The store lacks a block: evicted, dropped, or never saved."""
    DAMAGED = "damaged"
    """A block failed its read or its verification."""
    NO_CHECKPOINT = "no checkpoint"
    """The store has the blocks, but a window or state resumes only at an earlier position."""
    SLOWER = "slower"
    """A read would take longer than computing, by estimate."""
    SCORED = "scored"
    """The request asks for log-probabilities of the prompt, so the engine computes all of it."""


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """Tokens that an agent had cached and a request computed again. `seconds` is their share of the
    prefill time. `part` is the changed part of the request; None if none or unknown."""

    tokens: int
    seconds: float
    part: Difference | None = None


@dataclass(frozen=True, slots=True)
class MatchReport:
    """How much of its prompt a request reused, and why not more. `differs_at` is the first position
    at which the prompt differs from the agent's cached tokens; None if it extends them; `expected`
    and `got` are the tokens there. `seconds` is the prefill time of the rest. `lost` counts cached
    tokens that the engine computed again. `any_chip`: another kind of chip may have computed reused
    tokens."""

    prompt_tokens: int
    reused_tokens: int
    end: MatchEnd
    source: str
    """The source of the reused tokens: "pool", "memory", "disk" or "none"."""
    differs_at: int | None = None
    expected: int | None = None
    got: int | None = None
    seconds: float = 0.0
    lost: CacheMiss | None = None
    any_chip: bool = False

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens
