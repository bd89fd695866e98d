"""EngineThread: runs an engine on one thread, from loading the model to saving its agents.

Callers do not wait for a step: submissions go into a queue, and events to listeners.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from semantic.application.engine.admission import Admission, QueueLimits, limit_bytes
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.engine.step_loop import EngineCall, StepLoop, engine_call
from semantic.application.engine.submission import Listener, RequestHandle, Submission
from semantic.application.fair_threads import Failure, attempt
from semantic.domain.errors import (
    BackendError,
    CapacityError,
    OverloadedError,
    RequestError,
    SemanticError,
)
from semantic.domain.fair_share import RoundRobin
from semantic.domain.prefix import digests_of
from semantic.domain.stored import Tier
from semantic.domain.value_objects import CompletedGeneration
from semantic.ports.generation import Clock, EngineEvent, Slices
from semantic.ports.serving import EngineFigures, EngineState

T = TypeVar("T")

_RETRY_AFTER = 5
"""Retry-After, in seconds, while the engine cannot accept requests."""
_NO_MEMORY = "the process has reached its memory limit; running requests must finish first"

_SUBMISSIONS_PER_STEP, _ACCEPT_SECONDS = 16, 0.02
"""The maximum number of submissions to accept per step, and the time limit in seconds."""


def _ignore(_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class _Stop:
    """The order to stop. Running requests may finish until `deadline`. None sets no deadline."""

    deadline: float | None


class EngineThread:
    """Runs one engine. Methods are thread-safe and, except `stop`, return at once. After an
    exception in a step, builds another engine around the same store."""

    def __init__(
        self,
        build: Callable[[], BlockPoolBatchEngine | Slices[BlockPoolBatchEngine]],
        rebuild: Callable[[], BlockPoolBatchEngine] | None = None,
        limits: QueueLimits | None = None,
        *,
        loop: StepLoop | None = None,
        keep_store: bool = False,
        clock: Clock = time.monotonic,
        on_failure: Callable[[Exception], None] = _ignore,
    ) -> None:
        """The thread calls `build`, `rebuild` and `on_failure`. `rebuild` makes an engine around
        a failed engine's store."""
        self.ready: Future[None] = Future()
        self._build = build
        self._rebuild = rebuild
        self._limits = limits or QueueLimits()
        self._clock = clock
        self._on_failure = on_failure
        self._loop = loop or StepLoop()
        self._keep_store = keep_store
        # Guards the state that any thread may write: the three queues, the state and the stop
        # request. Never held while the engine works.
        self._changed = self._loop.changed
        self._is_started = False
        self._inbox: RoundRobin[RequestHandle] = RoundRobin()
        self._to_cancel: deque[RequestHandle] = deque()
        self._calls: deque[EngineCall[BlockPoolBatchEngine]] = deque()
        self._state = EngineState.LOADING
        self._reason: str | None = None
        self._stop: _Stop | None = None
        # Used by the thread only.
        self._building: Slices[BlockPoolBatchEngine] | None = None
        self._awaited: Future[object] | None = None
        self._engine: BlockPoolBatchEngine | None = None
        self._admission: Admission | None = None
        self._handles: dict[str, RequestHandle] = {}
        self._never_ran: dict[str, RequestHandle] = {}
        self._past_preemptions = 0
        self._past_restored: Counter[Tier] = Counter()
        self._rebuilds = 0

    # Life

    def start(self) -> None:
        """Start to build the engine; call this once. The future `ready` ends when the engine is
        built."""
        self.ready.set_running_or_notify_cancel()  # one waiter must not cancel it for others
        self._is_started = True
        self._loop.add(self)

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def failure(self) -> str | None:
        """The reason for the state FAILED; None in any other state."""
        return self._reason

    def stop(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Refuse new requests, end running requests and save every agent; return whether the thread
        has ended. If `drain`, running requests may finish within `timeout` seconds. A second call
        cancels them at once."""
        with self._changed:
            again = self._stop is not None
            seconds = timeout if drain and not again else 0.0
            self._stop = _Stop(None if seconds is None else self._clock() + seconds)
            if self._state.accepts_submissions:
                self._state = EngineState.STOPPING
            if not self._is_started and not self._state.is_over:
                self._state = EngineState.STOPPED  # never started
                self.ready.set_exception(self._refusal())
            mine = self._stop
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._state.is_over or again or self._stop is not mine)
            return self._state.is_over

    # Submissions

    def submit(self, submission: Submission, listener: Listener) -> RequestHandle:
        """Queue a request for the next step. Raises OverloadedError, and BackendError if the
        engine has failed for good."""
        handle, prompt = RequestHandle(submission, listener), submission.prompt
        digests = digests_of(() if isinstance(prompt, str) else prompt)
        with self._changed:
            if not self._state.accepts_submissions or self._admission is None:
                raise self._refusal()
            if self._loop.is_out_of_memory:
                raise OverloadedError(_NO_MEMORY, retry_after=_RETRY_AFTER)
            self._admission.enter(handle, submission.max_total_tokens, submission.tenant, digests)
            self._inbox.push(handle.submission.tenant, handle)
            self._changed.notify_all()
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """Cancel a request within one step."""
        if handle.accepted.cancel():
            if self._admission is not None:
                self._admission.leave(handle)
            return
        with self._changed:
            self._to_cancel.append(handle)
            self._changed.notify_all()

    def call(self, function: Callable[[BlockPoolBatchEngine], T]) -> Future[T]:
        """Call `function` with the engine, between two steps; return the future of its result.
        Raises the same errors as `submit` once the thread has ended."""
        call, result = engine_call(function)
        with self._changed:
            if self._state.is_over:
                raise self._refusal()
            self._calls.append(call)
            self._changed.notify_all()
        return result

    @property
    def figures(self) -> EngineFigures:
        engine, admission = self._engine, self._admission
        if engine is None or admission is None:
            return EngineFigures(self._state)
        return EngineFigures(
            self._state,
            inbox=len(self._inbox),
            waiting=len(engine.waiting),
            running=engine.n_running,
            idle=len(engine.idle_caches),
            queued=admission.waiting,
            queued_bytes=admission.n_bytes,
            pool_used_bytes=engine.pool.used_bytes,
            pool_bytes=limit_bytes(engine.pool),
            preemptions=self._past_preemptions + engine.preemptions,
            rebuilds=self._rebuilds,
            restored_bytes=self._past_restored + engine.restored_bytes,
        )

    # On the thread: see `Lane`

    @property
    def is_ready(self) -> bool:
        if self._stop is not None:
            return True
        if self._engine is None:
            return self._awaited is None or self._awaited.done()
        return bool(self._inbox or self._to_cancel or self._calls or self._engine.has_work)

    @property
    def n_requests(self) -> int | None:
        return None if self._engine is None else len(self._inbox) + self._engine.n_requests

    def turn(self) -> bool:
        has_more = attempt(self._advance)
        if has_more is True:
            return True
        self._shut_down(has_more if isinstance(has_more, Failure) else None)
        self._engine = self._admission = self._building = None
        return False

    def evict_idle(self, n_bytes: int, room: int) -> bool:
        return self._engine is not None and self._engine.evict_idle(n_bytes, room)

    def _advance(self) -> bool:
        """Do one slice of the engine's work; return False if the engine must stop."""
        engine = self._engine
        if engine is None:
            return self._build_on()
        with self._changed:
            if not (self._inbox or self._to_cancel or self._calls or engine.has_work):
                return self._stop is None
        failure = attempt(partial(self._iterate, engine))
        if failure is not None:
            self._engine = self._rebuilt(engine, failure)
            del engine
            gc.collect()  # the broken engine is part of reference cycles
        return True

    def _build_on(self) -> bool:
        """Do one slice of the build; return False if `stop` ended the build early."""
        if self._building is None:
            built = self._build()
            if isinstance(built, BlockPoolBatchEngine):
                self._begin(built)
                return True
            self._building = built
        elif self._stop is not None:
            self._building.close()
            return False
        try:
            self._awaited = next(self._building)
        except StopIteration as end:
            self._building = None
            self._begin(end.value)
        else:
            if self._awaited is not None:
                self._awaited.add_done_callback(self._wake)
        return True

    def _begin(self, engine: BlockPoolBatchEngine) -> None:
        self._engine = self._sharing(engine)
        self._admission = Admission(self._limits, engine.pool, self._clock)
        self._set_state(EngineState.READY)
        self.ready.set_result(None)

    def _sharing(self, engine: BlockPoolBatchEngine) -> BlockPoolBatchEngine:
        others_work = partial(self._loop.others_work, self)
        engine.share(others_work, self._loop.numbers, by_tenants=self._limits.shared)
        if self._loop.guard is not None:
            engine.keep_within(self._loop.guard)
        return engine

    def _wake(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def _set_state(self, state: EngineState) -> None:
        with self._changed:
            self._state = state if self._stop is None else EngineState.STOPPING

    def _iterate(self, engine: BlockPoolBatchEngine) -> Failure | None:
        """Run one step; return the exception that broke the engine, or None."""
        for _ in range(len(self._calls)):
            self._calls.popleft().run(engine)
        self._cancel_overdue(engine)
        deadline = self._clock() + _ACCEPT_SECONDS
        for _ in range(min(len(self._inbox), _SUBMISSIONS_PER_STEP)):
            with self._changed:
                handle = self._inbox.pop()
            failure = self._accept(engine, handle)
            if failure is not None:
                return failure
            if self._clock() >= deadline:
                break
        for _ in range(len(self._to_cancel)):
            handle = self._to_cancel.popleft()
            if handle.uid is not None and self._handles.get(handle.uid) is handle:
                engine.cancel(handle.uid)
        events = attempt(engine.step_once)
        if isinstance(events, Failure):
            return events
        self._notify_all(engine, events)
        self._update_queue(engine)
        return None

    def _accept(self, engine: BlockPoolBatchEngine, handle: RequestHandle) -> Failure | None:
        """Submit the request of `handle`; return the exception that broke the engine, or None."""
        if not handle.accepted.set_running_or_notify_cancel():
            self._dequeue(handle)
            return None
        uid = attempt(lambda: engine.enqueue(handle.submission))
        if isinstance(uid, Failure):
            self._dequeue(handle)
            handle.accepted.set_exception(uid.error)
            return None if isinstance(uid.error, (RequestError, CapacityError)) else uid
        handle.uid = uid
        self._handles[uid] = self._never_ran[uid] = handle
        handle.accepted.set_result(uid)
        return None

    def _notify_all(self, engine: BlockPoolBatchEngine, events: Sequence[EngineEvent]) -> None:
        by_request: dict[str, list[EngineEvent]] = {}
        for event in events:
            by_request.setdefault(event.uid, []).append(event)
        for uid, own in by_request.items():
            handle = self._handles.get(uid)
            if handle is None:
                continue  # submitted by an EngineCall
            if isinstance(own[-1], CompletedGeneration):
                del self._handles[uid]
            if not self._notify(handle, own):
                # The listener is broken: cancelling the request saves its tokens.
                handle.listener = _ignore
                engine.cancel(uid)

    def _notify(self, handle: RequestHandle, events: Sequence[EngineEvent]) -> bool:
        outcome = attempt(lambda: handle.notify(events))
        if isinstance(outcome, Failure):
            self._report(outcome)
        return outcome is None

    def _update_queue(self, engine: BlockPoolBatchEngine) -> None:
        # Preempted requests do not return to the queue.
        waiting = engine.waiting
        for uid in [uid for uid in self._never_ran if uid not in waiting]:
            self._dequeue(self._never_ran.pop(uid))

    def _dequeue(self, handle: RequestHandle) -> None:
        if self._admission is not None:
            self._admission.leave(handle)

    def _report(self, failure: Failure) -> None:
        attempt(lambda: self._on_failure(failure.error))

    # Failing and ending, on the thread

    def _rebuilt(self, broken: BlockPoolBatchEngine, failure: Failure) -> BlockPoolBatchEngine:
        """Build another engine around the same store. Raises BackendError if the build fails."""
        self._set_state(EngineState.REBUILDING)
        self._report(failure)
        failure.drop_frames()  # frames refer to the broken engine and its caches
        self._fail_all(f"the engine failed: {failure}")
        if self._rebuild is None:
            raise BackendError(f"the engine failed: {failure}")
        attempt(lambda: broken.close(keep_store=True))
        engine = attempt(self._rebuild)
        if isinstance(engine, Failure):
            self._report(engine)
            raise BackendError(f"the engine failed ({failure}) and cannot be rebuilt: {engine}")
        self._past_preemptions += broken.preemptions
        self._past_restored += broken.restored_bytes
        self._rebuilds += 1
        self._set_state(EngineState.READY)
        return self._sharing(engine)

    def _fail_all(self, reason: str) -> None:
        handles = list(self._handles.values())
        self._handles.clear()
        self._never_ran.clear()
        for handle in handles:
            self._dequeue(handle)
            self._notify(handle, [handle.failed(reason)])

    def _cancel_overdue(self, engine: BlockPoolBatchEngine) -> None:
        stop = self._stop
        if stop is None or stop.deadline is None or self._clock() < stop.deadline:
            return
        self._refuse_inbox()
        for uid in self._handles:
            engine.cancel(uid)

    def _refuse_inbox(self) -> None:
        for _ in range(len(self._inbox)):
            with self._changed:
                handle = self._inbox.pop()
            self._dequeue(handle)
            if handle.accepted.set_running_or_notify_cancel():
                handle.accepted.set_exception(self._refusal())

    def _shut_down(self, outcome: Failure | None) -> None:
        engine = self._engine
        failures = [] if outcome is None else [outcome]
        if engine is not None:
            closed = attempt(lambda: engine.close(keep_store=self._keep_store))
            failures += [] if closed is None else [closed]
        for failure in failures:
            self._report(failure)
        self._reason = "; ".join(map(str, failures)) or None
        with self._changed:
            self._state = EngineState.FAILED if failures else EngineState.STOPPED
            self._changed.notify_all()
        self._fail_all(f"the engine failed: {self._reason}")
        self._refuse_inbox()
        for _ in range(len(self._calls)):
            self._calls.popleft().refuse(self._refusal())
        if not self.ready.done():
            self.ready.set_exception(self._refusal() if outcome is None else outcome.error)

    def _refusal(self) -> SemanticError:
        if self._state is EngineState.FAILED:
            return BackendError(f"the engine failed: {self._reason}")
        doing = "being loaded" if self._state is EngineState.LOADING else "stopping"
        return OverloadedError(f"the engine is {doing}", retry_after=_RETRY_AFTER)
