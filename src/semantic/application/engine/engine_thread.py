"""EngineThread: the one thread that builds an engine, drives it and ends it.

Whoever asks puts orders into an inbox and never waits for a step; answers come to listeners.
Knows engines and threads; no event loop, no transport and no model format.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from semantic.application.engine.admission import Admission, QueueLimits, limit_bytes
from semantic.application.engine.attempt import Failure, attempt
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.engine.engine_call import EngineCall, engine_call
from semantic.application.engine.engine_state import EngineFigures, EngineState
from semantic.application.engine.order import Listener, Order, RequestHandle
from semantic.domain.errors import (
    BackendError,
    CapacityError,
    OverloadedError,
    RequestError,
    SemanticError,
)
from semantic.domain.stored import Tier
from semantic.domain.value_objects import CompletedGeneration
from semantic.ports.inbound import EngineEvent
from semantic.ports.outbound import Clock

T = TypeVar("T")

_SOON = 5
"""Seconds to come again in, while the model is being loaded or the process ends."""

_ORDERS_PER_STEP = 16
"""Handing one in takes a look into the store: a crowd must not hold up those that run."""


def _ignore(_: object) -> None:
    """Hears nothing."""


@dataclass(frozen=True, slots=True)
class _Stop:
    """That the thread is to end: when what was taken in has ended, or is cancelled at `deadline`.

    A deadline of None is none.
    """

    deadline: float | None


class EngineThread:
    """Runs one engine in a thread of its own, from loading the model to saving every agent.

    Every method may be called from any thread and, `stop` excepted, returns at once. Whatever
    breaks a step ends the requests that the engine had; the engine is built again around the same
    store, and the orders in the inbox go on.
    """

    def __init__(
        self,
        build: Callable[[], BlockPoolBatchEngine],
        rebuild: Callable[[], BlockPoolBatchEngine] | None = None,
        limits: QueueLimits | None = None,
        *,
        clock: Clock = time.monotonic,
        on_failure: Callable[[Exception], None] = _ignore,
    ) -> None:
        """`build` and `rebuild` are called on the thread; `rebuild` after a failure, for an engine
        with the store of the one before. `on_failure` is told, there too, whatever was raised
        that nobody expects, by the engine or a listener; tracebacks are gone after that.
        """
        self.ready: Future[None] = Future()
        self._build = build
        self._rebuild = rebuild
        self._limits = limits or QueueLimits()
        self._clock = clock
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        # Guards what any thread may write: the three boxes, the state and the wish to stop. Never
        # held while the engine works.
        self._changed = threading.Condition()
        self._inbox: deque[RequestHandle] = deque()
        self._to_cancel: deque[RequestHandle] = deque()
        self._calls: deque[EngineCall[BlockPoolBatchEngine]] = deque()
        self._state = EngineState.LOADING
        self._reason: str | None = None
        self._stop: _Stop | None = None
        # The thread's own.
        self._engine: BlockPoolBatchEngine | None = None
        self._admission: Admission | None = None
        self._tickets: dict[str, RequestHandle] = {}
        self._never_ran: dict[str, RequestHandle] = {}
        self._past_preemptions = 0
        self._past_restored: Counter[Tier] = Counter()
        self._rebuilds = 0

    # Life

    def start(self) -> None:
        """Begin to build the engine; `ready` is done when it is there, or raises what `build`
        did. To be called once."""
        self.ready.set_running_or_notify_cancel()  # who waits for it cannot cancel it for all
        self._thread.start()

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def failure(self) -> str | None:
        """Why the state is FAILED; None when it is not."""
        return self._reason

    def stop(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Take no more orders, end those there are, save every agent; return when that is done.

        With `drain` they go on to their end, for at most `timeout` seconds; then, or without it,
        they are cancelled: what was computed is kept. Called again meanwhile, it cancels them and
        returns at once, as does the call before. Returns whether all is over.
        """
        with self._changed:
            again = self._stop is not None
            seconds = timeout if drain and not again else 0.0
            self._stop = _Stop(None if seconds is None else self._clock() + seconds)
            if self._state.takes_orders:
                self._state = EngineState.STOPPING
            if not self._thread.is_alive() and not self._state.is_over:
                self._state = EngineState.STOPPED  # it was never started
                self.ready.set_exception(self._refusal())
            mine = self._stop
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._state.is_over or again or self._stop is not mine)
            return self._state.is_over

    # Orders

    def submit(self, order: Order, listener: Listener) -> RequestHandle:
        """Take `order` in; the engine has it between two steps, and `RequestHandle.accepted` tells.

        Raises OverloadedError when the queue is full, the model is being loaded or the thread is
        stopping, and BackendError when there will be no engine any more.
        """
        ticket = RequestHandle(order, listener)
        with self._changed:
            if not self._state.takes_orders or self._admission is None:
                raise self._refusal()
            self._admission.enter(ticket, order.most_tokens)
            self._inbox.append(ticket)
            self._changed.notify_all()
        return ticket

    def cancel(self, ticket: RequestHandle) -> None:
        """End an order within one step. Does nothing when it has ended."""
        if ticket.accepted.cancel():
            if self._admission is not None:
                self._admission.leave(ticket)
            return
        with self._changed:
            self._to_cancel.append(ticket)
            self._changed.notify_all()

    def call(self, function: Callable[[BlockPoolBatchEngine], T]) -> Future[T]:
        """Let `function` look at the engine, or change it, between two steps.

        The result is what it returns or raises. Raises as `submit` when the thread has ended.
        """
        call, result = engine_call(function)
        with self._changed:
            if self._state.is_over:
                raise self._refusal()
            self._calls.append(call)
            self._changed.notify_all()
        return result

    @property
    def figures(self) -> EngineFigures:
        """How things stand."""
        engine, admission = self._engine, self._admission
        if engine is None or admission is None:
            return EngineFigures(self._state)
        load = engine.load
        return EngineFigures(
            self._state,
            inbox=len(self._inbox),
            waiting=len(load.waiting),
            running=load.running,
            queued=admission.waiting,
            queued_bytes=admission.n_bytes,
            pool_used_bytes=load.pool.used_bytes,
            pool_bytes=limit_bytes(load.pool),
            preemptions=self._past_preemptions + load.preemptions,
            rebuilds=self._rebuilds,
            restored_bytes=self._past_restored + load.restored_bytes,
        )

    # On the thread

    def _main(self) -> None:
        self._end(attempt(self._live))
        self._engine = self._admission = None
        # A thread that ends gives back what the framework keeps for it, and that needs the
        # interpreter: a process that ends in the same moment is aborted. It waits instead, with
        # nothing in its hands, until the process is gone.
        threading.Event().wait()

    def _live(self) -> None:
        self._engine = self._build()
        self._admission = Admission(self._limits, self._engine.load.pool, self._clock)
        self._become(EngineState.READY)
        self.ready.set_result(None)
        while self._wait_for_work(self._engine):
            failure = self._turn(self._engine)
            if failure is not None:
                self._engine = self._replace(self._engine, failure)
                gc.collect()  # the broken engine is in cycles

    def _become(self, state: EngineState) -> None:
        with self._changed:
            self._state = state if self._stop is None else EngineState.STOPPING

    def _wait_for_work(self, engine: BlockPoolBatchEngine) -> bool:
        """Return when there is something to do; False when there will be nothing any more."""
        with self._changed:
            while not (self._inbox or self._to_cancel or self._calls or engine.has_work):
                if self._stop is not None:
                    return False
                self._changed.wait()
            return True

    def _turn(self, engine: BlockPoolBatchEngine) -> Failure | None:
        """Empty the boxes and run one step; what broke the engine, if something did.

        Only this thread takes from the boxes, so what was in there still is.
        """
        for _ in range(len(self._calls)):
            self._calls.popleft().work(engine)
        self._hurry(engine)
        for _ in range(min(len(self._inbox), _ORDERS_PER_STEP)):
            failure = self._hand_in(engine, self._inbox.popleft())
            if failure is not None:
                return failure
        for _ in range(len(self._to_cancel)):
            ticket = self._to_cancel.popleft()
            if ticket.uid is not None and self._tickets.get(ticket.uid) is ticket:
                engine.cancel(ticket.uid)
        events = attempt(engine.step_once)
        if isinstance(events, Failure):
            return events
        self._tell_all(engine, events)
        self._settle_queue(engine)
        return None

    def _hand_in(self, engine: BlockPoolBatchEngine, ticket: RequestHandle) -> Failure | None:
        """Give an order to the engine; what broke that, if it is more than a refusal."""
        if not ticket.accepted.set_running_or_notify_cancel():
            self._leave(ticket)
            return None
        order = ticket.order
        uid = attempt(
            lambda: engine.submit(
                order.agent_id,
                order.prompt,
                max_tokens=order.max_tokens,
                sampling=order.sampling,
                tenant=order.tenant,
                note=order.note,
            )
        )
        if isinstance(uid, Failure):
            self._leave(ticket)
            ticket.accepted.set_exception(uid.error)
            return None if isinstance(uid.error, (RequestError, CapacityError)) else uid
        ticket.uid = uid
        self._tickets[uid] = self._never_ran[uid] = ticket
        ticket.accepted.set_result(uid)
        return None

    def _tell_all(self, engine: BlockPoolBatchEngine, events: Sequence[EngineEvent]) -> None:
        """Let each listener hear its own events of one step, in one call."""
        by_request: dict[str, list[EngineEvent]] = {}
        for event in events:
            by_request.setdefault(event.uid, []).append(event)
        for uid, own in by_request.items():
            ticket = self._tickets.get(uid)
            if ticket is None:
                continue  # a call's own
            if isinstance(own[-1], CompletedGeneration):
                del self._tickets[uid]
            if not self._tell(ticket, own):
                # Nobody hears its answer: it ends, and what was computed is kept.
                ticket.listener = _ignore
                engine.cancel(uid)

    def _tell(self, ticket: RequestHandle, events: Sequence[EngineEvent]) -> bool:
        outcome = attempt(lambda: ticket.tell(events))
        if isinstance(outcome, Failure):
            self._report(outcome)
        return outcome is None

    def _settle_queue(self, engine: BlockPoolBatchEngine) -> None:
        """Who holds blocks, or has ended, has left the queue; a preempted one does not come back
        into it."""
        waiting = engine.load.waiting
        for uid in [uid for uid in self._never_ran if uid not in waiting]:
            self._leave(self._never_ran.pop(uid))

    def _leave(self, ticket: RequestHandle) -> None:
        if self._admission is not None:
            self._admission.leave(ticket)

    def _report(self, failure: Failure) -> None:
        attempt(lambda: self._on_failure(failure.error))

    # Failing and ending, on the thread

    def _replace(self, broken: BlockPoolBatchEngine, failure: Failure) -> BlockPoolBatchEngine:
        """End what the broken engine had; another one around the same store.

        Raises BackendError when there will be none.
        """
        self._become(EngineState.REBUILDING)
        self._report(failure)
        failure.drop_frames()  # they hold the broken engine, and its caches with it
        self._break_off(f"the engine failed: {failure}")
        if self._rebuild is None:
            raise BackendError(f"the engine failed: {failure}")
        attempt(lambda: broken.close(keep_store=True))
        engine = attempt(self._rebuild)
        if isinstance(engine, Failure):
            self._report(engine)
            raise BackendError(f"the engine failed ({failure}) and cannot be rebuilt: {engine}")
        self._past_preemptions += broken.preemptions
        self._past_restored += broken.load.restored_bytes
        self._rebuilds += 1
        self._become(EngineState.READY)
        return engine

    def _break_off(self, reason: str) -> None:
        """Let everybody hear that the engine is gone."""
        tickets = list(self._tickets.values())
        self._tickets.clear()
        self._never_ran.clear()
        for ticket in tickets:
            self._leave(ticket)
            self._tell(ticket, [ticket.broken_off(reason)])

    def _hurry(self, engine: BlockPoolBatchEngine) -> None:
        """When the time to end in peace is over, cancel everything."""
        stop = self._stop
        if stop is None or stop.deadline is None or self._clock() < stop.deadline:
            return
        self._refuse_inbox()
        for uid in self._tickets:
            engine.cancel(uid)

    def _refuse_inbox(self) -> None:
        for _ in range(len(self._inbox)):
            ticket = self._inbox.popleft()
            self._leave(ticket)
            if ticket.accepted.set_running_or_notify_cancel():
                ticket.accepted.set_exception(self._refusal())

    def _end(self, outcome: Failure | None) -> None:
        """Close what there is, and let nobody wait for what will not come."""
        closed = None if self._engine is None else attempt(self._engine.close)
        failures = [one for one in (outcome, closed) if one is not None]
        for failure in failures:
            self._report(failure)
        self._reason = "; ".join(map(str, failures)) or None
        with self._changed:
            self._state = EngineState.FAILED if failures else EngineState.STOPPED
            self._changed.notify_all()
        self._break_off(f"the engine failed: {self._reason}")
        self._refuse_inbox()
        for _ in range(len(self._calls)):
            self._calls.popleft().refuse(self._refusal())
        if outcome is not None and not self.ready.done():
            self.ready.set_exception(outcome.error)

    def _refusal(self) -> SemanticError:
        """Why nothing is taken in now."""
        if self._state is EngineState.FAILED:
            return BackendError(f"the engine failed: {self._reason}")
        doing = "being loaded" if self._state is EngineState.LOADING else "stopping"
        return OverloadedError(f"the engine is {doing}", retry_after=_SOON)
