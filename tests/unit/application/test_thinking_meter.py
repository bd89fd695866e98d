"""When the reasoning of an answer is cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from semantic.application.request import ThinkingMeter
from semantic.domain.errors import InvalidRequestError
from semantic.domain.value_objects import ThinkingBudget

END = (1, 2, 3)
TEXTS = {0: "<t>", 1: "</", 2: "t", 3: ">", 4: "</t>", 5: "x<t>y", 6: "<c>", 10: "</c>"}


def forced(
    budget: int, tokens: Sequence[int], *, opened: bool = True, only_first: bool = False
) -> list[int]:
    """`tokens` as far as they are generated, with what is forced between them."""
    meter = ThinkingMeter(
        ThinkingBudget(budget, "<t>", "</t>", END, opened, "<c>", "</c>", only_first)
    )
    written: list[int] = []
    for token in tokens:
        written.append(token)
        rest = meter.push(token, TEXTS.get(token, "x"))
        for one in rest:
            assert meter.push(one, TEXTS[one]) == ()
        written += rest
    return written


@pytest.mark.parametrize(
    ("budget", "tokens", "expected"),
    [
        (3, [7, 8, 9, 7], [7, 8, 9, *END, 7]),
        (3, [7, 8, 1, 7], [7, 8, 1, 2, 3, 7]),
        (3, [7, 1, 2, 8], [7, *END, 8]),
        (4, [7, 4, 7, 7, 7, 7], [7, 4, 7, 7, 7, 7]),
        (3, [7, 7, 4, 0, 8, 9], [7, 7, 4, 0, 8, *END, 9]),
        (1, [7, 0, 8], [7, *END, 0, *END, 8]),
    ],
    ids=["end", "begun", "ended", "spelled", "again", "used_up"],
)
def test_an_open_thought(budget: int, tokens: list[int], expected: list[int]) -> None:
    assert forced(budget, tokens) == expected


@pytest.mark.parametrize(
    ("opened", "tokens", "expected"),
    [
        (True, [7, 8, 0, 9, 9], [7, 8, *END, 0, 9, 9]),
        (True, [7, 4, 0, 8, 9], [7, 4, 0, 8, 9]),
        (True, [6, 10, 0, 8, 9], [6, 10, 0, 8, 9]),
        (False, [0, 8, 9, 0, 9, 9], [0, 8, 9, *END, 0, 9, 9]),
        (False, [7, 0, 8, 9, 9], [7, 0, 8, 9, 9]),
    ],
    ids=["cut", "ended", "called", "begun", "none"],
)
def test_only_the_first_thought_of_an_answer_in_a_grammar_is_cut(
    opened: bool, tokens: list[int], expected: list[int]
) -> None:
    assert forced(2, tokens, opened=opened, only_first=True) == expected


@pytest.mark.parametrize(
    ("budget", "tokens", "expected"),
    [
        (0, [7, 8, 0, 9], [7, 8, 0, *END, 9]),
        (2, [7, 0, 8, 9, 7], [7, 0, 8, 9, *END, 7]),
        (1, [5, 8, 9], [5, 8, *END, 9]),
        (5, [7] * 9, [7] * 9),
    ],
)
def test_a_thought_that_the_answer_opens(
    budget: int, tokens: list[int], expected: list[int]
) -> None:
    assert forced(budget, tokens, opened=False) == expected


@pytest.mark.parametrize(
    "tokens",
    [[7, 6, 8, 9, 8, 9, 10, 7], [4, 6, 8, 0, 8, 9, 8, 9, 10, 7], [7, 6, 0, 4, 0, 8, 9, 8, 9]],
    ids=["in_thought", "marks_in_it", "both"],
)
def test_a_call_is_no_reasoning(tokens: list[int]) -> None:
    assert forced(3, tokens) == tokens
    assert forced(3, [*tokens, 10, 0, 8, 9, 8, 9])[len(tokens) :] != [10, 0, 8, 9, 8, 9]


def test_an_end_mark_whose_text_comes_late_is_known_by_its_tokens() -> None:
    meter = ThinkingMeter(ThinkingBudget(4, "<t>", "</t>", END, opened=True))
    assert [meter.push(token, "") for token in (7, *END, 7, 7)] == [()] * 6


@pytest.mark.parametrize(
    ("tokens", "end", "end_tokens", "opened"),
    [(-1, ">", (1,), False), (0, ">", (1,), True), (1, "", (1,), True), (1, ">", (), True)],
)
def test_a_budget_without_a_meaning_is_refused(
    tokens: int, end: str, end_tokens: tuple[int, ...], opened: bool
) -> None:
    with pytest.raises(InvalidRequestError):
        ThinkingBudget(tokens, "<", end, end_tokens, opened)
