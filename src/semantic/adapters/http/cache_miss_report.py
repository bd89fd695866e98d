"""What usage says beyond its wire's own figures: what was computed again, and why.

It stands under the product's name, where no client looks for anything else.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from semantic.application.cache.match_report import lost_reason
from semantic.domain.match import MatchEnd, MatchReport
from semantic.domain.request_parts import Change, Difference, PartKind


class LostPart(BaseModel):
    """What in the request is not as it was. Tools count from 1, and so do messages behind the
    leading system messages."""

    kind: PartKind
    change: Change
    number: int | None
    name: Annotated[str | None, Field(description="Of a tool or option; a message's role.")]


class LostTokens(BaseModel):
    """Tokens that the agent had and that were computed again, and how long that took."""

    tokens: int
    seconds: float
    differs_at: Annotated[int | None, Field(description="The first token that is another.")]
    part: LostPart | None
    end: MatchEnd
    reason: Annotated[str, Field(description="The same in words.")]


def usage_extension(match: MatchReport | None) -> dict[str, object]:
    """The member of a usage object, to be added to the wire's own."""
    lost = lost_tokens(match)
    return {"semantic": {"lost": None if lost is None else lost.model_dump(mode="json")}}


def lost_tokens(match: MatchReport | None) -> LostTokens | None:
    """What `match` says was lost; None when nothing was."""
    if match is None or match.lost is None:
        return None
    lost = match.lost
    return LostTokens(
        tokens=lost.tokens,
        seconds=lost.seconds,
        differs_at=match.differs_at,
        part=None if lost.part is None else _part(lost.part),
        end=match.end,
        reason=lost_reason(match),
    )


def _part(part: Difference) -> LostPart:
    return LostPart(kind=part.kind, change=part.change, number=part.number, name=part.name)
