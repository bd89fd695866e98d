"""How a response is answered: one stream of events, sent one by one or folded to the last body.

What fails before the first event is an HTTP error in both. Knows no shapes of events.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request
from sse_starlette import ServerSentEvent

from semantic.adapters.http.context import settings_of
from semantic.adapters.http.errors import WireError, problem_of, request_id_of
from semantic.adapters.http.openai.responses.keeping import keep
from semantic.adapters.http.openai.responses.quiet import never_quiet
from semantic.adapters.http.openai.responses.request import ResponseRequest
from semantic.adapters.http.openai.responses.toolbox import Json
from semantic.adapters.http.openai.responses.writer import ResponseWriter
from semantic.adapters.http.openai.token_logprobs import ChatTokenLogprob, chat_logprobs
from semantic.adapters.http.streaming import StartedStream, sse_event
from semantic.domain.answer import AnswerEnd, AnswerEvent, AnswerStarted, TextDelta
from semantic.domain.errors import SemanticError
from semantic.ports.responses import ResponsesPort
from semantic.ports.serving import ServingPort

logger = logging.getLogger("semantic.server")


class Answering:
    """Answers one request. Once: either `events` or `body` is asked for."""

    def __init__(
        self,
        asked: ResponseRequest,
        begun: StartedStream[AnswerEvent] | AsyncGenerator[AnswerEvent, None],
        serving: ServingPort,
        responses: ResponsesPort,
    ) -> None:
        self._asked = asked
        self._begun = begun
        self._serving = serving
        self._responses = responses
        self._writer = ResponseWriter(asked, serving.model.id)
        self._agent = ""
        self._number = 0

    async def body(self) -> Json:
        """The whole response. Raises WireError when the answer failed."""
        async with aclosing(self._written()) as written:
            async for _ in written:
                pass
        return self._writer.body

    async def events(self, request: Request) -> AsyncGenerator[ServerSentEvent, None]:
        """The events of a stream. A failure is an event of its own, and the last.

        Some clients count events with data only as life: they get one whenever a time went by
        without any.
        """
        quiet = settings_of(request).keep_alive
        try:
            async with aclosing(
                never_quiet(self._written(), quiet, self._writer.sign_of_life)
            ) as written:
                async for event in written:
                    yield self._numbered(event)
        except (SemanticError, WireError) as error:
            request_id = request_id_of(request.scope)
            logger.warning("request %s failed in its stream: %s", request_id, type(error).__name__)
            for event in self._writer.failed(problem_of(error)):
                yield self._numbered(event)
        finally:
            await self._begun.aclose()

    async def _written(self) -> AsyncGenerator[Json, None]:
        async with aclosing(self._begun):
            async for event in self._begun:
                if isinstance(event, AnswerStarted):
                    self._agent = event.agent_id
                events = self._writer.write(event, await self._logprobs(event))
                if isinstance(event, AnswerEnd) and self._asked.store:
                    # Before the client knows that it is whole: it may go on from it at once.
                    await keep(self._responses, self._asked, self._writer, self._agent)
                for one in events:
                    yield one

    async def _logprobs(self, event: AnswerEvent) -> list[ChatTokenLogprob]:
        if not (self._asked.logprobs and isinstance(event, TextDelta) and event.logprobs):
            return []
        return await chat_logprobs(self._serving, event.logprobs)

    def _numbered(self, event: Json) -> ServerSentEvent:
        number, self._number = self._number, self._number + 1
        return sse_event({**event, "sequence_number": number}, str(event["type"]))
