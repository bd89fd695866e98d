"""Turns on the one thread: shares by what waits, slices between steps, calls that break nothing."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import pytest

from semantic.application.engine import step_loop
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.engine.engine_thread import EngineThread
from semantic.application.engine.step_loop import FairTurns, StepLoop
from semantic.domain.errors import OverloadedError
from semantic.ports.generation import Slices, at_once
from semantic.ports.serving import EngineState
from tests.unit.application.thread_world import PATIENCE, Bug, Heard, Life


def shares(weights: dict[str, float], seconds: dict[str, float], turns: int) -> dict[str, float]:
    """The part of the time that each gets in so many turns."""
    order, had = FairTurns[str](), Counter[str]()
    for _ in range(turns):
        one = order.next(weights)
        order.account(one, seconds[one], weights[one])
        had[one] += int(seconds[one] * 1000)
    return {one: had[one] / had.total() for one in weights}


def test_time_is_shared_by_what_waits_whatever_a_turn_takes() -> None:
    got = shares({"a": 3, "b": 1}, {"a": 0.1, "b": 0.1}, 400)
    assert got["a"] == pytest.approx(0.75, abs=0.01)
    got = shares({"a": 1, "b": 1}, {"a": 0.2, "b": 0.02}, 400)
    assert got["a"] == pytest.approx(0.5, abs=0.01)


def test_one_that_comes_later_neither_waits_nor_catches_up() -> None:
    order = FairTurns[str]()
    for _ in range(100):
        order.account(order.next(["a"]), 1.0, 1)
    turns = []
    for _ in range(6):
        turns.append(order.next(["a", "b"]))
        order.account(turns[-1], 1.0, 1)
    assert Counter(turns) == {"a": 3, "b": 3}


@pytest.mark.parametrize(("step", "turns"), [(0.03, 9), (0.002, 125), (0.4, 4)])
def test_one_request_beside_a_hundred_of_another_model_waits_no_longer_than_a_gap(
    step: float, turns: int
) -> None:
    """Turns of the model with a hundred between two of the other one, which takes as long."""
    order, waits = FairTurns[str](), [0]
    weights = {"one": 1.0, "hundred": 100.0}
    while len(waits) < 50:
        key = order.next(weights)
        order.account(key, step, weights[key])
        if key == "one":
            waits.append(0)
        else:
            waits[-1] += 1
    most = min(100, turns)
    assert most - 1 <= min(waits[1:-1]) <= max(waits) <= most + 1


def test_what_ends_leaves_the_others_what_they_have_had() -> None:
    """As a call does between two steps."""
    order, turns = FairTurns[str](), Counter[str]()
    for i in range(1200):
        ready = {"a": 3.0, "b": 1.0, f"call {i // 3}": 1.0}
        key = order.next(ready)
        order.account(key, 0.0 if "call" in key else 0.001, ready[key])
        turns[key[0]] += 1
        if "call" in key:
            order.forget(key)
    assert turns["a"] == pytest.approx(3 * turns["b"], rel=0.02)


@dataclass
class Shared:
    """Two engines on one thread, whose turns all take as long."""

    loop: StepLoop = field(
        default_factory=lambda: StepLoop(clock=partial(next, itertools.count(0.0, 0.001)))
    )

    def start(self, life: Life, slices: Slices[BlockPoolBatchEngine] | None = None) -> EngineThread:
        thread = EngineThread(
            lambda: life.world.engine if slices is None else slices, loop=self.loop, keep_store=True
        )
        life.thread = thread
        thread.start()
        return thread


@pytest.mark.process
def test_engines_of_one_thread_answer_as_each_alone() -> None:
    shared, lives = Shared(), [Life(), Life("state")]
    for life in lives:
        shared.start(life).ready.result(PATIENCE)
    heard = [life.ask(f"agent {i}", seed=i)[1] for i in range(5) for life in lives]
    for i, one in enumerate(heard):
        assert one.check(lives[i % 2].spec).finish_reason == "length"
    uids = {one.done.uid for one in heard}
    assert len(uids) == len(heard), "requests of different engines have different ids"
    assert lives[0].thread.stop(drain=False)
    _, more = lives[1].ask("later")
    assert more.check(lives[1].spec).finish_reason == "length"
    assert lives[1].thread.stop(drain=False)


@pytest.mark.process
def test_an_engine_is_built_in_slices_between_the_steps_of_another() -> None:
    shared, talking, loading = Shared(), Life(), Life()
    shared.start(talking).ready.result(PATIENCE)
    heard = Heard(talking.order("talker", max_tokens=2000))
    seen: list[int] = []
    ready: Future[object] = Future()

    def slices() -> Slices[BlockPoolBatchEngine]:
        yield ready
        assert ready.done()
        while not seen or len(heard.calls) < seen[0] + 5:
            seen.append(len(heard.calls))
            yield None
        return loading.world.engine

    thread = shared.start(loading, slices())
    talking.thread.submit(heard.order, heard)
    talking.steps(3)
    assert thread.state is EngineState.LOADING
    assert not seen, "what a slice waits for is not there"
    ready.set_result(None)
    thread.ready.result(PATIENCE)
    assert len(set(seen)) > 3, "the other engine steps between slices, not after them"
    assert loading.ask("new")[1].check(loading.spec).finish_reason == "length"
    for life in (talking, loading):
        life.thread.stop(drain=False)


@pytest.mark.process
def test_a_build_in_slices_is_given_up_between_two_of_them() -> None:
    shared, life, begun, closed = Shared(), Life(), threading.Event(), threading.Event()

    def slices() -> Slices[BlockPoolBatchEngine]:
        try:
            while True:
                begun.set()
                yield None
        finally:
            closed.set()

    thread = shared.start(life, slices())
    assert begun.wait(PATIENCE)
    assert thread.stop(drain=False)
    assert closed.is_set()
    assert thread.state is EngineState.STOPPED
    with pytest.raises(OverloadedError):
        thread.ready.result(PATIENCE)


@pytest.mark.process
def test_a_slice_that_fails_ends_its_engine_alone() -> None:
    shared, talking, loading = Shared(), Life(), Life()
    shared.start(talking).ready.result(PATIENCE)

    def slices() -> Iterator[None]:
        yield None
        raise Bug("boom")

    thread = shared.start(loading, slices())  # type: ignore[arg-type]  # it never returns
    with pytest.raises(Bug):
        thread.ready.result(PATIENCE)
    assert thread.state is EngineState.FAILED
    assert talking.ask("ann")[1].check(talking.spec).finish_reason == "length"
    talking.thread.stop(drain=False)


def test_calls_of_the_loop_have_results_and_errors() -> None:
    loop = StepLoop()
    ident = loop.call(threading.get_ident).result(PATIENCE)
    assert ident != threading.get_ident()

    def fail() -> None:
        raise Bug("boom")

    with pytest.raises(Bug):
        loop.call(fail).result(PATIENCE)
    assert loop.call(threading.get_ident).result(PATIENCE) == ident


def test_a_process_exits_when_the_turn_has_ended() -> None:
    loop, begun, may_end = StepLoop(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait()

    done = loop.call(work)
    begun.wait()
    assert not loop.rest(seconds=0.01)
    may_end.set()
    assert loop.rest(PATIENCE)
    assert done.done()


def test_a_thread_that_rests_needs_the_interpreter_no_more() -> None:
    """Held at each line where it has released the lock, it does not count as at rest."""
    loop, held, may_go = StepLoop(), threading.Semaphore(0), threading.Semaphore(0)
    lines: list[int] = []

    def hold(frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and not loop.changed._is_owned():  # type: ignore[attr-defined]
            lines.append(frame.f_lineno)
            held.release()
            may_go.acquire()
        is_watched = frame.f_code.co_filename in (step_loop.__file__, threading.__file__)
        return hold if is_watched else None

    threading.settrace(hold)
    try:
        loop.call(lambda: None)
    finally:
        threading.settrace(None)
    while not loop.rest(0):
        if held.acquire(timeout=0.01):
            assert not loop.rest(0), "a thread that holds the interpreter is at rest"
            may_go.release()
    assert not held.acquire(blocking=False)
    assert lines


@pytest.mark.process
def test_slices_at_once_wait_for_what_they_need() -> None:
    later: Future[object] = Future()
    threading.Timer(0.01, later.set_result, (7,)).start()

    def work() -> Slices[int]:
        yield None
        yield later
        found = later.result(0)
        assert isinstance(found, int)
        return found

    assert at_once(work()) == 7
