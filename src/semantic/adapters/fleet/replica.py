"""A replica as Ray Serve runs it: a server without a socket, in a process of its own.

Ray Serve calls the methods by their names. Imports no Ray: it is plain Python.
"""

from __future__ import annotations

import platform
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Final

from semantic.adapters.fleet.passed_requests import whole_answer, with_header
from semantic.adapters.fleet.replica_slots import taken_slot
from semantic.ports.fleet import BuildReplica, PassedRequest, Piece, ReplicaPort, ResponseHead

HEADER: Final = b"x-semantic-replica"
"""Of responses: the name of the replica that answered, its slot on its machine."""


class Replica:
    """Takes a slot, starts the server in its folder, and saves its agents when it is destroyed."""

    _server: ReplicaPort
    _name: str

    async def __init__(self, build: BuildReplica, folder: str, sharing: int) -> None:  # type: ignore[misc]
        """Slots are below `folder`; so many replicas are `sharing` the machine's memory. Returns
        when requests can be answered; raises as `build`."""
        self._stack = AsyncExitStack()
        async with AsyncExitStack() as undo:
            slot = undo.enter_context(taken_slot(Path(folder)))
            self._server = await undo.enter_async_context(build(str(slot.folder), sharing))
            self._name = slot.name
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
        self._server.check()

    async def __del__(self) -> None:
        """Called once no request is left; returns when agents are saved."""
        await self._stack.aclose()
