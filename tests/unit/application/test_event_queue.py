"""Events of many requests reach their tasks with one call into the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from semantic.application.serving import Arrivals, EventQueue
from semantic.domain.value_objects import PrefillEvent
from semantic.ports.generation import EngineEvent


def event(number: int) -> PrefillEvent:
    return PrefillEvent(f"request-{number}", "agent", number, 10)


def test_a_step_of_many_requests_is_one_call_into_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[..., object]] = []

    async def steps() -> list[list[EngineEvent]]:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def counted(function: Callable[..., object]) -> object:
            calls.append(function)
            return call(function)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        arrivals = Arrivals(loop)
        queues = [EventQueue(arrivals) for _ in range(128)]
        seen: list[list[EngineEvent]] = []
        for _ in range(3):
            tasks = [asyncio.ensure_future(anext(queue)) for queue in queues]
            await asyncio.sleep(0)  # all of them wait
            for number, queue in enumerate(queues):
                queue.put([event(number)])
            seen.append(await asyncio.gather(*tasks))
        return seen

    assert asyncio.run(steps()) == [[event(number) for number in range(128)]] * 3
    assert len(calls) == 3


def test_a_closed_loop_is_reported_each_time() -> None:
    loop = asyncio.new_event_loop()
    queue = EventQueue(Arrivals(loop))
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            queue.put([event(0)])
