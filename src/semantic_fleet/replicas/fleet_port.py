"""Replicas of one server, and the requests that they receive."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Pairs of a lower-case name and a value."""


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """An HTTP request with its whole body. `raw_path` is not decoded; `route` is the routing
    key."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: Headers
    body: bytes = b""
    route: str = ""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The head of a response; bytes of its body follow."""

    status: int
    headers: Headers


Piece: TypeAlias = ResponseHead | bytes


class ReplicasPort(Protocol):
    """All replicas of a fleet. Use them on one event loop."""

    def answer(self, key: str, request: PassedRequest) -> AsyncGenerator[Piece, None]:
        """Yield the response to a request: a head, then bytes. The replica of `key` answers, or a
        less busy one. Closing this generator cancels the request. Raises OverloadedError if no
        replica answers."""

    async def answers(self, request: PassedRequest) -> Mapping[str, tuple[ResponseHead, bytes]]:
        """Return the response of every replica, by name. Raises the same errors as `answer`."""


class ReplicaPort(Protocol):
    """The server of one replica."""

    def answer(self, request: PassedRequest) -> AsyncGenerator[Piece, None]:
        """Yield the response as `ReplicasPort.answer` does."""

    def load(self) -> Mapping[str, float]:
        """Return counts: `running` and `waiting` requests, and `rows` of a batch. Thread-safe."""

    def end(self) -> None:
        """End all running and later answers with an error."""

    def check(self) -> None:
        """Raise BackendError if the server cannot answer any more."""


class BuildReplica(Protocol):
    """Starts a replica's server. Ray pickles this object."""

    def __call__(self, folder: str, sharing: int) -> AbstractAsyncContextManager[ReplicaPort]:
        """Run a server with its store in `folder`; `sharing` servers share the machine. Entering
        the context waits until the server is ready; leaving waits until it has saved the agents."""
