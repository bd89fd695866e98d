"""A stream that says something whenever it has had nothing to say for a time.

Unlike a ping beside the stream, what is said has its place among the events. Knows no shapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from anyio import CancelScope

T = TypeVar("T")


async def never_quiet(
    events: AsyncGenerator[T, None], seconds: float, sign: Callable[[], T]
) -> AsyncGenerator[T, None]:
    """`events` as they come, and `sign()` after every so many `seconds` without one.

    Closing this closes `events`, also where the next one is waited for.
    """
    waiting: asyncio.Future[list[T]] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(_next(events))
            await asyncio.wait((waiting,), timeout=seconds)
            if not waiting.done():
                yield sign()
                continue
            found, waiting = waiting.result(), None
            if not found:
                return
            yield found[0]
    finally:
        # Shielded: the scope around a response that nobody reads any more is cancelled.
        with CancelScope(shield=True):
            if waiting is not None:
                waiting.cancel()
                await asyncio.wait((waiting,))
            await events.aclose()


async def _next(events: AsyncGenerator[T, None]) -> list[T]:
    """The next event alone; nothing after the last one."""
    async for event in events:
        return [event]
    return []
