"""Where an event loop's task finds what the engine's thread has for it.

The standard library's queues are for tasks or for threads; this is the way from one to the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from semantic.ports.inbound import EngineEvent


class EventQueue:
    """The events of one request, to be iterated by one task of `loop`.

    It never grows beyond what one request gives: its answer's tokens and its prompt's chunks.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[EngineEvent] = deque()
        self._arrived = asyncio.Event()

    def put(self, events: Sequence[EngineEvent]) -> None:
        """Hand over what one step brought. Any thread may; raises RuntimeError when the loop is
        closed and nobody will read it."""
        self._events.extend(events)
        self._loop.call_soon_threadsafe(self._arrived.set)

    def __aiter__(self) -> EventQueue:
        return self

    async def __anext__(self) -> EngineEvent:
        """The next event; waits for it."""
        while not self._events:
            self._arrived.clear()
            if not self._events:
                await self._arrived.wait()
        return self._events.popleft()
