"""How both wires reply: all pieces as one JSON object, or each as an event as it comes.

What fails before the first piece is an HTTP error in both. Knows neither wire's shapes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final, Protocol, TypeVar

from fastapi import Request
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from semantic.adapters.http.errors import WireError, openai_error, problem_of
from semantic.adapters.http.streaming import StartedStream, event_stream, sse_event, start_stream
from semantic.domain.errors import SemanticError

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)

_DONE: Final = "[DONE]"


class Chunks(Protocol[P_contra]):
    """Makes the JSON objects of a stream."""

    def chunk(self, piece: P_contra) -> dict[str, object]:
        """The chunk that says `piece`."""
        ...

    def last(self) -> dict[str, object] | None:
        """The chunk after all pieces, if there is one."""
        ...


async def streamed(
    request: Request, pieces: AsyncGenerator[P, None], chunks: Chunks[P]
) -> Response:
    """A stream of `pieces`, once the first has come. Raises what comes instead of it."""
    begun = await start_stream(request, pieces)
    return event_stream(request, _events(begun, chunks))


async def _events(
    begun: StartedStream[P], chunks: Chunks[P]
) -> AsyncGenerator[ServerSentEvent, None]:
    """The events of a stream. An error is an event of its own, and the last: clients raise it."""
    try:
        async for piece in begun:
            yield sse_event(chunks.chunk(piece))
        last = chunks.last()
        if last is not None:
            yield sse_event(last)
        yield sse_event(_DONE)
    except (SemanticError, WireError) as error:
        yield sse_event(openai_error(problem_of(error)))
    finally:
        await begun.aclose()
