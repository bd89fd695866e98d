"""One line in the log for each request: who, how much, how fast, how it ended.

Never a prompt, a key, a body, nor a path as it was sent: the route's pattern stands for it.
"""

from __future__ import annotations

import logging
import time
import uuid
from http import HTTPStatus
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semantic.adapters.http.errors import id_headers
from semantic.adapters.http.logs import Facts, log_facts
from semantic.adapters.http.lost import lost_tokens
from semantic.adapters.http.observed import AnswerRecord

QUIET: Final = frozenset({"/health", "/ready", "/metrics", "/", "/api/hello", "/version"})
"""What machines ask for every few seconds: logged for those who debug."""

_LINE: Final = "request_line"


class RequestLine:
    """What is known of one request's answers; a request may ask for several."""

    def __init__(self) -> None:
        self._records: list[AnswerRecord] = []

    def taken_in(self, uid: str, agent: str, prompt_tokens: int) -> None:
        """See `Observer.taken_in`."""

    def prefilled(self, uid: str, done: int, total: int) -> None:
        """See `Observer.prefilled`."""

    def writes(self, uid: str) -> None:
        """See `Observer.writes`."""

    def ended(self, uid: str | None, record: AnswerRecord) -> None:
        """See `Observer.ended`."""
        del uid
        self._records.append(record)

    def facts(self) -> Facts:
        """Of all answers together: tokens are summed, times are the longest, and of what was lost
        it is the most."""
        if not self._records:
            return {}
        usages = [record.usage for record in self._records]
        firsts = [record.first for record in self._records if record.first is not None]
        speeds = [speed for record in self._records if (speed := record.tokens_per_second)]
        errors = [record.error for record in self._records if record.error]
        losses = [lost for record in self._records if (lost := lost_tokens(record.match))]
        worst = max(losses, key=lambda one: one.tokens, default=None)
        return {
            "agent": self._records[0].agent,
            "prompt": sum(usage.prompt for usage in usages),
            "cached": sum(usage.cached for usage in usages),
            "completion": sum(usage.completion for usage in usages),
            "prefill_s": max(record.prefill for record in self._records),
            "ttft_s": max(firsts) if firsts else None,
            "tok_s": sum(speeds) if speeds else None,
            "finish": self._records[-1].finish,
            "failed": "yes" if errors else None,
            "lost": None if worst is None else worst.tokens,
            "lost_s": None if worst is None else worst.seconds,
            "lost_why": None if worst is None else worst.reason,
        }


def line_of(scope: Scope) -> RequestLine:
    """The line of the request of `scope`."""
    line: RequestLine = scope.setdefault("state", {}).setdefault(_LINE, RequestLine())
    return line


class RequestLog:
    """Middleware: gives a request its id, and writes its line when it is over."""

    def __init__(self, app: ASGIApp, model: str) -> None:
        self._app = app
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
        started = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(id_headers(request_id))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._write(scope, request_id, status, time.monotonic() - started)

    def _write(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        facts: Facts = {
            "id": request_id,
            "route": f"{_method(scope)} {_pattern(scope)}",
            "status": status,
            "seconds": round(seconds, 3),
            **({"model": self._model} | answered if (answered := line_of(scope).facts()) else {}),
        }
        quiet = scope["path"] in QUIET and status < HTTPStatus.BAD_REQUEST
        log_facts("request", facts, logging.DEBUG if quiet else logging.INFO)


def _method(scope: Scope) -> str:
    """A method of HTTP; whatever else was sent there is not repeated."""
    known = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
    method: str = scope["method"]
    return method if method in known else "?"


def _pattern(scope: Scope) -> str:
    """The route's pattern, as in `/v1/models/{id}`; "?" where there is no route."""
    pattern: str = getattr(scope.get("route"), "path_format", "?")
    return pattern
