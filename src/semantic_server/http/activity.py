"""A server's recent requests, and its figures of the last minutes. Stores names and counts, never
texts."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from http import HTTPStatus
from typing import Final, Literal, TypeVar

from anyio import to_thread

from semantic.domain.errors import OverloadedError, SemanticError
from semantic.ports.agents import AgentsPort, RunningRequest
from semantic.ports.serving import Figures
from semantic_server.http.answer_records import AnswerRecord, Observer
from semantic_server.http.errors import RETRY_SECONDS, Problem, WireError
from semantic_server.http.metrics import PrefillCost

PhaseName = Literal["waiting", "reading", "decoding", "preempted"]

MOST_SPANS: Final = 1000
"""The maximum number of finished requests to remember."""
_MOST_PHASES: Final = 64
"""The maximum number of phases to keep for one request."""
_CORES: Final = os.cpu_count() or 1
_MOST_REFUSED: Final = 200
"""The maximum number of refused requests to remember."""
_MOST_ERROR: Final = 500
"""The maximum number of characters of an error to keep."""


@dataclass(slots=True, eq=False)
class Span:
    """A request on the time line. Its phases have the Unix times at which they began. `end` is None
    while the request runs. A refused request has one phase and a `route`, its method and path;
    `tenant` is None if it has no valid key."""

    uid: str
    agent: str
    tenant: str | None
    model: str
    prompt_tokens: int
    phases: list[tuple[PhaseName, float]]
    version: int
    end: float | None = None
    cached_tokens: int = 0
    generated_tokens: int = 0
    finish: str | None = None
    status: int = HTTPStatus.OK
    error: str | None = None
    """The error, as its client sees it."""
    route: str | None = None


@dataclass(slots=True)
class Savings:
    """Prompt tokens, cached tokens and saved seconds of prefill since the Unix time `since`."""

    since: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0

    def add(self, prompt_tokens: int, cached_tokens: int, seconds: float) -> None:
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.seconds += seconds


@dataclass(slots=True)
class _OfTenant:
    start: Savings
    today: Savings
    day: date = field(default_factory=date.today)


class Recorder:
    """Records each tenant's requests and savings. Not thread-safe. Use it on one event loop."""

    def __init__(
        self, woken: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` returns Unix time."""
        self._woken = woken
        self._clock = clock
        self.started = clock()
        self._versions = itertools.count(1)
        self._running: dict[Span, None] = {}
        self._ended: deque[Span] = deque(maxlen=MOST_SPANS)
        self._tenants: dict[str, _OfTenant] = {}
        self._refused: deque[Span] = deque(maxlen=_MOST_REFUSED)
        self._prefills = PrefillCost()

    def of(self, tenant: str, model: str = "") -> Observer:
        """Return an observer of one request."""
        return _RequestObserver(self, tenant, model)

    @property
    def is_busy(self) -> bool:
        """True if a request waits or runs."""
        return bool(self._running)

    def spans(self, tenant: str | None, after: int = 0) -> list[Span]:
        """Return a tenant's requests that changed after `after`. None means all tenants."""
        return [
            one
            for one in (*self._refused, *self._ended, *self._running)
            if one.version > after and tenant in {None, one.tenant}
        ]

    def savings(self, tenant: str | None) -> tuple[Savings, Savings]:
        """Return a tenant's savings since the server's start and since midnight. None means all
        tenants. The seconds are at most those of all cores since then."""
        names = self._tenants if tenant is None else (tenant,)
        start, today = Savings(self.started), Savings(self._since_midnight())
        for name in names:
            own = self._of(name)
            for total, one in ((start, own.start), (today, own.today)):
                total.add(one.prompt_tokens, one.cached_tokens, one.seconds)
        for total in (start, today):
            total.seconds = min(total.seconds, (self._clock() - total.since) * _CORES)
        return start, today

    # Called by the observers of requests

    def accept(self, uid: str, agent: str, tenant: str, model: str, prompt_tokens: int) -> Span:
        phases: list[tuple[PhaseName, float]] = [("waiting", self._clock())]
        span = Span(uid, agent, tenant, model, prompt_tokens, phases, next(self._versions))
        self._running[span] = None
        self._woken()
        return span

    def enter(self, span: Span, phase: PhaseName) -> None:
        """Begin a phase of a request, unless the request is already in that phase."""
        if span.phases[-1][0] == phase:
            return
        if len(span.phases) < _MOST_PHASES:
            span.phases.append((phase, self._clock()))
            span.version = next(self._versions)

    def end(self, span: Span, record: AnswerRecord) -> None:
        """End a request and count its savings."""
        span.end = self._clock()
        span.version = next(self._versions)
        span.finish = record.finish
        span.cached_tokens = record.usage.cached
        span.generated_tokens = record.usage.completion
        span.status, span.error = record.status, record.error
        del self._running[span]
        self._ended.append(span)
        if record.match is None:
            return
        span.phases = _with_whole_reading(span.phases, record.prefill)
        self._prefills.add(record.match.computed_tokens, record.match.seconds)
        saved = self._prefills.seconds(record.usage.cached)
        own = self._of(span.tenant or "")
        for one in (own.start, own.today):
            one.add(record.usage.prompt, record.usage.cached, saved)

    def refuse(self, uid: str, tenant: str | None, route: str, problem: Problem) -> None:
        """Record a request that the server refused. `tenant` is None without a valid key."""
        now = self._clock()
        span = Span(uid, "", tenant, "", 0, [("waiting", now)], next(self._versions), now)
        span.finish, span.route = "refused", route
        span.status, span.error = problem.status, problem.message[:_MOST_ERROR]
        self._refused.append(span)

    def _of(self, tenant: str) -> _OfTenant:
        if tenant not in self._tenants:
            since = Savings(self.started), Savings(self._since_midnight())
            self._tenants[tenant] = _OfTenant(*since, self._today())
        own = self._tenants[tenant]
        if own.day != self._today():
            own.day, own.today = self._today(), Savings(self._since_midnight())
        return own

    def _today(self) -> date:
        return date.fromtimestamp(self._clock())  # noqa: DTZ012 - the operator's own day

    def _since_midnight(self) -> float:
        year, month, day = self._today().timetuple()[:3]
        midnight = time.mktime((year, month, day, 0, 0, 0, 0, 0, -1))
        return max(self.started, midnight)


class _RequestObserver(Observer):
    def __init__(self, recorder: Recorder, tenant: str, model: str) -> None:
        self._recorder = recorder
        self._tenant = tenant
        self._model = model
        self._spans: dict[str, Span] = {}

    def accepted(self, uid: str, agent: str, prompt_tokens: int) -> None:
        self._spans[uid] = self._recorder.accept(
            uid, agent, self._tenant, self._model, prompt_tokens
        )

    def prefilled(self, uid: str, done: int, total: int) -> None:
        del total
        if uid in self._spans:
            self._recorder.enter(self._spans[uid], "reading" if done else "preempted")

    def first_token(self, uid: str) -> None:
        if uid in self._spans:
            self._recorder.enter(self._spans[uid], "decoding")

    def finished(self, uid: str | None, record: AnswerRecord) -> None:
        span = self._spans.pop(uid or "", None)
        if span is not None:
            self._recorder.end(span, record)


def _with_whole_reading(
    phases: list[tuple[PhaseName, float]], seconds: float
) -> list[tuple[PhaseName, float]]:
    """Move the start of the first prefill back by `seconds`. The engine reports a chunk of a
    prefill only after computing it."""
    names = [name for name, _ in phases]
    if "preempted" in names or "decoding" not in names or not seconds:
        return phases
    (_, asked), decoded = phases[0], phases[names.index("decoding")]
    return [("waiting", asked), ("reading", max(asked, decoded[1] - seconds)), decoded]


T = TypeVar("T")

SENDING: Final = 2
"""Seconds to send the last data of all answers."""


class Ending:
    """Ends all answers of a server with an error. Use it on one event loop."""

    def __init__(self) -> None:
        self.has_begun = False
        self._waiting: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        self.has_begun = True
        now = asyncio.get_running_loop().time()
        for one in self._waiting:
            one.reschedule(now)

    async def events(self, events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield an answer's `events`. Raises OverloadedError when the server ends its answers."""
        while True:
            if self.has_begun:
                raise _stopping()
            limit = asyncio.timeout(None)
            try:
                async with limit:
                    self._waiting.add(limit)
                    found = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if not limit.expired():
                    raise
                raise _stopping() from None
            finally:
                self._waiting.discard(limit)
            yield found


def _stopping() -> OverloadedError:
    return OverloadedError(
        "the server is stopping: send the request again", retry_after=RETRY_SECONDS
    )


INTERVAL: Final = 1.0
"""Seconds between two samples of the figures."""
MOST_SAMPLES: Final = 600
MOST_WATCHERS: Final = 8
"""The maximum number of open streams per tenant. All operators together count as one tenant."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A server's figures at a Unix time."""

    at: float
    figures: Figures


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request in the engine, with its speed since the previous sample."""

    request: RunningRequest
    tokens_per_second: float | None


class Watch:
    """Samples the server's figures once per second while a request runs or a stream is open. Use it
    on one event loop."""

    def __init__(
        self,
        figures: Callable[[], Figures | None],
        agents: Callable[[], AgentsPort | None],
        clock: Callable[[], float] = time.time,
        interval: float = INTERVAL,
    ) -> None:
        """A worker thread calls `figures`, so it may block."""
        self.recorder = Recorder(self._wake, clock)
        self.samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self.live: tuple[LiveRequest, ...] = ()
        self._figures = figures
        self._agents = agents
        self._clock = clock
        self._interval = interval
        self._watchers: Counter[str | None] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._sampled = asyncio.Event()
        self._is_closed = False

    def now(self) -> float:
        return self._clock()

    def require_room(self, tenant: str | None) -> None:
        """Raise WireError if `tenant` already has `MOST_WATCHERS` open streams. None means an
        operator."""
        if self._watchers[tenant] >= MOST_WATCHERS:
            raise WireError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"expected at most {MOST_WATCHERS} open pages per key",
                code="rate_limit_exceeded",
                retry_after=RETRY_SECONDS,
            )

    @contextmanager
    def watching(self, tenant: str | None) -> Iterator[None]:
        """Sample figures within the context. Raises the same errors as `require_room`."""
        self.require_room(tenant)
        self._watchers[tenant] += 1
        try:
            self._wake()
            yield
        finally:
            self._watchers[tenant] -= 1

    async def next(self) -> bool:
        """Wait for the next sample of the figures. Returns False when the server stops."""
        if not self._is_closed:
            await self._sampled.wait()
        return not self._is_closed

    def close(self) -> None:
        """Stop sampling, and wake the callers of `next`."""
        self._is_closed = True
        self._sampled.set()
        if self._task is not None:
            self._task.cancel()

    async def _sample(self) -> None:
        figures = await to_thread.run_sync(self._figures)
        if figures is not None:
            self.samples.append(Sample(self._clock(), figures))
        self.live = await self._live() if self._watchers.total() else ()
        sampled, self._sampled = self._sampled, asyncio.Event()
        sampled.set()

    def _wake(self) -> None:
        if not self._is_closed and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = not self._is_wanted()  # the last sample shows the state after all requests
            await self._sample()
            if not is_last:
                await asyncio.sleep(self._interval)
            is_last = is_last and not self._is_wanted()

    def _is_wanted(self) -> bool:
        return self._watchers.total() > 0 or self.recorder.is_busy

    async def _live(self) -> tuple[LiveRequest, ...]:
        agents = self._agents()
        if agents is None:
            return ()
        try:
            found = await agents.requests(None)
        except SemanticError:  # the engine and its requests have ended
            return ()
        return tuple(LiveRequest(one, self._rate(one)) for one in found)

    def _rate(self, request: RunningRequest) -> float | None:
        for before in self.live:
            earlier = before.request
            if earlier.uid == request.uid and request.seconds > earlier.seconds:
                n_tokens = request.generated_tokens - earlier.generated_tokens
                return n_tokens / (request.seconds - earlier.seconds)
        return None


def of_tenant(
    live: Sequence[LiveRequest], tenant: str | None, agents: AgentsPort | None
) -> list[LiveRequest]:
    """Return the requests of `tenant`. None means all tenants."""
    if tenant is None or agents is None:
        return list(live) if tenant is None else []
    own = agents.id_of(tenant)
    return [one for one in live if one.request.tenant == own]
