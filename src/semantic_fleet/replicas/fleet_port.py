"""Ports of the replicas of one server, and the requests that replicas receive."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Pairs of a lower-case name and a value."""


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """An HTTP request with its whole body. `raw_path` is still percent-encoded. `route` is the
    routing key."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: Headers
    body: bytes = b""
    route: str = ""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The head of a response. The bytes of the response's body follow it."""

    status: int
    headers: Headers


Piece: TypeAlias = ResponseHead | bytes


class ReplicasPort(Protocol):
    """All replicas of a fleet. Use them on one event loop."""

    def answer(self, key: str, request: PassedRequest) -> AsyncGenerator[Piece, None]:
        """Yield the response to a request: its head, then its bytes. The replica of `key` answers,
        or a less busy replica. Closing this generator cancels the request. Raises OverloadedError
        if no replica answers."""

    async def answers(self, request: PassedRequest) -> Mapping[str, tuple[ResponseHead, bytes]]:
        """Return all responses, by replica name. Raises the same errors as `answer`."""


class ReplicaPort(Protocol):
    """The server of one replica."""

    def answer(self, request: PassedRequest) -> AsyncGenerator[Piece, None]:
        """Yield the response to a request, as `ReplicasPort.answer` does."""

    def load(self) -> Mapping[str, float]:
        """Return numbers: `running` and `waiting` requests, and `rows` of a batch. Thread-safe."""

    def end(self) -> None:
        """End all running and all later answers with an error."""

    def check(self) -> None:
        """Raise BackendError if the server cannot answer requests any more."""


class BuildReplica(Protocol):
    """Starts a replica's server. Ray pickles this object."""

    def __call__(self, folder: str, sharing: int) -> AbstractAsyncContextManager[ReplicaPort]:
        """Run a server with its store in `folder`, one of `sharing` servers on the machine. The
        context begins when the server is ready, and ends when it has saved the agents."""
