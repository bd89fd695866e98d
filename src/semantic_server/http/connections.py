"""The connections of clients, with a limit on their number and a deadline for each phase."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import ClassVar, Final

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from semantic_server.http.errors import (
    RETRY_SECONDS,
    Problem,
    logger,
    openai_error,
    problem_response,
)

PROBES: Final = frozenset({"/health", "/ready", "/metrics"})
"""Paths that the server answers even when it is full."""

DRAIN_SECONDS: Final = 10.0
"""Seconds to read the rest of a rejected body, so that the client receives the response."""

_WARNING_SECONDS: Final = 60.0
_V6_NETWORK: Final = 64
"""The number of bits of an IPv6 address that identify a network."""

_FULL: Final = Problem(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "too many connections",
    code="overloaded",
    retry_after=RETRY_SECONDS,
    closes=True,
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Timeouts in seconds, and two limits. `max_requests` limits the connections that run a
    request, `max_open` all connections."""

    header_timeout: float
    send_timeout: float
    max_requests: int
    max_open: int


class Phase(Enum):
    """The phases of a connection. The server closes connections in an earlier phase first."""

    NO_REQUEST = auto()
    """No request is in progress."""
    CLIENT = auto()
    """The client has yet to send the body, or does not read the response."""
    RUNNING = auto()
    """The request is complete. The server never closes such a connection to admit another one."""


class Connections:
    """The open connections of a server by phase and peer. At the limit, the peer with the most
    connections loses its oldest one."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._phases: dict[DeadlineProtocol, Phase] = {}
        self._peers: dict[Phase, dict[str, dict[DeadlineProtocol, float]]] = {
            phase: {} for phase in Phase
        }
        self._n_requests = 0
        self._warned = -_WARNING_SECONDS

    def opened(self, connection: DeadlineProtocol, now: float) -> bool:
        """Add a connection. At the limit, closes another connection first. Returns False if all
        other connections run a request."""
        if len(self._phases) >= self.limits.max_open:
            self._warn(now)
            oldest = self._first_to_close(Phase.NO_REQUEST) or self._first_to_close(Phase.CLIENT)
            if oldest is None:
                return False
            self._close(oldest)
        self._enter(connection, Phase.NO_REQUEST, now)
        return True

    def moved(self, connection: DeadlineProtocol, phase: Phase, now: float) -> None:
        """Record the new phase of a connection. Ignores a closed connection."""
        if self._phases.get(connection, phase) is not phase:
            self._leave(connection)
            self._enter(connection, phase, now)

    def closed(self, connection: DeadlineProtocol) -> None:
        """Remove a connection. Ignores an unknown connection."""
        if connection in self._phases:
            self._leave(connection)

    def may_run(self, connection: DeadlineProtocol, now: float) -> bool:
        """Return True if the connection may run a request. May close a slow client's connection."""
        if self._n_requests <= self.limits.max_requests:
            return True
        self._warn(now)
        slowest = self._first_to_close(Phase.CLIENT)
        if slowest is None or slowest is connection:
            return False
        self._close(slowest)
        return True

    def _first_to_close(self, phase: Phase) -> DeadlineProtocol | None:
        peers = self._peers[phase]
        if not peers:
            return None
        largest: dict[DeadlineProtocol, float] = max(peers.values(), key=_crowd)
        return next(iter(largest))

    def _close(self, connection: DeadlineProtocol) -> None:
        self._leave(connection)
        connection.give_way()

    def _enter(self, connection: DeadlineProtocol, phase: Phase, now: float) -> None:
        self._phases[connection] = phase
        self._peers[phase].setdefault(connection.peer, {})[connection] = now
        self._n_requests += phase is not Phase.NO_REQUEST

    def _leave(self, connection: DeadlineProtocol) -> None:
        phase = self._phases.pop(connection)
        peers = self._peers[phase]
        del peers[connection.peer][connection]
        if not peers[connection.peer]:
            del peers[connection.peer]
        self._n_requests -= phase is not Phase.NO_REQUEST

    def _warn(self, now: float) -> None:
        if now - self._warned >= _WARNING_SECONDS:
            self._warned = now
            logger.warning(
                "too many connections (%d open, %d with requests): "
                "closing those that waited longest for their clients",
                len(self._phases),
                self._n_requests,
            )


def _crowd(connections: dict[DeadlineProtocol, float]) -> tuple[int, float]:
    return len(connections), -next(iter(connections.values()))


class DeadlineProtocol(H11Protocol):
    """HTTP/1.1 with deadlines. uvicorn has none for headers and none for slow readers."""

    registry: ClassVar[Connections]
    peer = ""

    _idle = False
    _client_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self.peer = _network(self.client[0]) if self.client else ""
        self._serve, self.app = self.app, self._answer
        if not self.registry.opened(self, self.loop.time()):
            transport.abort()
        self._set_client_timer(self.registry.limits.header_timeout, self._on_header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self.registry.closed(self)
        self._set_client_timer(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if self._idle and self._client_timer is None:
            self._set_client_timer(self.registry.limits.header_timeout, self._on_header_timeout)
        super().data_received(data)
        if self.cycle is not before:
            self._idle = False
            self._set_client_timer(None)
        self._record_phase()

    def on_response_complete(self) -> None:
        answered = self.cycle
        self._idle = True
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif self.cycle is answered and self.conn.their_state is h11.SEND_BODY:
            self._set_client_timer(DRAIN_SECONDS, self.transport.abort)
        self._record_phase()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Aborting also ends the request, like a disconnect.
        self._write_timer = self.loop.call_later(
            self.registry.limits.send_timeout, self.transport.abort
        )
        self._record_phase()

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()
        self._record_phase()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._close()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._close()

    def give_way(self) -> None:
        """Close this connection in favour of another one."""
        if self._phase() is Phase.CLIENT and not self.flow.write_paused:
            self._refuse(_FULL)
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Reject malformed HTTP. uvicorn calls this method for a parse error."""
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(Problem(HTTPStatus(hint), msg.rstrip(".")))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. Sends a 503 instead when too many requests are in progress."""
        if scope["path"] in PROBES or self.registry.may_run(self, self.loop.time()):
            await self._serve(scope, receive, send)
            return
        await problem_response(scope, _FULL)(scope, receive, send)

    def _record_phase(self) -> None:
        self.registry.moved(self, self._phase(), self.loop.time())

    def _phase(self) -> Phase:
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            return Phase.NO_REQUEST
        waits = cycle.more_body or self.flow.write_paused
        return Phase.CLIENT if waits else Phase.RUNNING

    def _on_header_timeout(self) -> None:
        received, _ = self.conn.trailing_data
        if not received:
            self._close()  # a client might match the response with a later request
            return
        seconds = self.registry.limits.header_timeout
        message = f"the headers did not arrive within {seconds:g} seconds"
        self._refuse(Problem(HTTPStatus.REQUEST_TIMEOUT, message))

    def _refuse(self, problem: Problem) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_response_bytes(problem))
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._set_client_timer(self.registry.limits.send_timeout, self.transport.abort)

    def _set_client_timer(
        self, seconds: float | None, then: Callable[[], None] | None = None
    ) -> None:
        if self._client_timer is not None:
            self._client_timer.cancel()
            self._client_timer = None
        if seconds is not None and then is not None:
            self._client_timer = self.loop.call_later(seconds, then)


def protocol_of(connections: Connections) -> type[DeadlineProtocol]:
    """Return a protocol class for uvicorn that uses `connections`."""
    return type("LimitedProtocol", (DeadlineProtocol,), {"registry": connections})


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _V6_NETWORK), strict=False))


def _response_bytes(problem: Problem) -> bytes:
    body = json.dumps(openai_error(problem)).encode()
    status = HTTPStatus(problem.status)
    later = "" if problem.retry_after is None else f"retry-after: {problem.retry_after}\r\n"
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{later}connection: close\r\n\r\n"
    )
    return head.encode() + body
