"""Many threads ask, one drives the engine; every order ends exactly once, whatever breaks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from semantic.adapters.stores.memory import MemoryStore
from semantic.application.engine.admission import QueueLimits
from semantic.application.engine.engine_thread import EngineThread
from semantic.application.engine.step_loop import StepLoop
from semantic.application.engine.submission import RequestHandle, Submission
from semantic.domain.errors import (
    BackendError,
    IntegrityError,
    InvalidRequestError,
    OverloadedError,
    PoolExhaustedError,
)
from semantic.domain.value_objects import TokenEvent
from semantic.ports.generation import EngineEvent
from semantic.ports.serving import EngineFigures, EngineState
from tests.support.fake_clock import FakeClock
from tests.support.lanes import more
from tests.unit.application.thread_world import (
    PATIENCE,
    Bug,
    FakeEngine,
    Heard,
    Life,
    Panic,
    running,
)
from tests.unit.application.world import SPECS, VARIANTS, expected, text_of

pytestmark = pytest.mark.process


class ClosingStore(MemoryStore):
    """Counts how often it was closed; what it has outlives that, as on a disk."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


# Answers


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_an_answer_is_the_models_own(kind: str, variant: int) -> None:
    with running(Life(kind)) as life:
        ticket, heard = life.ask("ann", variant=variant)
        done = heard.check(life.spec)
        assert ticket.accepted.result(PATIENCE) == ticket.uid == done.uid


def test_the_engine_is_built_and_driven_on_its_own_thread() -> None:
    where = []

    def build(engine: FakeEngine) -> FakeEngine:
        where.append(threading.get_ident())
        return engine

    with running(Life(build=build)) as life:
        where.append(life.thread.call(lambda _: threading.get_ident()).result(PATIENCE))
        assert where[0] == where[1] != threading.get_ident()


def test_a_listener_hears_all_of_a_step_in_one_call() -> None:
    with running(Life(max_batch=2)) as life:
        with life.held():
            all_heard = [life.ask(f"agent {i}", seed=i)[1] for i in range(4)]
        for heard in all_heard:
            heard.check(life.spec)
            tokens = [[e for e in call if isinstance(e, TokenEvent)] for call in heard.calls]
            assert max(map(len, tokens)) == 1, "a step is one token"
            assert len(heard.calls[-1]) == 2, "the last token and the end"


def test_submitting_waits_for_no_step() -> None:
    with running(Life()) as life:
        with life.held():
            _, heard = life.ask("ann")
            assert heard.calls == []
        heard.check(life.spec)


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (Submission("ann", (), 5), InvalidRequestError),
        (Submission("", (1,), 5), InvalidRequestError),
        (Submission("ann", (10_000,), 5), InvalidRequestError),
        (Submission("ann", (1,), 0), InvalidRequestError),
        (Submission("ann", (1,) * 100_000, 5), PoolExhaustedError),
    ],
)
def test_what_the_engine_refuses_comes_to_who_asked(
    order: Submission, error: type[Exception]
) -> None:
    with running(Life()) as life:
        heard = Heard(order)
        with pytest.raises(error):
            life.thread.submit(order, heard).accepted.result(PATIENCE)
        life.ask("bob")[1].check(life.spec)
        assert heard.calls == []
        assert life.failures == []
        assert life.thread.figures.queued == 0


def test_a_failing_row_fails_alone() -> None:
    with running(Life()) as life:
        with life.held():
            life.world.backend.fail_next("prefill_together")
            life.world.backend.fail_next("prefill")
            first, second = life.ask("ann")[1], life.ask("bob", seed=2)[1]
        ends = {heard.check(life.spec).finish_reason for heard in (first, second)}
        assert ends == {"error", "length"}
        assert (life.failures, life.thread.figures.rebuilds) == ([], 0)


# The queue


def test_a_full_queue_says_when_to_come_again() -> None:
    with running(Life(limits=QueueLimits(max_waiting=3))) as life:
        with life.held():
            all_heard = [life.ask(f"agent {i}", seed=i)[1] for i in range(3)]
            with pytest.raises(
                OverloadedError, match="the queue is full: it holds at most 3 requests"
            ) as raised:
                life.ask("one too many")
            assert 1 <= raised.value.retry_after <= 60
            assert life.thread.figures.queued == life.thread.figures.inbox == 3
        for heard in all_heard:
            heard.check(life.spec)
        life.ask("later")[1].check(life.spec)


def test_who_runs_does_not_fill_the_queue() -> None:
    with running(Life(limits=QueueLimits(max_waiting=2), max_batch=3)) as life:
        asked = []
        for i in range(3):
            asked.append(life.ask(f"agent {i}", seed=i, max_tokens=3000))
            life.steps(2)
        assert life.thread.figures.queued == 0
        with life.held():
            asked += [life.ask(f"agent {i}", seed=i) for i in (3, 4)]
            with pytest.raises(OverloadedError):
                life.ask("one too many")
        life.steps(2)
        figures = life.thread.figures
        assert (figures.running, figures.waiting, figures.inbox, figures.queued) == (3, 2, 0, 2)
        assert figures.queued_bytes == 2 * life.spec.bytes_for(35)
        for ticket, _ in asked[:3]:
            life.thread.cancel(ticket)
        for _, heard in asked:
            heard.check(life.spec)


def _note(order: list[str], tenant: str, _: object) -> None:
    order.append(tenant)


def test_a_tenant_is_not_behind_all_that_another_handed_in() -> None:
    accepted: list[str] = []
    with running(Life()) as life, life.held():
        for i, tenant in enumerate(["flood"] * 5 + ["own", "other"]):
            heard = Heard(replace(life.order(f"agent {i}", seed=i), tenant=tenant))
            handle = life.thread.submit(heard.order, heard)
            handle.accepted.add_done_callback(partial(_note, accepted, tenant))
    assert accepted[:4] == ["flood", "own", "other", "flood"]
    assert len(accepted) == 7


def test_a_crowd_is_handed_in_bit_by_bit() -> None:
    with running(Life(max_batch=40)) as life:
        ticket, talker = life.ask("talker", max_tokens=3000)
        life.steps(3)
        with life.held():
            crowd = [life.ask(f"agent {i}", seed=i % 7)[1] for i in range(40)]
            before = len(talker.calls)
        life.steps(2)
        assert len(talker.calls) > before
        life.thread.cancel(ticket)
        for heard in (talker, *crowd):
            heard.check(life.spec)


def test_accepting_a_burst_takes_little_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = FakeClock(), []
    enqueue, step_once = FakeEngine.enqueue, FakeEngine.step_once

    def slow(engine: FakeEngine, submission: Submission) -> str:
        clock.advance(0.015)
        seen.append("accepts")
        return enqueue(engine, submission)

    def noted(engine: FakeEngine) -> list[EngineEvent]:
        seen.append("steps")
        return step_once(engine)

    monkeypatch.setattr(FakeEngine, "enqueue", slow)
    monkeypatch.setattr(FakeEngine, "step_once", noted)
    with running(Life(clock=clock)) as life:
        with life.held():
            burst = [life.ask(f"agent {i}", seed=i)[1] for i in range(7)]
        for heard in burst:
            heard.check(life.spec)
    assert seen[:11] == [*["accepts", "accepts", "steps"] * 3, "accepts", "steps"]


# Cancelling


def test_an_order_in_the_inbox_can_be_cancelled() -> None:
    with running(Life()) as life:
        with life.held():
            ticket, heard = life.ask("ann")
            life.thread.cancel(ticket)
            life.thread.cancel(ticket)
            assert life.thread.figures.queued == 0
        with pytest.raises(CancelledError):
            ticket.accepted.result(PATIENCE)
        life.ask("bob")[1].check(life.spec)
        assert heard.calls == []


def test_who_waits_for_acceptance_may_give_up() -> None:
    with running(Life()) as life:
        with life.held():
            ticket, heard = life.ask("ann")
            assert ticket.accepted.cancel()
        life.ask("bob")[1].check(life.spec)
        assert heard.calls == []
        assert life.thread.figures.queued == 0


@pytest.mark.parametrize("max_batch", [1, 2])
def test_a_waiting_and_a_running_request_end_within_a_step(max_batch: int) -> None:
    with running(Life(max_batch=max_batch)) as life:
        life.ask("talker", max_tokens=2000)
        ticket, heard = life.ask("ann", seed=2, max_tokens=2000)
        life.steps(10)
        with life.held():
            life.thread.cancel(ticket)
            before = len(heard.calls)
            life.thread.cancel(ticket)
        assert heard.check(life.spec).finish_reason == "cancelled"
        assert len(heard.calls) <= before + 1
        life.thread.cancel(ticket)
        life.steps(2)
        assert len(heard.calls) <= before + 1


def test_what_a_cancelled_request_computed_is_kept() -> None:
    with running(Life()) as life:
        ticket, heard = life.ask("ann", n=700, max_tokens=2000)
        while not any(isinstance(event, TokenEvent) for event in heard.events):
            life.steps()
        life.thread.cancel(ticket)
        done = heard.check(life.spec)
        _, again = life.ask("ann", n=700)
        assert again.check(life.spec).cached_tokens == 699
        assert done.finish_reason == "cancelled"


# Calls


def test_a_function_sees_the_engine_between_two_steps() -> None:
    with running(Life()) as life:
        life.ask("ann")[1].check(life.spec)
        life.thread.call(lambda engine: engine.fork("ann", "bob")).result(PATIENCE)
        assert life.thread.call(lambda engine: engine.forget("bob")).result(PATIENCE) is True
        assert life.thread.call(lambda engine: engine.forget("bob")).result(PATIENCE) is False


def test_what_a_function_raises_is_its_callers() -> None:
    def break_down(_: FakeEngine) -> None:
        raise Bug("mine")

    with running(Life()) as life:
        with pytest.raises(Bug, match="mine"):
            life.thread.call(break_down).result(PATIENCE)
        with pytest.raises(InvalidRequestError):
            life.thread.call(lambda engine: engine.fork("nobody", "x")).result(PATIENCE)
        assert life.failures == []


def test_a_call_that_nobody_waits_for_any_more_is_not_made() -> None:
    made: list[FakeEngine] = []
    with running(Life()) as life:
        with life.held():
            assert life.thread.call(made.append).cancel()
        life.steps()
    assert made == []


def test_without_work_the_thread_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    life, loop = Life(), StepLoop()
    life.thread = EngineThread(lambda: life.world.engine, loop=loop)
    tester, wait = threading.current_thread(), loop.changed.wait
    waits: list[float | None] = []
    sleeps = threading.Event()

    def counted(timeout: float | None = None) -> bool:
        if threading.current_thread() is not tester:
            waits.append(timeout)
            sleeps.set()
        try:
            return wait(timeout)
        finally:
            sleeps.clear()

    monkeypatch.setattr(loop.changed, "wait", counted)
    with running(life):
        life.ask("ann")[1].check(life.spec)
        assert sleeps.wait(PATIENCE)
        n_waits, steps = len(waits), life.world.backend.calls["decode"]
        time.sleep(0.1)
        assert len(waits) == n_waits, "it wakes though nothing has changed"
        assert waits[-1] is None, "it waits for a change, and for no time to pass"
        assert life.world.backend.calls["decode"] == steps


# Breaking


def kept(life: Life, agent: str, seed: int) -> int:
    """How many tokens the agent's next request begins with."""
    _, heard = life.ask(agent, seed=seed, n=700)
    return heard.check(life.spec).cached_tokens


@pytest.mark.parametrize(
    "error",
    [
        Bug("boom"),
        MemoryError(),
        IntegrityError("wrong account"),
        Panic("in another language"),
        SystemExit(3),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_broken_engine_is_built_again_and_idle_agents_are_still_there(
    error: BaseException,
) -> None:
    with running(Life()) as life:
        life.ask("idle", seed=3, n=700)[1].check(life.spec)
        _, talker = life.ask("talker", max_tokens=3000)
        life.steps(5)
        with life.held():
            life.world.backend.breaks = error
        done = talker.check(life.spec)
        assert done.finish_reason == "error"
        assert type(error).__name__ in (done.error or "")
        assert kept(life, "idle", 3) >= 512
        (failure,) = life.failures
        assert error in (failure, failure.__cause__)
        figures = life.thread.figures
        assert (figures.state, figures.rebuilds) == (EngineState.READY, 1)
        assert len(life.worlds) == 2
        life.thread.call(lambda engine: engine.check_integrity()).result(PATIENCE)


def test_orders_in_the_inbox_go_on_with_the_next_engine() -> None:
    with running(Life(max_batch=2)) as life:
        life.ask("talker", max_tokens=3000)
        life.steps(3)
        with life.held():
            life.world.backend.breaks = Bug("boom")
            # Sixteen are handed in before the step that breaks.
            all_heard = [life.ask(f"agent {i}", seed=i)[1] for i in range(20)]
        reasons = [heard.check(life.spec).finish_reason for heard in all_heard]
        assert reasons == ["error"] * 16 + ["length"] * 4


def test_an_old_ticket_cancels_nobody_of_the_next_engine() -> None:
    with running(Life()) as life:
        old, first = life.ask("ann", max_tokens=3000)
        life.steps(3)
        with life.held():
            life.world.backend.breaks = Bug("boom")
        assert first.done.finish_reason == "error"
        new, second = life.ask("ann", max_tokens=3000)
        assert new.accepted.result(PATIENCE) != old.uid
        life.thread.cancel(old)
        life.steps(3)
        assert not second.ended.is_set()
        life.thread.cancel(new)
        assert second.check(life.spec).finish_reason == "cancelled"


def test_preemptions_are_counted_over_all_engines() -> None:
    with running(Life(columns=3)) as life:
        for _ in range(2):
            before = life.thread.figures.preemptions
            all_heard = [life.ask(f"agent {i}", seed=i, n=250, max_tokens=40)[1] for i in range(3)]
            for heard in all_heard:
                heard.check(life.spec)
            assert life.thread.figures.preemptions > before
            with life.held():
                life.world.backend.breaks = Bug("boom")
                life.ask("breaker")
            life.steps(2)
            assert life.thread.figures.preemptions > before


def test_a_submission_that_breaks_the_engine_is_refused_and_the_engine_replaced() -> None:
    def breaks(*_: object, **__: object) -> str:
        raise Bug("boom")

    with running(Life()) as life:
        with life.held():
            life.world.engine.enqueue = breaks  # type: ignore[method-assign]
            first, second = life.ask("ann"), life.ask("bob")
        with pytest.raises(Bug):
            first[0].accepted.result(PATIENCE)
        second[1].check(life.spec)
        assert life.thread.figures.rebuilds == 1


def test_a_listener_that_breaks_hurts_nobody_else() -> None:
    with running(Life()) as life:
        with life.held():
            _, broken = life.ask("ann", max_tokens=2000, raises=True)
            others = [life.ask(f"agent {i}", seed=i, max_tokens=40)[1] for i in range(3)]
        for heard in others:
            assert heard.check(life.spec).finish_reason == "length"
        assert [type(error) for error in life.failures] == [Bug]
        assert len(broken.calls) == 1
        figures = life.thread.figures
        assert (figures.running, figures.waiting, figures.rebuilds) == (0, 0, 0)


def test_an_engine_that_cannot_be_built_again_is_the_end() -> None:
    def fails(_: FakeEngine) -> FakeEngine:
        raise Bug("no memory")

    store = ClosingStore(1 << 30)
    with running(Life(store=store, rebuild=fails)) as life:
        _, talker = life.ask("talker", max_tokens=3000)
        life.steps(3)
        with life.held():
            life.world.backend.breaks = Bug("boom")
            tickets = [life.ask(f"agent {i}", seed=i)[0] for i in range(20)]
        assert talker.done.finish_reason == "error"
        for ticket in tickets[16:]:
            with pytest.raises(BackendError, match="cannot be rebuilt"):
                ticket.accepted.result(PATIENCE)
        with pytest.raises(BackendError, match="boom"):
            life.ask("late")
        with pytest.raises(BackendError):
            life.thread.call(lambda _: None)
        assert life.thread.state is EngineState.FAILED
        assert "no memory" in (life.thread.failure or "")
        assert store.closed == 1


def test_without_a_way_to_build_it_again_a_broken_engine_is_the_end() -> None:
    with running(Life(rebuilds=False)) as life:
        life.world.backend.breaks = Bug("boom")
        assert life.ask("ann")[1].done.finish_reason == "error"
        assert life.thread.stop()
        assert life.thread.state is EngineState.FAILED


# Beginning


def test_an_engine_that_cannot_be_built_says_why() -> None:
    def fails(_: FakeEngine) -> FakeEngine:
        raise Bug("no such model")

    life = Life(build=fails)
    waiting = life.thread.call(lambda _: None)
    life.thread.start()
    with pytest.raises(Bug, match="no such model"):
        life.thread.ready.result(PATIENCE)
    with pytest.raises(BackendError):
        waiting.result(PATIENCE)
    assert life.thread.state is EngineState.FAILED
    assert life.thread.failure == "Bug: no such model"
    assert [str(error) for error in life.failures] == ["no such model"]
    with pytest.raises(BackendError):
        life.ask("ann")


def test_no_orders_are_taken_while_the_model_is_loaded() -> None:
    release = threading.Event()

    def slowly(engine: FakeEngine) -> FakeEngine:
        assert release.wait(PATIENCE)
        return engine

    life = Life(build=slowly)
    assert life.thread.figures == EngineFigures(EngineState.LOADING)
    life.thread.start()
    with pytest.raises(OverloadedError, match="being loaded"):
        life.ask("ann")
    assert not life.thread.ready.cancel(), "who waits cannot end it for the others"
    release.set()
    life.thread.ready.result(PATIENCE)
    life.ask("ann")[1].check(life.spec)
    assert life.thread.stop()


# Ending


def test_stopping_lets_everybody_end_and_saves_all() -> None:
    store = ClosingStore(1 << 30)
    life = Life(store=store, max_batch=2)
    with running(life):
        with life.held():
            all_heard = [life.ask(f"agent {i}", seed=i, n=700)[1] for i in range(30)]
        assert life.thread.stop()
        assert {heard.check(life.spec).finish_reason for heard in all_heard} == {"length"}
        assert store.closed == 1
        assert life.thread.state is EngineState.STOPPED
    with running(Life(store=store)) as after:
        assert kept(after, "agent 7", 7) >= 512


class TickingClock(FakeClock):
    """Advances by a hundredth of a second each time that it is read."""

    def __call__(self) -> float:
        self.advance(0.01)
        return super().__call__()


@pytest.mark.parametrize("how", [{"drain": False}, {"timeout": 0.05}])
def test_stopping_at_once_cancels_and_saves_all(how: dict[str, float]) -> None:
    store = ClosingStore(1 << 30)
    life = Life(store=store, clock=TickingClock())
    with running(life), ThreadPoolExecutor(1) as other:
        asked = [life.ask(f"agent {i}", seed=i, n=700, max_tokens=10_000) for i in range(3)]
        while not all(any(isinstance(e, TokenEvent) for e in heard.events) for _, heard in asked):
            life.steps()
        with life.held():
            steps = life.world.backend.calls["decode"]
            drain, timeout = bool(how.get("drain", True)), how.get("timeout")
            stopped = other.submit(life.thread.stop, drain=drain, timeout=timeout)
            while life.thread.state is not EngineState.STOPPING:
                time.sleep(0.001)
        assert stopped.result(PATIENCE)
        assert life.world.backend.calls["decode"] - steps < 10
        assert {heard.check(life.spec).finish_reason for _, heard in asked} == {"cancelled"}
    with running(Life(store=store)) as after:
        assert kept(after, "agent 1", 1) >= 512


def test_orders_that_never_began_are_refused_when_there_is_no_time() -> None:
    with running(Life()) as life:
        with life.held():
            ticket, heard = life.ask("ann")
            stopping = threading.Thread(target=lambda: life.thread.stop(drain=False))
            stopping.start()
            while life.thread.state is not EngineState.STOPPING:
                time.sleep(0.001)
            with pytest.raises(OverloadedError, match="stopping"):
                life.ask("late")
        stopping.join(PATIENCE)
        with pytest.raises(OverloadedError, match="stopping"):
            ticket.accepted.result(PATIENCE)
        assert heard.calls == []


def test_stopping_again_cancels_and_waits_no_more() -> None:
    with running(Life()) as life:
        ticket, heard = life.ask("ann", max_tokens=12_000)
        ticket.accepted.result(PATIENCE)
        first = threading.Thread(target=life.thread.stop)
        with life.held():  # what is running cannot end meanwhile
            first.start()
            while life.thread.state is not EngineState.STOPPING:
                time.sleep(0.001)
            assert not life.thread.stop()
            first.join(PATIENCE)
            assert not first.is_alive()
        assert heard.check(life.spec).finish_reason == "cancelled"
    assert life.thread.stop(), "it is over now, and may be said again"


def test_a_thread_that_never_began_can_be_stopped() -> None:
    life = Life()
    assert life.thread.stop()
    assert life.thread.state is EngineState.STOPPED
    with pytest.raises(OverloadedError):
        life.thread.ready.result(PATIENCE)


def test_a_store_that_cannot_be_closed_is_told() -> None:
    class Stuck(MemoryStore):
        def close(self) -> None:
            raise OSError("disk full")

    life = Life(store=Stuck(1 << 30))
    with running(life):
        life.ask("ann")[1].check(life.spec)
    assert "disk full" in (life.thread.failure or "")
    assert [str(error) for error in life.failures] == ["disk full"]


# All at once


@pytest.mark.parametrize("seed", [*range(3), *more(*range(3, 12))])
def test_nothing_is_lost_whatever_happens(seed: int) -> None:
    """Threads ask and cancel, listeners break, rows fail, engines break, at random; then the end
    comes while some still run."""
    draw = Random(seed)
    kind = draw.choice(sorted(SPECS))
    life = Life(
        kind,
        columns=draw.choice([4, 8, 50]),
        max_batch=draw.choice([1, 3, 8]),
        limits=QueueLimits(max_waiting=draw.choice([4, 1000])),
    )

    def client(number: int) -> list[tuple[RequestHandle, Heard]]:
        own = Random(seed * 100 + number)
        asked: list[tuple[RequestHandle, Heard]] = []
        for turn in range(12):
            if own.random() < 0.04:
                life.world.backend.breaks = Bug("at random")
            if own.random() < 0.05:
                life.world.backend.fail_next(own.choice(["prefill", "decode", "open"]))
            try:
                ticket, heard = life.ask(
                    f"agent {own.randrange(4)}",
                    own.randrange(3),
                    own.choice([3, 250, 300, 500]),
                    own.choice([1, 9, 40]),
                    variant=own.randrange(3),
                    raises=own.random() < 0.05,
                )
            except OverloadedError:
                time.sleep(0.01)
                continue
            if own.random() < 0.2:
                time.sleep(own.random() * 0.01)
                life.thread.cancel(ticket)
            asked.append((ticket, heard))
            if turn % 3 == 2 and not heard.raises:
                wait_for(ticket, heard)
        return asked

    with running(life), ThreadPoolExecutor(6) as threads:
        results = [one for own in threads.map(client, range(6)) for one in own]
        assert life.thread.stop(drain=draw.random() < 0.5)
    for ticket, heard in results:
        check_end(life, ticket, heard)
    life.world.engine.check_integrity()
    assert life.world.backend.n_open == 0
    assert life.thread.figures.queued == life.thread.figures.queued_bytes == 0
    assert life.thread.state is EngineState.STOPPED


def wait_for(ticket: RequestHandle, heard: Heard) -> None:
    """Until the order has ended, one way or the other."""
    accepted = ticket.accepted
    try:
        accepted.result(PATIENCE)
    except (CancelledError, OverloadedError):
        return
    assert heard.ended.wait(PATIENCE)


def check_end(life: Life, ticket: RequestHandle, heard: Heard) -> None:
    """The order ended once: refused, cancelled, broken off or answered rightly."""
    accepted = ticket.accepted
    assert accepted.done()
    if accepted.cancelled() or accepted.exception() is not None:
        assert heard.calls == []
        assert accepted.cancelled() or isinstance(accepted.exception(), OverloadedError)
    elif not heard.raises:
        done = heard.check(life.spec)
        assert done.finish_reason != "error" or done.error


def test_a_bug_hits_only_the_requests_that_the_engine_had() -> None:
    """A new step of another engine gives the same answers as a step of the first one."""
    with running(Life()) as life:
        for n in range(5):
            with life.held():
                life.world.backend.breaks = Bug(str(n))
                _, broken = life.ask("broken", max_tokens=50)
            assert broken.check(life.spec).finish_reason == "error"
            _, heard = life.ask("fine", seed=n, n=300, max_tokens=20)
            assert heard.check(life.spec).finish_reason == "length"
        assert life.thread.figures.rebuilds == len(life.worlds) - 1 == 5
        assert [str(error) for error in life.failures] == list("01234")


def test_answers_do_not_depend_on_who_asks_when() -> None:
    prompts = {f"agent {i}": text_of(i, 200 + 40 * i) for i in range(8)}
    with running(Life(columns=12)) as life, ThreadPoolExecutor(8) as threads:

        def client(agent: str) -> tuple[int, ...]:
            order = replace(life.order(agent), prompt=prompts[agent], max_tokens=30)
            heard = Heard(order)
            life.thread.submit(order, heard)
            return heard.done.tokens

        answers = dict(zip(prompts, threads.map(client, prompts), strict=True))
        for agent, prompt in prompts.items():
            assert answers[agent] == expected(life.spec, prompt, 30).tokens
