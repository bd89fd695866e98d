"""What the server writes to its log, as text or as JSON, one line for each event.

Knows the form of a line; not what happens. A line never holds a prompt, a key or a body.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

from semantic.adapters.http.errors import logger

FACTS: Final = "facts"
"""The attribute of a log record that holds its facts by name."""

Facts = dict[str, str | int | float | None]


def log_facts(event: str, facts: Facts, level: int = logging.INFO) -> None:
    """One line about `event`."""
    logger.log(level, event, extra={FACTS: facts})


class TextLines(logging.Formatter):
    """`12:00:00 info request agent=a prompt=12`: facts that are unknown are left out."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S")
        facts = [f"{name}={_word(value)}" for name, value in _facts(record) if value is not None]
        line = " ".join((when, record.levelname.lower(), _one_line(record.getMessage()), *facts))
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """An object with `time`, `level`, `event` and the facts; a trace is one text in it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **dict(_facts(record)),
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
    logging.getLogger("uvicorn.error").addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a record of the HTTP library says what our own log does not.

    A failed request is there already with its id, and a client that speaks no HTTP is answered.
    """
    known = ("Exception in ASGI application", "Invalid HTTP request", "ASGI callable returned")
    return not record.getMessage().startswith(known)


def _facts(record: logging.LogRecord) -> list[tuple[str, str | int | float | None]]:
    facts: Facts = getattr(record, FACTS, {})
    return list(facts.items())


def _word(value: str | float | None) -> str:
    """One word: what has spaces or odd characters is quoted."""
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and text and not any(mark in text for mark in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=True)


def _one_line(text: str) -> str:
    return " ".join(text.split())
