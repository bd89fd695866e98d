"""What the server writes to its log, as text or as JSON, one line for each event.

Knows the form of a line; not what happens. A line never holds a prompt, a key or a body.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final, Literal, TextIO

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semantic.adapters.http.cache_miss_report import lost_tokens
from semantic.adapters.http.errors import id_headers, logger
from semantic.adapters.http.metrics import AnswerRecord

LOG_FIELDS: Final = "fields"
"""The attribute of a log record that holds its fields by name."""

LogFields = dict[str, str | int | float | None]


def log_event(event: str, fields: LogFields, level: int = logging.INFO) -> None:
    """One line about `event`."""
    logger.log(level, event, extra={LOG_FIELDS: fields})


class TextLines(logging.Formatter):
    """`12:00:00 info request agent=a prompt=12`: fields that are unknown are left out."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S")
        fields = [
            f"{name}={_quoted(value)}" for name, value in _fields_of(record) if value is not None
        ]
        line = " ".join((when, record.levelname.lower(), _one_line(record.getMessage()), *fields))
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """An object with `time`, `level`, `event` and the fields; a trace is one text in it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **dict(_fields_of(record)),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what stderr is now: a progress bar puts something in its place for a while."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = (
            sys.stderr
        )  # not `setStream`: that flushes the one before, which may be closed
        super().emit(record)


def configure_logs(form: Literal["text", "json"], level: str) -> None:
    """Send our log and the warnings of the HTTP library and the event loop to stderr."""
    handler = StderrHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    ours = logging.getLogger("semantic")
    ours.handlers = [handler]
    ours.propagate = False
    ours.setLevel(level.upper())
    for name in ("uvicorn.error", "asyncio"):
        theirs = logging.getLogger(name)
        theirs.handlers = [handler]
        theirs.propagate = False
        theirs.setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(is_not_duplicate)


def is_not_duplicate(record: logging.LogRecord) -> bool:
    """Whether a record of the HTTP library says what our own log does not.

    A failed request is there already with its id, and a client that speaks no HTTP is answered.
    """
    known = ("Exception in ASGI application", "Invalid HTTP request", "ASGI callable returned")
    return not record.getMessage().startswith(known)


def _fields_of(record: logging.LogRecord) -> list[tuple[str, str | int | float | None]]:
    fields: LogFields = getattr(record, LOG_FIELDS, {})
    return list(fields.items())


def _quoted(value: str | float | None) -> str:
    """One word: what has spaces or odd characters is quoted."""
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and text and not any(mark in text for mark in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=True)


def _one_line(text: str) -> str:
    return " ".join(text.split())


_MAX_WARNINGS: Final = 1000
"""WarnOnce remembered, so that a client that invents names cannot fill the memory."""


class WarnOnce:
    """Says each thing once, and after a thousand things nothing any more."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def warn(self, message: str) -> None:
        """Log `message` as a warning, unless it was logged before."""
        if message not in self._logged and len(self._logged) < _MAX_WARNINGS:
            self._logged.add(message)
            logger.warning("%s", message)


QUIET_PATHS: Final = frozenset({"/health", "/ready", "/metrics", "/", "/api/hello", "/version"})
"""What machines ask for every few seconds: logged for those who debug."""

_LINE: Final = "request_line"


class RequestLogEntry:
    """What is known of one request's answers; a request may ask for several."""

    def __init__(self) -> None:
        self._records: list[AnswerRecord] = []

    def accepted(self, uid: str, agent: str, prompt_tokens: int) -> None:
        """See `Observer.accepted`."""

    def prefilled(self, uid: str, done: int, total: int) -> None:
        """See `Observer.prefilled`."""

    def first_token(self, uid: str) -> None:
        """See `Observer.first_token`."""

    def finished(self, uid: str | None, record: AnswerRecord) -> None:
        """See `Observer.finished`."""
        del uid
        self._records.append(record)

    def fields(self) -> LogFields:
        """Of all answers together: tokens are summed, times are the longest, and of what was lost
        it is the most."""
        if not self._records:
            return {}
        usages = [record.usage for record in self._records]
        firsts = [record.ttft for record in self._records if record.ttft is not None]
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


def log_entry_of(scope: Scope) -> RequestLogEntry:
    """The line of the request of `scope`."""
    line: RequestLogEntry = scope.setdefault("state", {}).setdefault(_LINE, RequestLogEntry())
    return line


class RequestLogMiddleware:
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
        fields: LogFields = {
            "id": request_id,
            "route": f"{_method(scope)} {_pattern(scope)}",
            "status": status,
            "seconds": round(seconds, 3),
            **(
                {"model": self._model} | answered
                if (answered := log_entry_of(scope).fields())
                else {}
            ),
        }
        quiet = scope["path"] in QUIET_PATHS and status < HTTPStatus.BAD_REQUEST
        log_event("request", fields, logging.DEBUG if quiet else logging.INFO)


def _method(scope: Scope) -> str:
    """A method of HTTP; whatever else was sent there is not repeated."""
    known = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
    method: str = scope["method"]
    return method if method in known else "?"


def _pattern(scope: Scope) -> str:
    """The route's pattern, as in `/v1/models/{id}`; "?" where there is no route."""
    pattern: str = getattr(scope.get("route"), "path_format", "?")
    return pattern


PROGRESS_INTERVAL: Final = 5.0
"""A prefill shorter than this needs no line, and a longer one not more often."""


class ProgressLog:
    """Implements `Observer`: a line such as `prefill 12288/60000` every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        self._agents: dict[str, str] = {}

    def accepted(self, uid: str, agent: str, prompt_tokens: int) -> None:
        """See `Observer.accepted`."""
        del prompt_tokens
        self._last[uid] = self._clock()
        self._agents[uid] = agent

    def prefilled(self, uid: str, done: int, total: int) -> None:
        """See `Observer.prefilled`."""
        now = self._clock()
        if uid in self._last and now - self._last[uid] >= PROGRESS_INTERVAL:
            self._last[uid] = now
            log_event(f"prefill {done}/{total}", {"agent": self._agents[uid]})

    def first_token(self, uid: str) -> None:
        """See `Observer.first_token`."""

    def finished(self, uid: str | None, record: AnswerRecord) -> None:
        """See `Observer.finished`."""
        del record
        self._last.pop(uid or "", None)
        self._agents.pop(uid or "", None)
