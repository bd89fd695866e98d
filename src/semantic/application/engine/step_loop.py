"""StepLoop: runs several engines on the only thread that may use the framework."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from semantic.application.engine.memory_guard import MemoryGuard
from semantic.application.fair_threads import settle
from semantic.domain.errors import InvalidRequestError, SemanticError
from semantic.ports.generation import Clock
from semantic.ports.serving import MemoryFigures

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class EngineCall(Generic[E]):
    """Work to do with the engine between two steps. The loop calls `run` or `refuse`, once."""

    run: Callable[[E], None]
    refuse: Callable[[SemanticError], None]


def engine_call(function: Callable[[E], T]) -> tuple[EngineCall[E], Future[T]]:
    """Return an `EngineCall` of `function`, and the future of its result."""
    result: Future[T] = Future()

    def run(engine: E) -> None:
        settle(result, lambda: function(engine))

    def refuse(reason: SemanticError) -> None:
        if result.set_running_or_notify_cancel():
            result.set_exception(reason)

    return EngineCall(run, refuse), result


K = TypeVar("K")
T = TypeVar("T")

_MOST_WAIT, _FEWEST_TURNS = 0.25, 4
"""The seconds and the number of other lanes' turns after which a waiting lane comes first."""
_REST = 2.0
"""Seconds that an exiting process waits for a turn to end."""
_MORE_THAN_A_PIPE = 1 << 21
"""More bytes than a pipe holds: on Linux, a pipe of an unprivileged process holds 1 MiB."""


class Lane(Protocol):
    """Work that gets turns on the loop's thread."""

    @property
    def is_ready(self) -> bool:
        """True if `turn` has work to do."""

    @property
    def n_requests(self) -> int | None:
        """The number of the lane's requests; None while its engine is built."""

    def turn(self) -> bool:
        """Do one slice of the lane's work. Returns False if the lane has ended. Raises nothing."""

    def evict_idle(self, n_bytes: int, room: int) -> bool:
        """Evict `n_bytes` of idle caches; return whether this freed memory. The eviction uses at
        most `room` bytes."""


class StepLoop:
    """Runs lanes in one thread, which never ends."""

    def __init__(self, clock: Clock = time.monotonic, guard: MemoryGuard | None = None) -> None:
        """Call `guard.check` before each turn."""
        self.guard = guard
        # Guards the state that any thread may write: the lanes and their calls. Never held during a
        # turn.
        self.changed = threading.Condition()
        self.numbers = itertools.count()
        """The numbers of all requests, in the order of arrival."""
        self._clock = clock
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._lanes: list[Lane] = []
        self._turns: FairTurns[Lane] = FairTurns()
        self._parking: tuple[int, int] | None = None

    def add(self, lane: Lane) -> None:
        """Give turns to `lane` until it ends."""
        with self.changed:
            self._lanes.append(lane)
            if self._thread.ident is None:
                self._thread.start()
                atexit.register(self.rest)
            self.changed.notify_all()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` on the thread, between two turns; return the future of its result."""
        call: EngineCall[None]
        call, result = engine_call(lambda _: function())
        self.add(_Call(call))
        return result

    def rest(self, seconds: float = _REST) -> bool:
        """Block the thread for good, so that the process can exit. Returns False if the thread is
        still busy after `seconds`."""
        with self.changed:
            self._parking = self._parking or os.pipe()
            self.changed.notify_all()
        parked = select.poll()
        parked.register(self._parking[0], select.POLLIN)
        return bool(parked.poll(seconds * 1000))

    def others_work(self, lane: Lane) -> bool:
        """Return whether another lane has work to do. Only for the loop's thread."""
        with self.changed:
            return any(one is not lane and one.is_ready for one in self._lanes)

    @property
    def is_out_of_memory(self) -> bool:
        """True if new requests must wait for memory."""
        if self.guard is None or not self.guard.is_exceeded:
            return False
        return any(lane.is_ready and lane.n_requests != 0 for lane in self._lanes)

    @property
    def memory(self) -> MemoryFigures | None:
        return None if self.guard is None else self.guard.figures

    async def look_at_memory(self) -> None:
        await asyncio.wrap_future(self.call(lambda: None))  # the guard measures before each turn

    async def limit_memory(self, n_bytes: int | None) -> MemoryFigures:
        guard = self.guard
        if guard is None:
            raise InvalidRequestError("the memory of this process is not limited")

        def limit() -> MemoryFigures:
            guard.limit(n_bytes)
            guard.check()
            return guard.figures

        return await asyncio.wrap_future(self.call(limit))

    def evict_idle(self, n_bytes: int) -> bool:
        """Evict idle caches of the first lane that has them. Only for the loop's thread."""
        with self.changed:
            lanes = list(self._lanes)
        room = sys.maxsize if self.guard is None else self.guard.left()
        return any(lane.evict_idle(n_bytes, room) for lane in lanes)

    def _main(self) -> None:
        while True:
            self._turn()

    def _turn(self) -> None:
        with self.changed:
            while self._parking is None and not (ready := self._weights()):
                self.changed.wait()
        if self._parking is not None:
            # The thread blocks here, without the interpreter, once the pipe is full and readable.
            os.write(self._parking[1], bytes(_MORE_THAN_A_PIPE))
            return
        lane = self._turns.next(ready)
        if self.guard is not None:
            self.guard.check()  # first: after a last turn the process may be exiting
        is_building = lane.n_requests is None
        started = self._clock()
        has_more = lane.turn()
        if is_building and self.guard is not None:
            self.guard.settle()
        self._turns.account(lane, self._clock() - started, ready[lane])
        if not has_more:
            with self.changed:
                self._lanes.remove(lane)
            self._turns.forget(lane)  # or the lane stays alive, with its references
            del lane, ready

    def _weights(self) -> dict[Lane, float]:
        # A lane that builds its engine weighs as much as all others: its requests wait for the
        # build.
        ready = [(one, one.n_requests) for one in self._lanes if one.is_ready]
        working = sum(max(1, n) for _, n in ready if n is not None)
        return {one: float(max(1, working if n is None else n)) for one, n in ready}


class FairTurns(Generic[K]):
    """Decides which key gets the next turn, by used time and weight."""

    def __init__(self) -> None:
        self._had: dict[K, float] = {}
        self._waits: dict[K, _Wait] = {}

    def next(self, ready: Collection[K]) -> K:
        """Return the key that gets the next turn. `ready` must not be empty."""
        least = min((self._had[one] for one in ready if one in self._had), default=0.0)
        self._had = {one: self._had.get(one, least) for one in ready}
        self._waits = {one: self._waits.get(one) or _Wait() for one in ready}
        overdue = [one for one in ready if self._waits[one].is_too_long]
        if overdue:
            return max(overdue, key=lambda one: self._waits[one].seconds)
        return min(self._had, key=self._had.__getitem__)

    def account(self, key: K, seconds: float, weight: float) -> None:
        """Record a turn of `key` that took `seconds`."""
        self._had[key] += seconds / weight
        for one, wait in self._waits.items():
            wait.seconds += seconds
            wait.turns += 1
            if one == key:
                self._waits[one] = _Wait()

    def forget(self, key: K) -> None:
        self._had.pop(key, None)
        self._waits.pop(key, None)


@dataclass(slots=True)
class _Wait:
    seconds: float = 0.0
    turns: int = 0

    @property
    def is_too_long(self) -> bool:
        return self.seconds >= _MOST_WAIT and self.turns >= _FEWEST_TURNS


class _Call:
    is_ready = True
    n_requests = 0

    def __init__(self, call: EngineCall[None]) -> None:
        self._call = call

    def turn(self) -> bool:
        self._call.run(None)
        return False

    def evict_idle(self, n_bytes: int, room: int) -> bool:  # noqa: ARG002
        return False
