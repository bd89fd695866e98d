"""StepLoop: runs the only thread that may use the framework, and decides which engine uses the
thread next. Knows nothing about engines or models. The thread serves all requests, so it survives
every exception of an engine or a listener."""

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
    """Work to do with the engine between two of its steps. The loop calls either `run` or `refuse`,
    once. Neither function raises."""

    run: Callable[[E], None]
    refuse: Callable[[SemanticError], None]


def engine_call(function: Callable[[E], T]) -> tuple[EngineCall[E], Future[T]]:
    """Return an `EngineCall` that calls `function`, and the future of its result; cancelling the
    future skips the call."""
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
"""The seconds, and the turns of other lanes, after which a waiting lane comes first. Otherwise a
stream would stop for seconds while another model has a hundred requests."""
_REST = 2.0
"""Seconds that an exiting process waits for a turn to end."""
_MORE_THAN_A_PIPE = 1 << 21
"""More bytes than a pipe holds: on Linux, a pipe of an unprivileged process holds 1 MiB."""


class Lane(Protocol):
    """Work that gets turns on the loop's thread. The loop holds its condition while it reads a
    lane's properties, but not while it calls the lane's methods."""

    @property
    def is_ready(self) -> bool:
        """True if `turn` has work to do."""

    @property
    def n_requests(self) -> int | None:
        """The number of the lane's requests; None while the lane builds its engine."""

    def turn(self) -> bool:
        """Do one slice of work; return False if the lane ends for good. Raises nothing."""

    def evict_idle(self, n_bytes: int, room: int) -> bool:
        """Evict `n_bytes` of idle caches, using at most `room` bytes of memory; return whether this
        freed memory."""


class StepLoop:
    """Runs lanes in one thread, which starts with the first lane and never ends: a thread that ends
    needs the interpreter to release the framework's thread-local state, and a process that exits at
    that moment would abort."""

    def __init__(self, clock: Clock = time.monotonic, guard: MemoryGuard | None = None) -> None:
        """Calls `guard.check` before each turn."""
        self.guard = guard
        # Guards the state that any thread may write: the lanes and their calls. Never held during a
        # turn.
        self.changed = threading.Condition()
        self.numbers = itertools.count()
        """The numbers for all requests, in the order of arrival."""
        self._clock = clock
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._lanes: list[Lane] = []
        self._turns: FairTurns[Lane] = FairTurns()
        self._parking: tuple[int, int] | None = None

    def add(self, lane: Lane) -> None:
        """Give turns to `lane` until the lane has no more work."""
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
        """Block the thread for good after its turn, so that the process can exit. At exit, the
        interpreter kills a thread that needs its lock, and the framework then aborts the process.
        Returns False if the thread still runs after `seconds`."""
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
        """True if new requests must wait for memory. Callers hold the condition."""
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
        """Call `Lane.evict_idle` of the first lane with idle caches. Only for the loop's thread."""
        with self.changed:
            lanes = list(self._lanes)
        room = sys.maxsize if self.guard is None else self.guard.left()
        return any(lane.evict_idle(n_bytes, room) for lane in lanes)

    def _main(self) -> None:
        while True:
            self._turn()

    def _turn(self) -> None:
        """Wait until a lane is ready, and give it a turn."""
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
        started = self._clock()
        has_more = lane.turn()
        self._turns.account(lane, self._clock() - started, ready[lane])
        if not has_more:
            with self.changed:
                self._lanes.remove(lane)
            self._turns.forget(lane)  # or the lane stays alive, with its references
            del lane, ready

    def _weights(self) -> dict[Lane, float]:
        """Return the ready lanes, weighted by the number of their requests. A lane that builds its
        engine weighs as much as all other lanes, because its requests wait for the whole build."""
        ready = [(one, one.n_requests) for one in self._lanes if one.is_ready]
        working = sum(max(1, n) for _, n in ready if n is not None)
        return {one: float(max(1, working if n is None else n)) for one, n in ready}


class FairTurns(Generic[K]):
    """Decides which key gets the next turn: the ready key with the least used time relative to its
    weight. A key that becomes ready starts with the least used time of a ready key, so that neither
    key must catch up. A key that has waited too long comes first, see `_MOST_WAIT`."""

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
        """Record that `key`, which `next` returned, has had a turn of `seconds`. The key's used
        time grows by `seconds / weight`."""
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
    """The time and turns of other lanes since a lane became ready or had its last turn."""

    seconds: float = 0.0
    turns: int = 0

    @property
    def is_too_long(self) -> bool:
        return self.seconds >= _MOST_WAIT and self.turns >= _FEWEST_TURNS


class _Call:
    """A lane with a single turn, which calls a function."""

    is_ready = True
    n_requests = 0

    def __init__(self, call: EngineCall[None]) -> None:
        self._call = call

    def turn(self) -> bool:
        self._call.run(None)
        return False

    def evict_idle(self, n_bytes: int, room: int) -> bool:  # noqa: ARG002
        return False
