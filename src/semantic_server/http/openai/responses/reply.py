"""Replies with a response: its events as server-sent events, or the object of the last event.

Stores the response before its last event is sent. Knows no shapes of events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from anyio import CancelScope
from fastapi import Request

from semantic.domain.answer import AnswerEnd, AnswerEvent, AnswerStarted, TextDelta
from semantic.domain.errors import SemanticError
from semantic.ports.serving import ServingPort
from semantic.ports.store import ResponsesPort
from semantic_server.http.context import settings_of
from semantic_server.http.errors import WireError, problem_of, request_id_of
from semantic_server.http.openai.fields import Json
from semantic_server.http.openai.replies import ChatTokenLogprob, chat_logprobs
from semantic_server.http.openai.responses.request import ResponseRequest
from semantic_server.http.openai.responses.stored import put_response
from semantic_server.http.openai.responses.writer import ResponseWriter
from semantic_server.http.streaming import StartedStream, sse_event

logger = logging.getLogger("semantic.server")

T = TypeVar("T")


class ResponseReply:
    """Replies to one request. Call either `events` or `body`, once."""

    def __init__(
        self,
        parsed: ResponseRequest,
        answer: StartedStream[AnswerEvent] | AsyncGenerator[AnswerEvent, None],
        serving: ServingPort,
        store: ResponsesPort,
        route: str = "",
    ) -> None:
        """`route` is that of the request in a fleet."""
        self._parsed = parsed
        self._answer = answer
        self._serving = serving
        self._store = store
        self._writer = ResponseWriter(parsed, serving.model.id, route)
        self._agent = ""
        self._sequence_number = 0

    async def body(self) -> Json:
        """The complete response object. Raises WireError if the answer failed."""
        async with aclosing(self._written()) as written:
            async for _ in written:
                pass
        return self._writer.response

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The events of a stream. An error is the last event.

        Some clients take only events with data as a sign that the connection is alive, so the
        heartbeat is an event of the response.
        """
        seconds = settings_of(request).keep_alive
        try:
            async with aclosing(
                with_heartbeat(self._written(), seconds, self._writer.heartbeat)
            ) as written:
                async for event in written:
                    yield self._numbered(event)
        except (SemanticError, WireError) as error:
            request_id = request_id_of(request.scope)
            logger.warning("request %s failed in its stream: %s", request_id, type(error).__name__)
            for event in self._writer.failed(problem_of(error)):
                yield self._numbered(event)
        finally:
            await self._answer.aclose()

    async def _written(self) -> AsyncGenerator[Json, None]:
        async with aclosing(self._answer):
            async for event in self._answer:
                if isinstance(event, AnswerStarted):
                    self._agent = event.agent_id
                events = self._writer.write(event, await self._logprobs(event))
                if isinstance(event, AnswerEnd) and self._parsed.store:
                    # Before the last event: the client may continue from the response at once.
                    await put_response(self._store, self._parsed, self._writer, self._agent)
                for one in events:
                    yield one

    async def _logprobs(self, event: AnswerEvent) -> list[ChatTokenLogprob]:
        if not (self._parsed.logprobs and isinstance(event, TextDelta) and event.logprobs):
            return []
        return await chat_logprobs(self._serving, event.logprobs)

    def _numbered(self, event: Json) -> bytes:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return sse_event({**event, "sequence_number": number}, str(event["type"]))


async def with_heartbeat(
    events: AsyncGenerator[T, None], seconds: float, heartbeat: Callable[[], T]
) -> AsyncGenerator[T, None]:
    """`events` as they arrive, and `heartbeat()` after every `seconds` without one.

    Closing this closes `events`, also while the next one is awaited.
    """
    pending: asyncio.Future[list[T]] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(_next(events))
            await asyncio.wait((pending,), timeout=seconds)
            if not pending.done():
                yield heartbeat()
                continue
            found, pending = pending.result(), None
            if not found:
                return
            yield found[0]
    finally:
        # Shielded: after a disconnect the scope around the response is cancelled.
        with CancelScope(shield=True):
            if pending is not None:
                pending.cancel()
                await asyncio.wait((pending,))
            await events.aclose()


async def _next(events: AsyncGenerator[T, None]) -> list[T]:
    """The next event in a list; [] after the last one."""
    async for event in events:
        return [event]
    return []
