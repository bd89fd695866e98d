"""Ending: what a server that stops does to answers that still run.

Each ends with an error, in the form of its wire, instead of a connection that breaks; the request
is cancelled as after a disconnect, which saves its agent. Knows neither a wire nor an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final, TypeVar

from semantic.adapters.http.errors import RETRY_SECONDS
from semantic.domain.errors import OverloadedError

T = TypeVar("T")

SENDING: Final = 2
"""Seconds for the ends of answers to be sent."""


class Ending:
    """The end of all answers of a server. For one event loop."""

    def __init__(self) -> None:
        self.has_begun = False
        self._waiting: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """End all answers, now and from now on."""
        self.has_begun = True
        now = asyncio.get_running_loop().time()
        for one in self._waiting:
            one.reschedule(now)

    async def events(self, events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """`events`, which the caller closes. Raises OverloadedError once answers must end; what
        waited for the next event is cancelled then."""
        while True:
            if self.has_begun:
                raise _stopping()
            limit = asyncio.timeout(None)
            try:
                async with limit:
                    self._waiting.add(limit)
                    found = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if not limit.expired():
                    raise
                raise _stopping() from None
            finally:
                self._waiting.discard(limit)
            yield found


def _stopping() -> OverloadedError:
    return OverloadedError(
        "the server is stopping: send the request again", retry_after=RETRY_SECONDS
    )
