"""MatchReport: how much of its prompt a request reused from caches, and why not more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from semantic.domain.request_parts import Difference


class MatchEnd(StrEnum):
    """The reason why a prompt's reusable prefix is not longer."""

    COMPLETE = "complete"
    """The request reused everything cached for this agent."""
    NEW = "new"
    """The cache has nothing for the beginning of this prompt."""
    DIVERGED = "diverged"
    """The prompt differs from the agent's cached tokens."""
    MISSING = "missing"
    """The store lacks a block: it was evicted, dropped, or never saved."""
    DAMAGED = "damaged"
    """A block could not be read or failed its verification."""
    NO_CHECKPOINT = "no checkpoint"
    """The store has the blocks, but a window or state can resume only at an earlier position."""
    SLOWER = "slower"
    """Reading the blocks would take longer than computing them, by estimate."""
    OTHER_BITS = "other bits"
    """The store has the agent's cache, but its numbers have other bits."""
    SCORED = "scored"
    """The request asks for the prompt's log-probabilities, so the engine computes all of it."""


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """Cached tokens of an agent that a request computed again. `part` is the part of the request
    that changed."""

    tokens: int
    seconds: float
    part: Difference | None = None


@dataclass(frozen=True, slots=True)
class MatchReport:
    """How much of its prompt a request reused, and why it did not reuse more.

    At `differs_at` the prompt has the token `got`, and the agent's cache has `expected`.
    """

    prompt_tokens: int
    reused_tokens: int
    end: MatchEnd
    source: str
    """Where the reused tokens came from: "pool", "memory", "disk" or "none"."""
    differs_at: int | None = None
    expected: int | None = None
    got: int | None = None
    seconds: float = 0.0  # prefill time of the tokens that were not reused
    lost: CacheMiss | None = None
    any_chip: bool = False  # another kind of chip may have computed reused tokens

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens
