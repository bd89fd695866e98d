"""Why a reused prefix ended, in a sentence for people: what changed, or what the cache lacks."""

from __future__ import annotations

from collections.abc import Mapping

from semantic.application.cache.part_words import part_words
from semantic.domain.match import MatchEnd, MatchReport

REASONS: Mapping[MatchEnd, str] = {
    MatchEnd.COMPLETE: "All that was cached of it was used.",
    MatchEnd.NEW: "Nothing was cached that begins like it.",
    MatchEnd.DIVERGED: "It is not what the agent had before.",
    MatchEnd.MISSING: "The next block is not there: evicted, dropped or never saved.",
    MatchEnd.DAMAGED: "The next block did not hold what it should and was put aside.",
    MatchEnd.NO_CHECKPOINT: (
        "The blocks are there, but this model's windows or states can be resumed only at an "
        "earlier position."
    ),
    MatchEnd.SLOWER: "Reading the rest would have taken longer than computing it.",
    MatchEnd.SCORED: "Log-probabilities of the prompt were asked for: all of it was computed.",
}

_OF_THE_REQUEST = (MatchEnd.DIVERGED, MatchEnd.COMPLETE)


def lost_reason(match: MatchReport) -> str:
    """Why what was lost was lost: what changed in the request, and what the cache lacks."""
    if match.lost is None or match.lost.part is None:
        return REASONS[match.end]
    words = part_words(match.lost.part)
    changed = f"{words[0].upper()}{words[1:]}."
    return changed if match.end in _OF_THE_REQUEST else f"{changed} {REASONS[match.end]}"
