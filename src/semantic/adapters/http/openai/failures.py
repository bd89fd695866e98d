"""Answers that failed after they began, as errors of the wire.

A call that cannot be read is an error of its own: as text it would end an agent's work silently.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

from semantic.adapters.http.errors import WireError
from semantic.domain.answer import AnswerEnd, ToolCallFailed

logger = logging.getLogger("semantic.server")


def check_ended_well(end: AnswerEnd) -> None:
    """Raise WireError unless the answer is complete or was cut at its most tokens."""
    if end.reason == "cancelled":
        raise WireError(
            HTTPStatus.SERVICE_UNAVAILABLE, "the answer was cancelled", code="cancelled"
        )
    if end.reason == "error":
        # What went wrong may tell of the machine; only the log gets it.
        logger.error("an answer failed: %s", end.error)
        raise WireError(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            "the model failed while it answered",
            code="answer_failed",
        )


def unreadable_call(failed: ToolCallFailed) -> WireError:
    """The error of an answer that ended in a call which cannot be read, with what was written."""
    return WireError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        f"the model wrote a tool call that cannot be read: {failed.problem}; it wrote: "
        f"{failed.text}",
        code="tool_call_unreadable",
    )
