"""Replicas of one server, and the requests passed on to them. A replica receives a request whole,
and answers in pieces. Does not know APIs, or how replicas run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Headers in order: lower-case names, and values."""


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """An HTTP request with its whole body. `raw_path` is the path before decoding, `route` the
    routing key in hexadecimal."""

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
    """All replicas of a fleet, for use on one event loop."""

    def answer(self, key: str, request: PassedRequest) -> AsyncGenerator[Piece, None]:
        """Yield the response of the replica of `key`, or of a less busy replica: a head, then bytes
        as they arrive. Closing this generator cancels the request in the replica. Raises
        OverloadedError while no replica runs, if all replicas are full, and if the answering
        replica ends."""

    async def answers(self, request: PassedRequest) -> Mapping[str, tuple[ResponseHead, bytes]]:
        """Return the whole response of every replica, by the replica's name. Raises the same errors
        as `answer`."""


class ReplicaPort(Protocol):
    """One replica's server, which needs no socket."""

    def answer(self, request: PassedRequest) -> AsyncGenerator[Piece, None]:
        """Yield the response as `ReplicasPort.answer` does."""

    def load(self) -> Mapping[str, float]:
        """Return counts: `running` and `waiting` requests, and `rows` of a batch. Thread-safe."""

    def end(self) -> None:
        """End all running and later answers, each with an error that states the reason."""

    def check(self) -> None:
        """Raise BackendError if the server cannot answer any more."""


class BuildReplica(Protocol):
    """Starts a replica's server. Ray pickles this object for a call in the replica's process."""

    def __call__(self, folder: str, sharing: int) -> AbstractAsyncContextManager[ReplicaPort]:
        """Run a server that stores in `folder`; `sharing` servers share the machine. Entering the
        context waits until the server is ready; leaving waits until the agents are saved."""
