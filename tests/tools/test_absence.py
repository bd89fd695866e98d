"""The replay of absences: who is evicted from a pool that is too small, by what agents tell."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from benchmarks.absence import (
    BackIn,
    Learned,
    Recorded,
    Replay,
    Teller,
    both,
    done,
    silent,
    visits,
    working_set,
)
from semantic.domain.identity import NO_HINTS, Hints
from semantic.domain.value_objects import BLOCK_TOKENS

REUSABLE = 20 * 64


def request(agent: str, t: float, **others: object) -> Recorded:
    usual = {"in": 1500, "out": 100, "keep": 20, "think": 0.0, "stop": "tool_use"}
    return cast(Recorded, {"agent": agent, "t": t, **usual, **others})


SESSION = [
    request("a", 0),
    request("b", 3, stop="end_turn"),
    request("c", 6),
    request("a", 20, think=18.0),
    request("b", 30, think=25.0),
]


def test_visits_have_the_recorded_times() -> None:
    found = {(one.agent, one.begin): one for one in visits([SESSION], 1)}
    assert [(one.end, one.back_at) for one in found.values()] == [
        (2, 20),
        (22, None),
        (5, 30),
        (32, None),
        (8, None),
    ]
    assert working_set(list(found.values())) == 3 * 100


@pytest.mark.parametrize(
    ("teller", "missed"),
    [
        (silent, [0, 0, 0, REUSABLE, REUSABLE]),  # c takes the place of a, a that of b
        (done, [0, 0, 0, REUSABLE, 0]),  # a takes that of c
        (BackIn(), [0, 0, 0, 0, REUSABLE]),  # c takes that of b
        (both, [0, 0, 0, 0, REUSABLE]),
    ],
)
def test_what_is_missed_depends_on_what_is_told(teller: Teller, missed: list[int]) -> None:
    replay = Replay(2 * BLOCK_TOKENS, teller)
    replay.run(visits([SESSION], 1))
    replay.pool.check_integrity()
    assert (replay.missed, replay.unfit) == (missed, 0)


def test_a_tools_time_is_learned_from_the_calls_that_have_ended() -> None:
    first, other, *_ = visits([SESSION], 1)
    learned = Learned()
    later = [replace(first, end=100.0 * n, back_at=100.0 * n + 18) for n in range(5)]
    assert [learned(visit) for visit in later] == [NO_HINTS] * 3 + [Hints(back_in=18)] * 2
    assert learned(replace(other, end=500, calls_tool=False)) == NO_HINTS
