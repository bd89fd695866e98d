"""MatchReport: how much of a request's prompt was reused, and why not more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from semantic.domain.request_parts import Difference


class MatchEnd(StrEnum):
    """Why a prompt's reusable prefix ended where it did."""

    COMPLETE = "complete"
    """Everything cached for this agent was used."""
    NEW = "new"
    """No cached prefix of this prompt."""
    DIVERGED = "diverged"
    """The prompt differs from the agent's cached tokens."""
    MISSING = "missing"
    """A block is not stored: evicted, dropped, or never saved."""
    DAMAGED = "damaged"
    """A block could not be read or failed verification."""
    NO_CHECKPOINT = "no checkpoint"
    """The blocks are stored, but a window or state can be resumed only at an earlier position."""
    SLOWER = "slower"
    """Reading was estimated to take longer than computing."""
    SCORED = "scored"
    """Log-probabilities of the prompt were requested, which requires computing all of it."""


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """Tokens that an agent had cached and a request computed again.

    `seconds` is their share of the prefill time. `part` is the part of the request that changed;
    None if none did or it is unknown.
    """

    tokens: int
    seconds: float
    part: Difference | None = None


@dataclass(frozen=True, slots=True)
class MatchReport:
    """How much of a request's prompt was reused, and why not more.

    `differs_at` is the first position at which the prompt differs from the agent's cached tokens;
    None if it extends them. `expected` and `got` are the token ids there. `seconds` is the prefill
    time of the rest. `lost` are cached tokens that were computed again; None if there are none.
    `any_chip`: reused tokens may have been computed on another kind of chip, which the operator
    allowed.
    """

    prompt_tokens: int
    reused_tokens: int
    end: MatchEnd
    source: str
    """Where the reused tokens were read from: "pool", "memory", "disk" or "none"."""
    differs_at: int | None = None
    expected: int | None = None
    got: int | None = None
    seconds: float = 0.0
    lost: CacheMiss | None = None
    any_chip: bool = False

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens
