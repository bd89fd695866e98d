"""Steps check as many drafts as make tokens the soonest."""

from __future__ import annotations

import pytest

from semantic.adapters.mlx.batch.draft_costs import StepSeconds, Waiting, allotted
from semantic.ports.generation import Draft


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measured(**seconds: float) -> StepSeconds:
    """Steps of so many rows, each measured several times: `of_1=0.1` is 0.1 s for one row without
    drafts, and `checks_2` is for two rows of one sequence."""
    clock = Clock()
    found = StepSeconds(clock)
    for name, each in seconds.items():
        kind, _, n_rows = name.partition("_")
        for _ in range(6):
            clock.now += each
            found.stepped(int(n_rows), drafted=kind == "checks")
    return found


def test_a_likely_draft_is_checked_as_far_as_the_lane_reaches() -> None:
    seconds = measured(of_1=0.1, checks_8=0.11)
    assert allotted([Draft(range(20), 0.9)], 1, 7, seconds) == [7]
    assert allotted([Draft(range(3), 0.9)], 1, 7, seconds) == [3]


def test_an_unlikely_draft_does_not_pay() -> None:
    seconds = measured(of_1=0.1, checks_8=0.11)
    assert allotted([Draft(range(20), 0.02)], 1, 7, seconds) == [0]
    assert allotted([Draft((), 0.9)], 1, 7, seconds) == [0]


def test_steps_that_cost_their_rows_check_none() -> None:
    seconds = measured(of_1=0.1, checks_2=0.2, checks_4=0.4, checks_8=0.8)
    assert allotted([Draft(range(20), 0.9)], 1, 7, seconds) == [0]


def test_the_likelier_draft_gets_more_rows() -> None:
    few, many = allotted([Draft(range(9), 0.3), Draft(range(9), 0.9)], 2, 6, measured(of_2=0.1))
    assert few < many
    assert few + many <= 6


def test_a_step_without_drafts_is_measured_first() -> None:
    assert allotted([Draft(range(9), 0.9)], 1, 7, measured(checks_8=0.1)) == [0]


def waiting(found: Draft, n_checked: int, **seconds: float) -> Waiting:
    """After many steps without drafts, each followed by `found`."""
    made = Waiting(measured(**seconds))
    for _ in range(100):
        made.learn([found], [n_checked])
    return made


def test_a_step_waits_if_drafts_are_worth_the_time() -> None:
    worth_a_third = Draft([1, 2], 0.27), 2
    assert waiting(*worth_a_third, of_1=0.1, checks_1=0.13).pays(1)
    assert not waiting(*worth_a_third, of_1=0.1, checks_1=0.14).pays(1)
    assert not waiting(Draft([1, 2], 0.27), 1, of_1=0.1, checks_1=0.13).pays(1)


def test_more_rows_must_be_worth_their_own_time() -> None:
    made = waiting(Draft([1, 2], 0.27), 2, of_2=0.1, checks_2=0.12)
    assert not made.pays(2)
    made.learn([Draft([1], 1.0)] * 2, [1, 1])
    assert made.pays(2)


def test_no_step_waits_without_drafts_or_before_a_measurement() -> None:
    assert not waiting(Draft((), 0.0), 0, of_1=0.1).pays(1)
    assert waiting(Draft([1], 0.1), 1, of_1=0.1).pays(1), "the time of waiting is to be measured"
    assert not waiting(Draft([1], 1.0), 1, checks_1=0.1).pays(1)


def test_no_step_waits_long_after_the_last_draft_whatever_waiting_seems_to_take() -> None:
    made = waiting(Draft([1, 2], 0.9), 2, of_1=0.1, checks_1=0.09)
    assert made.pays(1)
    for _ in range(100):
        made.learn([Draft((), 0.0)], [0])
    assert not made.pays(1)


def test_the_first_step_of_a_size_other_work_and_pauses_do_not_count() -> None:
    clock = Clock()
    seconds = StepSeconds(clock)
    for each in (5.0, 0.1, 30.0, 0.4, 0.1, 0.1):
        clock.now += each
        if each == 0.4:
            seconds.pause()
        seconds.stepped(2, drafted=False)
    assert seconds.of(2, drafted=False) == pytest.approx(0.1)
    assert seconds.of(2, drafted=True) is None


def test_a_time_is_measured_again() -> None:
    clock = Clock()
    seconds = StepSeconds(clock)
    for n_rows, each, times in ((1, 0.1, 4), (4, 0.9, 4), (1, 0.1, 200)):
        for _ in range(times):
            clock.now += each
            seconds.stepped(n_rows, drafted=n_rows > 1)
    assert seconds.of(4, drafted=True) is None
    for _ in range(4):
        clock.now += 0.2
        seconds.stepped(4, drafted=True)
    assert seconds.of(4, drafted=True) == pytest.approx(0.2)
