"""The replay of returns: milliseconds by hints and what is read ahead; histories that are left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.absence import SCALE, Visit, both
from benchmarks.left_histories import left_histories
from benchmarks.returns import FIRST_STEP, Replay, Speeds, Tier, Way, halved, measured
from semantic.domain.value_objects import BLOCK_TOKENS
from tests.tools.test_absence import request

SPEEDS = Speeds(prefill=1000, disk=10_000, memory=100_000)
COLUMN = BLOCK_TOKENS * SCALE
"""Tokens of the recording in a block of the replay."""
FIRST = Visit("a", 0, 10, BLOCK_TOKENS, 0, 1000, calls_tool=True, back_at=60)
BACK = Visit("a", 60, 70, BLOCK_TOKENS, COLUMN, 1000, calls_tool=False, back_at=None)
OTHER = Visit("b", 20, 30, BLOCK_TOKENS, 0, 1000, calls_tool=False, back_at=None)


def seconds(*visits: Visit, way: Way, columns: int = 1) -> list[float]:
    """To the first token of each request, in the order in which the pool has room for them."""
    replay = Replay(visits, columns * BLOCK_TOKENS, way, SPEEDS)
    replay.run()
    replay.pool.check_integrity()
    return [round(one - FIRST_STEP, 3) for one in replay.seconds]


AHEAD = round(COLUMN / 8 / SPEEDS.memory + COLUMN * 7 / 8 / SPEEDS.disk, 3)


def test_what_was_evicted_is_restored_from_where_it_is() -> None:
    assert seconds(FIRST, BACK, way=Way()) == [1, 1]
    third = replace(OTHER, agent="c", begin=40, end=50)
    assert seconds(FIRST, OTHER, BACK, way=Way(), columns=2) == [1, 1, 1]
    # The other one has pushed its history out of the memory tier.
    assert seconds(FIRST, OTHER, third, BACK, way=Way()) == [1, 1, 1, round(1 + COLUMN / 1e4, 3)]


def test_reading_ahead_fills_half_of_the_memory_tier_if_the_hint_is_right() -> None:
    told = Way(lambda: both, when_expected=True)
    assert seconds(FIRST, OTHER, BACK, way=told)[-1] == pytest.approx(1 + AHEAD, abs=2e-3)
    wrong = Way(lambda: lambda _: halved()(FIRST), when_expected=True)
    assert seconds(FIRST, BACK, way=wrong) == [1, 1]


def test_a_request_that_waits_for_room_is_read_ahead() -> None:
    others = replace(OTHER, agent="c", begin=12, end=18), replace(OTHER, end=65)
    replay = Replay([FIRST, *others, BACK], BLOCK_TOKENS, Way(when_waiting=True), SPEEDS)
    replay.run()
    assert replay.waited == pytest.approx(5)
    assert replay.seconds[-1] - FIRST_STEP == pytest.approx(1 + AHEAD, abs=2e-3)


def test_the_memory_tier_loses_the_ends_of_what_was_used_longest_ago() -> None:
    tier = Tier(100)
    for agent, n_tokens in (("a", 60), ("b", 30), ("c", 50)):
        tier.put(agent, n_tokens)
    assert [tier.of(agent) for agent in "abc"] == [20, 30, 50]
    tier.put("d", 200)
    assert [tier.of(agent) for agent in "abcd"] == [0, 0, 0, 100]


def test_the_speeds_are_those_that_were_measured() -> None:
    assert all(speed > 1000 for speed in measured())


def test_a_history_that_was_left_is_evicted_before_what_agents_go_on_from() -> None:
    def asked(agent: str, t: float, keep: int, new: range) -> dict[str, object]:
        n_tokens = 64 * (keep + len(new))
        return {**request(agent, t, keep=keep), "in": n_tokens, "new": list(new)}

    session = [
        asked("live", 0, 0, range(40)),
        asked("a", 1, 0, range(100, 140)),
        asked("a", 2, 4, range(200, 216)),  # compacted
        asked("b", 3, 0, range(300, 316)),
        asked("live", 4, 40, range(40, 44)),
    ]
    rows = list(left_histories([session], 1000))  # type: ignore[list-item]
    lost = {(row["share"], row["order"]): row["lost_blocks"] for row in rows}
    assert lost[1.0, "left first"] == lost[1.0, "dropped"] == 0
    assert 0 < int(str(lost[1.0, "left sooner"])) < int(str(lost[1.0, "last used"]))
    assert {row["returned"] for row in rows} == {0}
