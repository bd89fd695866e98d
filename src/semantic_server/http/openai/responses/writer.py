"""Converts the events of an answer to the events of a response."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final

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
from semantic_server.http.answer_records import usage_extension
from semantic_server.http.errors import Problem, check_finished, openai_error
from semantic_server.http.openai.fields import Json
from semantic_server.http.openai.replies import ChatTokenLogprob
from semantic_server.http.openai.responses.output_items import (
    CallItem,
    ClientCallItem,
    OutputItem,
    ReasoningItem,
    Status,
    TextItem,
    item_id,
    new_response_id,
)
from semantic_server.http.openai.responses.request import ResponseRequest
from semantic_server.http.request_fields.client_tools import CUSTOM

_SERVER_ERROR: Final = "server_error"
_CLIENT_ERROR: Final = "invalid_prompt"
"""The code for a client's error or a cancelled request. Codex does not repeat the request."""
_OVERFLOW: Final = "context_length_exceeded"
"""The code for a context overflow. Clients then shorten their history."""

_UNFINISHED: Final[Json] = {
    "status": "in_progress",
    "completed_at": None,
    "incomplete_details": None,
    "usage": None,
}
"""The fields of an unfinished response that change at its end."""


class ResponseWriter:
    """Writes one response. `write` takes an answer's events in order, and returns what to send."""

    def __init__(
        self,
        request: ResponseRequest,
        model: str,
        route: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`route` is the routing key of a fleet."""
        self._request = request
        self._clock = clock
        self._items: list[OutputItem] = []
        self._statuses: list[Status] = []
        self._open: OutputItem | None = None
        self._created = False
        self._response: Json = {
            "id": new_response_id(route),
            "object": "response",
            "created_at": int(clock()),
            "background": False,
            "error": None,
            "model": model,
            "output": [],
            **_UNFINISHED,
            **request.reply_fields,
        }

    @property
    def id(self) -> str:
        return str(self._response["id"])

    @property
    def created(self) -> int:
        """The time of creation, in seconds since 1970."""
        created = self._response["created_at"]
        return created if isinstance(created, int) else 0

    @property
    def response(self) -> Json:
        """The response object with its output so far."""
        items = [
            item.as_object(status)
            for item, status in zip(self._items, self._statuses, strict=True)
            if not (isinstance(item, ClientCallItem) and status == "in_progress")
        ]
        return {**self._response, "output": items}

    def write(self, event: AnswerEvent, logprobs: Sequence[ChatTokenLogprob] = ()) -> list[Json]:
        """Return the events to send for `event`. Raises WireError on failure."""
        match event:
            case AnswerStarted():
                return [*self._created_once(), self.heartbeat()]
            case AnswerEnd():
                return self._end(event)
        return self._output(event, logprobs)

    def heartbeat(self) -> Json:
        """Return an event that keeps the connection alive."""
        kind, self._created = "in_progress" if self._created else "created", True
        return {"type": f"response.{kind}", "response": {**self.response, **_UNFINISHED}}

    def failed(self, problem: Problem) -> list[Json]:
        """Return the events that end a response with an error."""
        created = self._created_once()
        events = self._close("incomplete")
        self._response |= {"status": "failed", "error": _error(problem)}
        return [*created, *events, self._final("failed")]

    def _created_once(self) -> list[Json]:
        return [] if self._created else [self.heartbeat()]

    # Output

    def _output(self, event: AnswerEvent, logprobs: Sequence[ChatTokenLogprob]) -> list[Json]:
        match event:
            case TextDelta():
                return self._text(event.text, logprobs)
            case ReasoningDelta(text) if text:
                return self._reasoning(text)
            case ToolCallStarted():
                return self._begin(self._call(event))
            case ToolCallDelta() if isinstance(self._open, CallItem | ClientCallItem):
                return self._open.grow(event.arguments)
        return []

    def _text(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> list[Json]:
        if isinstance(self._open, TextItem):
            return self._open.grow(text, logprobs)
        item = TextItem(*self._place("msg"))
        return [*self._begin(item), *item.grow(text, logprobs)]

    def _reasoning(self, text: str) -> list[Json]:
        if isinstance(self._open, ReasoningItem):
            return self._open.grow(text)
        item = ReasoningItem(*self._place("rs"), self._request.encrypted_reasoning)
        return [*self._begin(item), *item.grow(text)]

    def _call(self, event: ToolCallStarted) -> CallItem | ClientCallItem:
        tools = self._request.tools
        kind = tools.kind_of(event.name)
        place = self._place("ctc" if kind == CUSTOM else "fc")
        item = CallItem(*place, event.id, tools.client_name(event.name))
        return item if kind == "function" else ClientCallItem(kind, item)

    def _place(self, prefix: str) -> tuple[int, str]:
        index = len(self._items)
        return index, item_id(prefix, self.id, index)

    def _begin(self, item: OutputItem) -> list[Json]:
        events = self._close("completed")
        self._items.append(item)
        self._statuses.append("in_progress")
        self._open = item
        return [*events, *item.begin()]

    def _close(self, status: Status) -> list[Json]:
        item, self._open = self._open, None
        if item is None:
            return []
        self._statuses[-1] = status
        return item.end(status)

    # The end

    def _end(self, end: AnswerEnd) -> list[Json]:
        check_finished(end)
        cut = end.reason == "length"
        events: list[Json] = []
        if not cut and not any(
            isinstance(item, TextItem | CallItem | ClientCallItem) for item in self._items
        ):
            events = self._begin(TextItem(*self._place("msg")))  # an empty answer has an empty text
        is_call = isinstance(self._open, CallItem | ClientCallItem)
        stopped = is_call and end.stop_string is not None
        is_unfinished = cut or (stopped and end.reason != "tool_calls")
        events += self._close("incomplete" if is_unfinished else "completed")
        self._response |= {"status": "completed", "usage": _usage_object(end.usage)}
        if cut:
            self._response |= {
                "status": "incomplete",
                "incomplete_details": {"reason": "max_output_tokens"},
            }
        else:
            self._response["completed_at"] = int(self._clock())
        return [*events, self._final("incomplete" if cut else "completed")]

    def _final(self, kind: str) -> Json:
        return {"type": f"response.{kind}", "response": self.response}


def error_event(problem: Problem) -> Json:
    """Return the event that ends a stream with an error before the response exists."""
    return {"type": "error", **_error(problem), "param": problem.param}


def _error(problem: Problem) -> Json:
    return {"code": _code(problem), "message": _message(problem)}


def _code(problem: Problem) -> str:
    if problem.tokens is not None:
        return _OVERFLOW
    is_ours = problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return _SERVER_ERROR if is_ours else _CLIENT_ERROR


def _message(problem: Problem) -> str:
    """Return the message that the error has over HTTP, because clients match some messages."""
    error = openai_error(problem)["error"]
    return str(error["message"]) if isinstance(error, dict) else problem.message


def _usage_object(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {
            "cached_tokens": usage.cached,
            "cache_write_tokens": usage.written,
        },
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.total,
        **usage_extension(usage),
    }
