"""The server's log on stderr. Never logs a prompt, a key, a body or a requested path."""

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

from semantic_server.http.answer_records import AnswerRecord, Observer, lost_tokens
from semantic_server.http.errors import (
    CANCELLED,
    Problem,
    id_headers,
    logger,
    method_and_path,
    reported,
)

LOG_FIELDS: Final = "fields"
"""The attribute of a log record that contains its fields by name."""

LogFields = dict[str, str | int | float | None]


def log_event(event: str, fields: LogFields, level: int = logging.INFO) -> None:
    """Log one line for `event` with `fields`."""
    logger.log(level, event, extra={LOG_FIELDS: fields})


class TextLines(logging.Formatter):
    """Formats log records as `12:00:00 info request agent=a prompt=12`."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S")
        fields = [
            f"{name}={_quoted(value)}" for name, value in _fields_of(record) if value is not None
        ]
        line = " ".join((when, record.levelname.lower(), _one_line(record.getMessage()), *fields))
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """Formats log records as JSON objects."""

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
    """Writes to the current `sys.stderr`, which a progress bar may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        # Not `setStream`: it flushes the previous stream, even a closed one.
        self.stream = sys.stderr
        super().emit(record)


def configure_logs(form: Literal["text", "json"], level: str) -> None:
    """Send the log of `semantic`, and warnings of uvicorn and asyncio, to stderr."""
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
    """Return False for uvicorn's records of events that this server logs itself."""
    known = ("Exception in ASGI application", "Invalid HTTP request", "ASGI callable returned")
    return not record.getMessage().startswith(known)


def _fields_of(record: logging.LogRecord) -> list[tuple[str, str | int | float | None]]:
    fields: LogFields = getattr(record, LOG_FIELDS, {})
    return list(fields.items())


def _quoted(value: str | float | None) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and text and not any(mark in text for mark in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=True)


def _one_line(text: str) -> str:
    return " ".join(text.split())


_MAX_WARNINGS: Final = 1000
"""The maximum number of distinct warnings to remember."""


class WarnOnce:
    """Logs each distinct warning once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def warn(self, message: str) -> None:
        """Log `message` the first time."""
        if message not in self._logged and len(self._logged) < _MAX_WARNINGS:
            self._logged.add(message)
            logger.warning("%s", message)


QUIET_PATHS: Final = frozenset({"/health", "/ready", "/metrics", "/", "/api/hello", "/version"})
"""Paths that machines request every few seconds. Logged at debug level."""

_OVERVIEW: Final = "/v1/overview"
OnRefusal = Callable[[str, str | None, str, Problem], None]
"""Takes a request's id, its tenant or None, its method and path, and the error."""
_ENTRY: Final = "request_line"


class RequestLogEntry(Observer):
    """The log entry of one request and of all its answers."""

    def __init__(self) -> None:
        self._records: list[AnswerRecord] = []
        self.problem: Problem | None = None
        """The error of an answer that the engine did not accept, perhaps sent in a stream."""

    def finished(self, uid: str | None, record: AnswerRecord) -> None:
        self._records.append(record)
        if uid is None and record.error is not None:
            self.problem = Problem(record.status, record.error)

    def fields(self) -> LogFields:
        """Return the fields to log, summed over all answers."""
        if not self._records:
            return {}
        usages = [record.usage for record in self._records]
        firsts = [record.ttft for record in self._records if record.ttft is not None]
        speeds = [speed for record in self._records if (speed := record.tokens_per_second)]
        errors = [record.error for record in self._records if record.error]
        misses = [miss for record in self._records if (miss := lost_tokens(record.match))]
        worst = max(misses, key=lambda miss: miss.tokens, default=None)
        model = self._records[0].model  # "" unless the server has several models
        return {
            **({"model": model} if model else {}),
            "agent": self._records[0].agent,
            "prompt": sum(usage.prompt for usage in usages),
            "cached": sum(usage.cached for usage in usages),
            "completion": sum(usage.completion for usage in usages),
            "prefill_s": max(record.prefill for record in self._records),
            "ttft_s": max(firsts) if firsts else None,
            "tok_s": sum(speeds) if speeds else None,
            "finish": self._records[-1].finish,
            "failed": "yes" if errors else None,
            "unread_calls": sum(record.unread_calls for record in self._records) or None,
            "lost": None if worst is None else worst.tokens,
            "lost_s": None if worst is None else worst.seconds,
            "lost_why": None if worst is None else worst.reason,
        }


def log_entry_of(scope: Scope) -> RequestLogEntry:
    """Return the log entry of the request of `scope`."""
    entry: RequestLogEntry = scope.setdefault("state", {}).setdefault(_ENTRY, RequestLogEntry())
    return entry


class RequestLogMiddleware:
    """Assigns a request id, and logs one line at the end of the request.

    Calls `on_refusal` for an error that no observer of an answer has seen.
    """

    def __init__(self, app: ASGIApp, model: str, on_refusal: OnRefusal) -> None:
        self._app = app
        self._model = model
        self._on_refusal = on_refusal

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
        entry = log_entry_of(scope)
        answered, problem = entry.fields(), entry.problem
        fields: LogFields = {
            "id": request_id,
            "route": f"{_method(scope)} {_pattern(scope)}",
            "status": status,
            "seconds": round(seconds, 3),
            **({"model": self._model} | answered if answered else {}),
        }
        if not answered and status >= HTTPStatus.BAD_REQUEST and status != CANCELLED:
            problem = reported(scope) or Problem(status, HTTPStatus(status).phrase)
        if problem is not None and not scope["path"].startswith(_OVERVIEW):  # a page without a key
            tenant = scope["state"].get("tenant")
            self._on_refusal(request_id, tenant, method_and_path(scope), problem)
        quiet = scope["path"] in QUIET_PATHS and status < HTTPStatus.BAD_REQUEST
        log_event("request", fields, logging.DEBUG if quiet else logging.INFO)


def _method(scope: Scope) -> str:
    known = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
    method: str = scope["method"]
    return method if method in known else "?"


def _pattern(scope: Scope) -> str:
    pattern: str = getattr(scope.get("route"), "path_format", "?")
    return pattern


PROGRESS_INTERVAL: Final = 5.0
"""Seconds between two progress lines."""


class ProgressLog(Observer):
    """Logs the progress of long prefills, as `prefill 12288/60000`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        self._agents: dict[str, str] = {}
        self._begun: dict[str, tuple[float, int]] = {}

    def accepted(self, uid: str, agent: str, prompt_tokens: int) -> None:
        del prompt_tokens
        self._last[uid] = self._clock()
        self._agents[uid] = agent

    def prefilled(self, uid: str, done: int, total: int) -> None:
        if uid not in self._last:
            return
        now = self._clock()
        began, cached = self._begun.setdefault(uid, (now, done))
        if now - self._last[uid] >= PROGRESS_INTERVAL:
            self._last[uid] = now
            rate = (done - cached) / (now - began) if now > began else 0.0
            left = (total - done) / rate if rate > 0 else None
            fields = {"tok_s": rate or None, "left_s": left}
            log_event(f"prefill {done}/{total}", {"agent": self._agents[uid], **fields})

    def finished(self, uid: str | None, record: AnswerRecord) -> None:
        del record
        self._last.pop(uid or "", None)
        self._agents.pop(uid or "", None)
        self._begun.pop(uid or "", None)
