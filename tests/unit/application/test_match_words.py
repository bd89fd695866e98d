"""What changed, and what the cache lacks, in words."""

from __future__ import annotations

import itertools

import pytest

from semantic.application.cache.agent_notes import cache_miss_reason, end_reason, part_words
from semantic.domain.match import CacheMiss, MatchEnd, MatchReport
from semantic.domain.request_parts import Change, Difference, PartKind

TOOL = Difference(PartKind.TOOL, Change.CHANGED, 7, "Bash")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (TOOL, "tool 7 (Bash) changed"),
        (Difference(PartKind.TOOL, Change.ADDED, 513, ""), "tool 513 was added"),
        (Difference(PartKind.OPTION, Change.REMOVED, None, "effort"),
         "the template option effort was removed"),
        (Difference(PartKind.OPTION, Change.CHANGED, None, ""), "a template option changed"),
        (Difference(PartKind.SYSTEM, Change.CHANGED, 1, "system"), "the system message changed"),
        (Difference(PartKind.SYSTEM, Change.ADDED, 2, "developer"), "system message 2 was added"),
        (Difference(PartKind.MESSAGE, Change.NOT_ANSWERED, 12, "assistant"),
         "message 12 (assistant) differs from the model's answer"),
        (Difference(PartKind.MESSAGE, Change.CUT, 2, "assistant"),
         "message 2 (assistant) ended at a stop string, before the end of the model's text"),
        (Difference(PartKind.THINKING, Change.REMOVED, 2, "assistant"),
         "the thinking of message 2 (assistant) was left out"),
        (Difference(PartKind.THINKING, Change.RENDERED),
         "the template writes the thinking of earlier messages differently or leaves it out"),
        (Difference(PartKind.TEMPLATE, Change.RENDERED),
         "nothing in the request changed, but the template writes it differently"),
    ],
)  # fmt: skip
def test_a_part_in_words(part: Difference, words: str) -> None:
    assert part_words(part) == words


def test_there_are_words_for_all() -> None:
    for kind, change in itertools.product(PartKind, Change):
        assert part_words(Difference(kind, change, 2, "name"))


def test_the_reason_of_a_loss() -> None:
    def reason(end: MatchEnd, part: Difference | None) -> str:
        return cache_miss_reason(MatchReport(9, 1, end, "disk", lost=CacheMiss(5, 0.1, part)))

    missing = end_reason(MatchReport(9, 1, MatchEnd.MISSING, "disk"))
    assert reason(MatchEnd.DIVERGED, TOOL) == "Tool 7 (Bash) changed."
    assert reason(MatchEnd.MISSING, TOOL) == f"Tool 7 (Bash) changed. {missing}"
    assert reason(MatchEnd.MISSING, None) == missing
