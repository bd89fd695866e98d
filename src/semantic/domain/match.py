"""How much of a request's prompt was reused, and why not more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from semantic.domain.request_parts import Difference


class MatchEnd(StrEnum):
    """Why a prompt's reusable prefix ended where it did."""

    COMPLETE = "complete"
    """Everything that was cached of this agent was used."""
    NEW = "new"
    """Nothing was cached that begins like this prompt."""
    DIVERGED = "diverged"
    """The prompt differs from what the agent had."""
    MISSING = "missing"
    """A block is not there (any more): evicted, dropped, or never saved."""
    DAMAGED = "damaged"
    """A block could not be read, or did not hold what it should."""
    NO_CHECKPOINT = "no checkpoint"
    """The blocks are there, but a window or state can be resumed only at an earlier position."""
    SLOWER = "slower"
    """Reading would have taken longer than computing."""
    SCORED = "scored"
    """Log-probabilities of the prompt were asked for; they come of computing all of it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What an agent had and a request computed again.

    `seconds` are those of computing that `tokens` took their share of. `part` is what in the
    request is not as it was before; None when nothing is, or when it is not known.
    """

    tokens: int
    seconds: float
    part: Difference | None = None


@dataclass(frozen=True, slots=True)
class MatchReport:
    """How much of a request's prompt was reused, and why not more.

    `differs_at` is the first position at which the prompt is not what the agent had before; None
    when it has all of it. `expected` and `got` are the token ids there. `seconds` is what
    computing the rest of the prompt took. `lost` is what the agent had of it and was computed
    again all the same; None when nothing was.
    """

    prompt_tokens: int
    reused_tokens: int
    end: MatchEnd
    source: str
    """Where the reused tokens came from: "pool", "memory", "disk" or "none"."""
    differs_at: int | None = None
    expected: int | None = None
    got: int | None = None
    seconds: float = 0.0
    lost: Lost | None = None

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens
