"""A replica as Ray Serve runs it: a server without a socket, in a process of its own.

Ray Serve calls the methods by their names, and waits for the last answer before it destroys a
replica that is to stop. It does not say that one is to stop; it only asks no more for its
health. While its process lives a replica has a slot, a numbered folder with a locked file and a
folder for the store: it takes the first that is free, with all that an earlier one stored there.
Imports no Ray: it is plain Python.
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
    """`name` is its own on this machine, and `folder` for what it stores; it need not exist."""

    name: str
    folder: Path


@contextmanager
def taken_slot(base: Path) -> Iterator[ReplicaSlot]:
    """The first free slot below `base`, with the id of this process in its locked file.

    Raises StoreError if `base` cannot be used, and if there is none.
    """
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
    raise StoreError(f"all {_MOST} slots below {base} are taken")


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


HEADER: Final = b"x-semantic-replica"
"""Of responses: the name of the replica that answered, its slot on its machine."""
_LOOK: Final = 1.0
"""Seconds between two looks at the time of the last question for health."""
SILENT: Final = 10.0
"""Seconds without one after which this may be a replica that is to stop."""


@dataclass(frozen=True, slots=True)
class Drain:
    """How long answers may go on in a replica that is to stop, in seconds, and whether any is: the
    latter waits for the cluster, and raises OverloadedError if it cannot be asked."""

    seconds: float
    is_any: Callable[[], bool]


class Replica:
    """Takes a slot, starts the server in its folder, and saves its agents when it is destroyed."""

    _server: ReplicaPort
    _name: str

    async def __init__(  # type: ignore[misc]
        self, build: BuildReplica, folder: str, sharing: int, drain: Drain
    ) -> None:
        """Slots are below `folder`; so many replicas are `sharing` the machine's memory. Returns
        when requests can be answered; raises as `build`."""
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
        """The response in pieces; cancelled with this call."""
        async with aclosing(self._server.answer(request)) as pieces:
            async for piece in pieces:
                yield with_header(HEADER, self._name.encode(), piece)

    async def whole(self, request: PassedRequest) -> tuple[str, ResponseHead, bytes]:
        """The replica's name and its machine's, and its whole response."""
        async with aclosing(self._server.answer(request)) as pieces:
            head, body = await whole_answer(pieces)
        return f"{self._name}@{platform.node()}", head, body

    async def record_autoscaling_stats(self) -> Mapping[str, float]:
        """Read now and then; see `autoscaling`."""
        return dict(self._server.load())

    async def check_health(self) -> None:
        """Raises BackendError for a replica that must be replaced."""
        self._asked_at = time.monotonic()
        self._server.check()

    async def __del__(self) -> None:
        """Called once no request is left; returns when agents are saved."""
        await self._stack.aclose()

    async def _end_overdue(self) -> None:
        """End the answers of a replica that was to stop so long ago that it would be killed."""
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
