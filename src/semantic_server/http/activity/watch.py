"""Watch: figures of the last minutes and the running requests, sampled once per second for all.

Samples while a request runs or a stream is open; reads the engine's requests only while a stream is
open. Without both there is no task and no timer. A server that stops ends each answer that still
runs (`Ending`) with an error in the form of its wire, instead of a connection that breaks; the
request is cancelled as after a disconnect, which saves its agent.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, TypeVar

from anyio import to_thread

from semantic.application.engine.engine_state import Figures
from semantic.domain.errors import OverloadedError, SemanticError
from semantic.ports.agents import AgentsPort, RunningRequest
from semantic_server.http.activity.recorder import Recorder
from semantic_server.http.errors import RETRY_SECONDS, WireError

T = TypeVar("T")

SENDING: Final = 2
"""Seconds for the ends of answers to be sent."""


class Ending:
    """The end of all answers of a server. For one event loop."""

    def __init__(self) -> None:
        self.has_begun = False
        self._waiting: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """End all answers, now and from now on."""
        self.has_begun = True
        now = asyncio.get_running_loop().time()
        for one in self._waiting:
            one.reschedule(now)

    async def events(self, events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """`events`, which the caller closes. Raises OverloadedError once answers must end; what
        waited for the next event is cancelled then."""
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
"""Seconds between two samples."""
MOST_SAMPLES: Final = 600
MOST_WATCHERS: Final = 8
"""Streams that one tenant, or the operators, may have open."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures at a Unix time."""

    at: float
    figures: Figures


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request in the engine, and its tokens per second since the previous sample."""

    request: RunningRequest
    tokens_per_second: float | None


class Watch:
    """What a server does. For one event loop."""

    def __init__(
        self,
        figures: Callable[[], Figures | None],
        agents: Callable[[], AgentsPort | None],
        clock: Callable[[], float] = time.time,
        interval: float = INTERVAL,
    ) -> None:
        """`figures` may block and is called on a worker thread."""
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
        """Unix time."""
        return self._clock()

    def require_room(self, tenant: str | None) -> None:
        """Raise WireError if `tenant` (None: operators) has as many watchers as it may have."""
        if self._watchers[tenant] >= MOST_WATCHERS:
            raise WireError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"expected at most {MOST_WATCHERS} open pages of one key",
                code="rate_limit_exceeded",
                retry_after=RETRY_SECONDS,
            )

    @contextmanager
    def watching(self, tenant: str | None) -> Iterator[None]:
        """Sample while this lasts. Raises as `require_room`."""
        self.require_room(tenant)
        self._watchers[tenant] += 1
        try:
            self._wake()
            yield
        finally:
            self._watchers[tenant] -= 1

    async def next(self) -> bool:
        """Wait for the next sample; False when the server stops."""
        if not self._is_closed:
            await self._sampled.wait()
        return not self._is_closed

    def close(self) -> None:
        """End what waits in `next`; nothing is sampled any more."""
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
            is_last = not self._is_wanted()  # the last sample shows what the last request left
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
        except SemanticError:  # the engine has ended, and with it its requests
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
    """The requests of `tenant`; None: of all."""
    if tenant is None or agents is None:
        return list(live) if tenant is None else []
    own = agents.id_of(tenant)
    return [one for one in live if one.request.tenant == own]
