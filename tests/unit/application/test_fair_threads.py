"""Threads that tenants share: by time, with one for short work alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from semantic.application.fair_threads import FairThreads
from semantic.domain.errors import BackendError

pytestmark = pytest.mark.process

_SECONDS = 60.0


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    found = FairThreads(3, "test")
    yield found
    found.close()


class Held:
    """Work that runs until it is let go."""

    def __init__(self) -> None:
        self.has_begun, self._go = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        assert self._go.wait(_SECONDS)
        return "done"

    def let_go(self) -> None:
        self._go.set()


def test_short_work_does_not_wait_for_other_work(threads: FairThreads) -> None:
    long = [Held() for _ in range(50)]
    waiting = [threads.submit("hostile", one, is_short=False) for one in long]
    for one in long[:2]:
        assert one.has_begun.wait(_SECONDS)
    for tenant in ("hostile", "other"):
        assert threads.submit(tenant, lambda: "hello", is_short=True).result(_SECONDS) == "hello"
    assert not long[2].has_begun.is_set()
    for one in long:
        one.let_go()
    assert [one.result(_SECONDS) for one in waiting] == ["done"] * 50


def test_who_has_used_less_time_goes_first() -> None:
    now = [0.0]
    order: list[str] = []
    threads = FairThreads(2, "test", clock=lambda: now[0])
    first = Held()
    held = threads.submit("a", first, is_short=False)
    assert first.has_begun.wait(_SECONDS)

    def work(name: str) -> None:
        order.append(name)
        now[0] += 1.0

    asked = [threads.submit(one, partial(work, one), is_short=False) for one in "aaabb"]
    now[0] += 10.0
    first.let_go()
    held.result(_SECONDS)
    for one in asked:
        one.result(_SECONDS)
    threads.close()
    assert order == ["b", "b", "a", "a", "a"]


def test_work_that_holds_the_interpreter_leaves_as_much_time_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, rested = [0.0], list[float]()
    monkeypatch.setattr(time, "sleep", rested.append)
    threads = FairThreads(2, "parse", clock=lambda: now[0], rests=True)

    def work(seconds: float) -> None:
        now[0] += seconds

    threads.submit("a", partial(work, 0.25), is_short=False).result(_SECONDS)
    threads.submit("a", partial(work, 0.5), is_short=True).result(_SECONDS)
    threads.submit("a", partial(work, 2.0), is_short=False).result(_SECONDS)
    threads.close()
    assert rested == [0.25, 2.0]


def test_errors_reach_who_waits_and_threads_go_on(threads: FairThreads) -> None:
    def fail() -> None:
        raise ValueError("wrong")

    def panic() -> None:
        raise SystemExit(3)

    with pytest.raises(ValueError, match="wrong"):
        threads.submit("a", fail, is_short=True).result(_SECONDS)
    with pytest.raises(BackendError, match="SystemExit"):
        threads.submit("a", panic, is_short=True).result(_SECONDS)
    assert asyncio.run(threads.run("a", lambda: 1, is_short=True)) == 1


def test_a_request_that_is_gone_is_not_worked_for(threads: FairThreads) -> None:
    long = [Held() for _ in range(2)]
    running = [threads.submit("a", one, is_short=False) for one in long]
    for one in long:
        assert one.has_begun.wait(_SECONDS)
    gone, stays = Held(), Held()
    first, second = (threads.submit("a", one, is_short=False) for one in (gone, stays))
    assert first.cancel()
    for one in (*long, stays):
        one.let_go()
    assert second.result(_SECONDS) == "done"
    assert not gone.has_begun.is_set()
    assert [one.result(_SECONDS) for one in running] == ["done"] * 2


def test_the_end_cancels_what_waits(threads: FairThreads) -> None:
    long = [Held() for _ in range(3)]
    asked = [threads.submit("a", one, is_short=False) for one in long]
    for one in long[:2]:
        assert one.has_begun.wait(_SECONDS)
    ending = threading.Thread(target=threads.close)
    ending.start()
    while not asked[2].cancelled():
        pass
    for one in long:
        one.let_go()
    ending.join(_SECONDS)
    assert [one.result(_SECONDS) for one in asked[:2]] == ["done"] * 2
