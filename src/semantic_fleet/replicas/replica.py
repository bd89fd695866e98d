"""A replica as Ray Serve runs it: a server without a socket, in its own process.

Each process takes a slot: a numbered folder with a locked file and a folder for the store. A new
process takes the first free slot, and so the store of an earlier process.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import platform
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from semantic.domain.errors import OverloadedError, StoreError
from semantic_fleet.replicas.fleet_port import (
    BuildReplica,
    PassedRequest,
    Piece,
    ReplicaPort,
    ResponseHead,
)
from semantic_fleet.replicas.passed_requests import whole_answer, with_header

LOCK: Final = "replica.lock"
_STORE: Final = "store"
_MOST: Final = 256


@dataclass(frozen=True, slots=True)
class ReplicaSlot:
    """A numbered folder of one replica. `name` is unique on this machine. `folder` contains the
    store."""

    name: str
    folder: Path


@contextmanager
def taken_slot(base: Path) -> Iterator[ReplicaSlot]:
    """Take the first free slot below `base`. Raises StoreError if `base` is unusable or all slots
    are taken."""
    for number in range(_MOST):
        folder = base / f"replica-{number}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"cannot use {folder}: {error.strerror}") from error
        try:
            if _try_lock(lock):
                os.ftruncate(lock, 0)
                os.write(lock, f"{os.getpid()}\n".encode())
                yield ReplicaSlot(str(number), folder / _STORE)
                return
        finally:
            os.close(lock)
    raise StoreError(f"no slot below {base} is free: expected at most {_MOST} replicas")


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


HEADER: Final = b"x-semantic-replica"
"""Response header with the name of the replica that answered."""
_LOOK: Final = 1.0
"""Seconds between two checks of when Ray last called `check_health`."""
SILENT: Final = 10.0
"""Seconds without a health check after which the replica may be stopping."""


@dataclass(frozen=True, slots=True)
class Drain:
    """How a stopping replica finishes its answers. It has `seconds` to finish. `is_any` raises
    OverloadedError if the cluster does not answer."""

    seconds: float
    is_any: Callable[[], bool]


class Replica:
    """Runs the server of a replica, and saves its agents when Ray destroys it."""

    _server: ReplicaPort
    _name: str

    async def __init__(  # type: ignore[misc]
        self, build: BuildReplica, folder: str, sharing: int, drain: Drain
    ) -> None:
        """Take a slot below `folder` and start the replica, which can then answer. `sharing` is the
        number of replicas on the machine. Raises the same errors as `build`."""
        self._stack = AsyncExitStack()
        self._drain = drain
        async with AsyncExitStack() as undo:
            slot = undo.enter_context(taken_slot(Path(folder)))
            self._server = await undo.enter_async_context(build(str(slot.folder), sharing))
            self._name = slot.name
            self._asked_at = time.monotonic()
            ending = asyncio.create_task(self._end_overdue())
            undo.callback(ending.cancel)
            self._stack = undo.pop_all()

    async def answer(self, request: PassedRequest) -> AsyncGenerator[Piece, None]:
        """Yield the response to a request. Closing this generator cancels the request."""
        async with aclosing(self._server.answer(request)) as pieces:
            async for piece in pieces:
                yield with_header(HEADER, self._name.encode(), piece)

    async def whole(self, request: PassedRequest) -> tuple[str, ResponseHead, bytes]:
        """Return the names of replica and machine, the response's head and its whole body."""
        async with aclosing(self._server.answer(request)) as pieces:
            head, body = await whole_answer(pieces)
        return f"{self._name}@{platform.node()}", head, body

    async def record_autoscaling_stats(self) -> Mapping[str, float]:
        """Return the replica's load for `autoscaling`. Ray calls this method."""
        return dict(self._server.load())

    async def check_health(self) -> None:
        """Raise BackendError if the server can no longer answer. Ray then replaces the replica."""
        self._asked_at = time.monotonic()
        self._server.check()

    async def __del__(self) -> None:
        """Save the agents. Ray calls this method after the last request has ended."""
        await self._stack.aclose()

    async def _end_overdue(self) -> None:
        """End the answers of a stopping replica before Ray kills it."""
        while not await self._is_overdue():
            await asyncio.sleep(_LOOK)
        self._server.end()

    async def _is_overdue(self) -> bool:
        if time.monotonic() - self._asked_at < max(self._drain.seconds, SILENT):
            return False
        try:
            return await asyncio.to_thread(self._drain.is_any)
        except OverloadedError:
            return False
