"""An answer as a response: the events of a stream, and the body that they add up to.

A reply that is no stream is the body of the last event, so the two cannot differ. Knows no HTTP
and no numbers of events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final

from semantic.adapters.http.cache_miss_report import usage_extension
from semantic.adapters.http.errors import Problem, openai_error
from semantic.adapters.http.openai.failures import check_ended_well, unreadable_call
from semantic.adapters.http.openai.responses.ids import new_id
from semantic.adapters.http.openai.responses.output_items import (
    CallItem,
    OutputItem,
    Status,
    TextItem,
    ThoughtItem,
)
from semantic.adapters.http.openai.responses.request import ResponseRequest
from semantic.adapters.http.openai.responses.toolbox import Json
from semantic.adapters.http.openai.token_logprobs import ChatTokenLogprob
from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerStarted,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFailed,
    ToolCallStarted,
    Usage,
)

_OURS: Final = "server_error"
_THEIRS: Final = "invalid_prompt"
_TOO_LONG: Final = "context_length_exceeded"
"""Not among the codes of OpenAI's types, but what OpenAI sends, and what clients look for before
they shorten their history."""


_NOT_YET: Final[Json] = {
    "status": "in_progress",
    "completed_at": None,
    "incomplete_details": None,
    "usage": None,
}
"""What is not known before the end."""


class ResponseWriter:
    """Writes one response. `write` takes an answer's events in order and returns those to send."""

    def __init__(
        self, request: ResponseRequest, model: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._request = request
        self._clock = clock
        self._items: list[OutputItem] = []
        self._statuses: list[Status] = []
        self._open: OutputItem | None = None
        self._begun = False
        self._body: Json = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(clock()),
            "background": False,
            "error": None,
            "model": model,
            "output": [],
            **_NOT_YET,
            **request.told,
        }

    @property
    def id(self) -> str:
        """The response's name."""
        return str(self._body["id"])

    @property
    def created(self) -> int:
        """When it was begun, in seconds since 1970."""
        created = self._body["created_at"]
        return created if isinstance(created, int) else 0

    @property
    def body(self) -> Json:
        """The response as far as it has come."""
        items = zip(self._items, self._statuses, strict=True)
        return {**self._body, "output": [item.body(status) for item, status in items]}

    def write(self, event: AnswerEvent, logprobs: Sequence[ChatTokenLogprob] = ()) -> list[Json]:
        """The events to send for `event`, whose text has these `logprobs`.

        Raises WireError when the answer failed.
        """
        match event:
            case AnswerStarted():
                begun = [] if self._begun else [self.sign_of_life()]
                return [*begun, self.sign_of_life()]
            case ToolCallFailed():
                raise unreadable_call(event)
            case AnswerEnd():
                return self._end(event)
        return self._piece(event, logprobs)

    def sign_of_life(self) -> Json:
        """The event that says that the response was begun, or is still being made."""
        what, self._begun = "in_progress" if self._begun else "created", True
        # It may be whole already, and on its way to a slow disk: nobody is to know that yet.
        return {"type": f"response.{what}", "response": {**self.body, **_NOT_YET}}

    def failed(self, problem: Problem) -> list[Json]:
        """The events of a response that cannot be finished."""
        begun = [] if self._begun else [self.sign_of_life()]
        events = self._close("incomplete")
        self._body |= {
            "status": "failed",
            "error": {"code": _code(problem), "message": _message(problem)},
        }
        return [*begun, *events, self._told("failed")]

    # Pieces

    def _piece(self, event: AnswerEvent, logprobs: Sequence[ChatTokenLogprob]) -> list[Json]:
        match event:
            case TextDelta():
                return self._text(event.text, logprobs)
            case ReasoningDelta(text) if text:
                return self._thought(text)
            case ToolCallStarted():
                name = self._request.toolbox.named(event.name)
                return self._begin(CallItem(len(self._items), event.id, name))
            case ToolCallDelta() if isinstance(self._open, CallItem):
                return self._open.grow(event.arguments)
        return []

    def _text(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> list[Json]:
        if isinstance(self._open, TextItem):
            return self._open.grow(text, logprobs)
        item = TextItem(len(self._items))
        return [*self._begin(item), *item.grow(text, logprobs)]

    def _thought(self, text: str) -> list[Json]:
        if isinstance(self._open, ThoughtItem):
            return self._open.grow(text)
        item = ThoughtItem(len(self._items), self._request.sealed)
        return [*self._begin(item), *item.grow(text)]

    def _begin(self, item: OutputItem) -> list[Json]:
        events = self._close("completed")
        self._items.append(item)
        self._statuses.append("in_progress")
        self._open = item
        return [*events, *item.begin()]

    def _close(self, status: Status) -> list[Json]:
        """The events that end the item that may still grow, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        self._statuses[-1] = status
        return item.end(status)

    # The end

    def _end(self, end: AnswerEnd) -> list[Json]:
        check_ended_well(end)
        cut = end.reason == "length"
        events: list[Json] = []
        if not cut and not any(isinstance(item, TextItem | CallItem) for item in self._items):
            events = self._begin(TextItem(len(self._items)))  # an answer of nothing is a text
        events += self._close("incomplete" if cut else "completed")
        self._body |= {"status": "completed", "usage": usage_body(end.usage)}
        if cut:
            self._body |= {
                "status": "incomplete",
                "incomplete_details": {"reason": "max_output_tokens"},
            }
        else:
            self._body["completed_at"] = int(self._clock())
        return [*events, self._told("incomplete" if cut else "completed")]

    def _told(self, what: str) -> Json:
        return {"type": f"response.{what}", "response": self.body}


def _code(problem: Problem) -> str:
    if problem.tokens is not None:
        return _TOO_LONG
    return _OURS if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR else _THEIRS


def _message(problem: Problem) -> str:
    """In the words of an error of HTTP: clients know some of them."""
    told = openai_error(problem)["error"]
    return str(told["message"]) if isinstance(told, dict) else problem.message


def usage_body(usage: Usage) -> Json:
    """What an answer took, in this wire's names."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {
            "cached_tokens": usage.cached,
            "cache_write_tokens": usage.written,
        },
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.total,
        **usage_extension(usage.match),
    }
