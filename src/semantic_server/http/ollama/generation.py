"""POST /api/chat and /api/generate. Sends each tool call whole: its arguments are an object."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerStarted,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from semantic.domain.chat import Message
from semantic.domain.errors import SemanticError
from semantic.ports.serving import ServedModel, ServingPort
from semantic_server.http.answer_records import usage_extension
from semantic_server.http.context import (
    StartedStream,
    context_of,
    event_stream,
    serving_of,
    settings_of,
    start_stream,
    until_disconnect,
)
from semantic_server.http.errors import (
    NDJSON,
    WireError,
    check_finished,
    json_line,
    ollama_error,
    problem_of,
    request_id_of,
)
from semantic_server.http.ollama.request import (
    OllamaRequest,
    as_context,
    chat_request,
    generate_request,
    untagged,
)
from semantic_server.http.openai.fields import Json
from semantic_server.http.openai.replies import ChatTokenLogprob, chat_logprobs
from semantic_server.http.openai.requests import Caller, caller_of
from semantic_server.http.request_body import described, on_thread, read_json

_RAW: Final = "raw_arguments"
"""The field that holds a tool call's arguments if they are not a JSON object."""

Route = Literal["chat", "generate"]
LoadReason = Literal["load", "unload"]


@dataclass(slots=True)
class _Call:
    index: int
    id: str
    name: str
    written: list[str] = field(default_factory=list)

    def as_object(self, *, cut: bool) -> Json:
        function = {"index": self.index, "name": self.name, "arguments": self._arguments(cut=cut)}
        return {"id": self.id, "function": function}

    def _arguments(self, *, cut: bool) -> Json:
        written = "".join(self.written)
        try:
            partial: Literal["off", "trailing-strings"] = "trailing-strings" if cut else "off"
            found: object = from_json(written or "{}", allow_partial=partial)
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {_RAW: written}


class ReplyWriter:
    """Builds one reply. `write` takes an answer's events in order, and returns what to send.
    `clock` and `began` are in nanoseconds."""

    def __init__(
        self,
        route: Route,
        model: str,
        clock: Callable[[], int],
        began: int,
        *,
        messages: tuple[Message, ...] = (),
    ) -> None:
        """`model` is the name in the request. For /api/generate, the field `context` of the reply
        contains `messages` and the answer."""
        self._route: Route = route
        self._model = model
        self._clock = clock
        self._messages = messages
        self._began = began
        self._accepted = self._first = self._began
        self._has_first = False
        self._call: _Call | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Json] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self._last: Json = {}

    def write(self, event: AnswerEvent, logprobs: Sequence[ChatTokenLogprob] = ()) -> list[Json]:
        """Return the parts to send for `event`. Raises WireError if the answer failed."""
        match event:
            case AnswerStarted():
                self._accepted = self._clock()
                return []
            case ToolCallDelta() if self._call is not None:
                self._call.written.append(event.arguments)
                return []
            case TextDelta() | ReasoningDelta() | ToolCallStarted() | AnswerEnd():
                cut = isinstance(event, AnswerEnd) and event.reason != "tool_calls"
                return [*self._end_call(cut=cut), *self._next(event, logprobs)]
            case _:
                return []

    def _next(
        self,
        event: TextDelta | ReasoningDelta | ToolCallStarted | AnswerEnd,
        logprobs: Sequence[ChatTokenLogprob],
    ) -> list[Json]:
        match event:
            case TextDelta(text):
                self._texts.append(text)
                return [self._part(text, logprobs=logprobs)]
            case ReasoningDelta(text):
                self._thoughts.append(text)
                return [self._part(thinking=text)]
            case ToolCallStarted():
                self._call = _Call(event.index, event.id, event.name)
                return []
            case AnswerEnd():
                return [self._end(event)]

    def reply(self) -> Json:
        """Return the complete reply. Call this after the answer's last event."""
        body = self._content("".join(self._texts), "".join(self._thoughts), self._calls)
        found = {**self._last, **body}
        if self._logprobs:
            found["logprobs"] = self._logprobs
        return found

    def loaded(self, reason: LoadReason) -> Json:
        """Return the reply to a request that only loaded or unloaded the model."""
        return {**self._head(), **self._content(""), "done_reason": reason, "done": True}

    def idle(self) -> Json:
        """Return an empty part of a stream, which keeps the connection alive."""
        return {**self._head(), **self._content(""), "done": False}

    def _end_call(self, *, cut: bool) -> list[Json]:
        call, self._call = self._call, None
        if call is None:
            return []
        self._calls.append(call.as_object(cut=cut))
        return [self._part(calls=self._calls[-1:])]

    def _part(
        self,
        text: str = "",
        thinking: str = "",
        calls: Sequence[Json] = (),
        logprobs: Sequence[ChatTokenLogprob] = (),
    ) -> Json:
        if not self._has_first:
            self._has_first, self._first = True, self._clock()
        part = {**self._head(), **self._content(text, thinking, calls), "done": False}
        if logprobs:
            self._logprobs += logprobs
            part["logprobs"] = list(logprobs)
        return part

    def _content(self, text: str, thinking: str = "", calls: Sequence[Json] = ()) -> Json:
        found: Json = {"thinking": thinking} if thinking else {}
        if calls:
            found["tool_calls"] = list(calls)
        if self._route == "chat":
            return {"message": {"role": "assistant", "content": text, **found}}
        return {"response": text, **found}

    def _head(self) -> Json:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now}

    def _end(self, end: AnswerEnd) -> Json:
        check_finished(end)
        reason = "length" if end.reason == "length" else "stop"
        self._last = {**self._head(), **self._content(""), "done": True, "done_reason": reason}
        if self._route == "generate" and self._messages:
            answer = Message("assistant", "".join(self._texts), "".join(self._thoughts))
            self._last["context"] = as_context((*self._messages, answer))
        self._last |= self._durations() | _usage(end.usage)
        return self._last

    def _durations(self) -> Json:
        ended = self._clock()
        first = self._first if self._has_first else ended
        return {
            "total_duration": ended - self._began,
            "load_duration": self._accepted - self._began,
            "prompt_eval_duration": first - self._accepted,
            "eval_duration": ended - first,
        }


def _usage(usage: Usage) -> Json:
    own = usage_extension(usage)["semantic"]
    cached = {"cached_tokens": usage.cached, "cache_write_tokens": usage.written}
    return {
        "prompt_eval_count": usage.prompt,
        "eval_count": usage.completion,
        "semantic": {**cached, **own} if isinstance(own, dict) else cached,
    }


logger = logging.getLogger("semantic.server")

router: Final = APIRouter(tags=["Ollama"])

Parse = Callable[[Mapping[str, object], ServedModel, Caller], OllamaRequest]


def _described(required: str, optional: str) -> dict[str, object]:
    return described(
        {required: {"type": "string"}},
        {optional: {}, "stream": {"type": "boolean"}},
        "The reply, or its parts.",
        body="As Ollama documents it; an unsupported field is a 400.",
        stream=NDJSON,
    )


@router.post("/api/chat", openapi_extra=_described("model", "messages"))
async def chat(request: Request) -> Response:
    """Answer a conversation, as Ollama does: as a stream unless `stream` is false."""
    return await _respond(request, "chat", chat_request)


@router.post("/api/generate", openapi_extra=_described("model", "prompt"))
async def generate(request: Request) -> Response:
    """Answer a prompt, as Ollama does: as a stream unless `stream` is false."""
    return await _respond(request, "generate", generate_request)


async def _respond(request: Request, route: Route, parse: Parse) -> Response:
    began = time.perf_counter_ns()
    body = await read_json(request)
    name = untagged(body.get("model"))
    serving = serving_of(request, name)
    parsed = await on_thread(request, parse, body, serving.model, caller_of(request, body))
    if parsed.keep_alive is not None:
        _keep(request, name, parsed.keep_alive)
    messages = parsed.messages
    writer = ReplyWriter(route, parsed.model, time.perf_counter_ns, began, messages=messages)
    if parsed.ask is None:
        reason = await until_disconnect(request, _loaded(request, name, parsed.keep_alive))
        return _without_answer(writer.loaded(reason), stream=parsed.stream)
    events = await start_stream(request, serving.answer(parsed.ask))
    if not parsed.stream:
        return JSONResponse(await until_disconnect(request, _whole(events, writer, serving)))
    lines = _lines(request, events, writer, serving)
    return event_stream(request, lines, lambda: json_line(writer.idle()), NDJSON)


def _keep(request: Request, name: str, seconds: float) -> None:
    """Unload a model after `seconds` without a request. A server with keys uses its setting
    instead."""
    models = context_of(request).models
    if models is not None and not settings_of(request).api_keys:
        models.keep(name, None if math.isinf(seconds) else seconds)


async def _loaded(request: Request, name: str, keep_alive: float | None) -> LoadReason:
    """Load the model of a request without a prompt. A `keep_alive` of 0 unloads it."""
    models = context_of(request).models
    if models is None:
        return "load"
    if keep_alive == 0 and not settings_of(request).api_keys:
        await models.unload(name)
        return "unload"
    await models.load(name)
    return "load"


def _without_answer(reply: Json, *, stream: bool) -> Response:
    return Response(json_line(reply), media_type=NDJSON) if stream else JSONResponse(reply)


async def _whole(
    events: StartedStream[AnswerEvent], writer: ReplyWriter, serving: ServingPort
) -> Json:
    async with aclosing(events):
        async for event in events:
            writer.write(event, await _logprobs(event, serving))
    return writer.reply()


async def _lines(
    request: Request, events: StartedStream[AnswerEvent], writer: ReplyWriter, serving: ServingPort
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            async for event in events:
                for part in writer.write(event, await _logprobs(event, serving)):
                    yield json_line(part)
        except (SemanticError, WireError) as error:
            logger.warning(
                "request %s failed in its stream: %s", request_id_of(request.scope), error
            )
            yield json_line(ollama_error(problem_of(error)))


async def _logprobs(event: AnswerEvent, serving: ServingPort) -> list[ChatTokenLogprob]:
    if not isinstance(event, TextDelta) or not event.logprobs:
        return []
    return await chat_logprobs(serving, event.logprobs)
