"""Cache misses in usage objects: tokens that were cached before and had to be recomputed, and why.

They are reported in a member named `semantic`, which no client reads by accident.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from semantic.application.cache.agent_notes import cache_miss_reason
from semantic.domain.answer import Usage
from semantic.domain.match import MatchEnd, MatchReport
from semantic.domain.request_parts import Change, Difference, PartKind


class LostPart(BaseModel):
    """The part of the request that changed. Tools count from 1, and so do messages after the
    leading system messages."""

    kind: PartKind
    change: Change
    number: int | None
    name: Annotated[str | None, Field(description="Of a tool or option; a message's role.")]


class LostTokens(BaseModel):
    """Tokens that were cached for the agent but had to be recomputed, and the time that took."""

    tokens: int
    seconds: float
    differs_at: Annotated[int | None, Field(description="The first token that differs.")]
    part: LostPart | None
    end: MatchEnd
    reason: Annotated[str, Field(description="The cause in words.")]


def usage_extension(usage: Usage) -> dict[str, object]:
    """The `semantic` member to merge into a wire's usage object.

    `any_chip`, see `MatchReport`, and `images_noted` are there only when they say something.
    """
    match = usage.match
    lost = lost_tokens(match)
    own: dict[str, object] = {"lost": None if lost is None else lost.model_dump(mode="json")}
    if match is not None and match.any_chip:
        own["any_chip"] = True
    if usage.noted:
        own["images_noted"] = usage.noted
    return {"semantic": own}


def lost_tokens(match: MatchReport | None) -> LostTokens | None:
    """The cache miss that `match` reports; None if there was none."""
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
