"""Replicas of one server, and the requests that are passed on to them.

A request is passed on whole, and answered in pieces. Knows no wire, and not how replicas are run.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Names in lower case, and values, in order."""


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """An HTTP request with all of its body. `raw_path` is the path as it was sent, `route` the key
    that the request belongs to: hexadecimal digits."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: Headers
    body: bytes = b""
    route: str = ""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The beginning of a response; bytes of its body follow."""

    status: int
    headers: Headers


Piece: TypeAlias = ResponseHead | bytes


class ReplicasPort(Protocol):
    """All replicas. For one event loop."""

    def answer(self, key: str, request: PassedRequest) -> AsyncGenerator[Piece, None]:
        """The response of the replica that `key` belongs to, or of one beside it that is less
        busy: a head, then bytes as they come. Closing it cancels the request there.

        Raises OverloadedError while there is no replica, if all are full, and for one that was
        lost.
        """
        ...

    async def answers(self, request: PassedRequest) -> Mapping[str, tuple[ResponseHead, bytes]]:
        """The whole response of every replica, by the replica's name. Raises as `answer`."""
        ...


class ReplicaPort(Protocol):
    """One replica's server, of which requests need no socket."""

    def answer(self, request: PassedRequest) -> AsyncGenerator[Piece, None]:
        """The response, as of `ReplicasPort`."""
        ...

    def load(self) -> Mapping[str, float]:
        """How many requests are `running`, how many are `waiting`, and how many `rows` a batch
        has. Thread-safe."""
        ...

    def end(self) -> None:
        """End all answers, now and from now on, each with a reason that its client can read."""
        ...

    def check(self) -> None:
        """Raises BackendError when the server cannot answer any more."""
        ...


class BuildReplica(Protocol):
    """Starts a replica's server; it is pickled, and called in the replica's process."""

    def __call__(self, folder: str, sharing: int) -> AbstractAsyncContextManager[ReplicaPort]:
        """A server that keeps what it stores in `folder`, from ready to saved; one of so many that
        are `sharing` the memory of a machine."""
        ...
