"""Tells how far long prefills are, so that nobody thinks that the server hangs.

Knows answers as they are observed and a log; a terminal's bar is the command line's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from semantic.adapters.http.logs import log_facts
from semantic.adapters.http.observed import AnswerRecord

EVERY_SECONDS: Final = 5.0
"""A prefill shorter than this needs no line, and a longer one not more often."""


class LoggedProgress:
    """Implements `Observer`: a line such as `prefill 12288/60000` every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}
        self._agents: dict[str, str] = {}

    def taken_in(self, uid: str, agent: str, prompt_tokens: int) -> None:
        """See `Observer.taken_in`."""
        del prompt_tokens
        self._last[uid] = self._clock()
        self._agents[uid] = agent

    def prefilled(self, uid: str, done: int, total: int) -> None:
        """See `Observer.prefilled`."""
        now = self._clock()
        if uid in self._last and now - self._last[uid] >= EVERY_SECONDS:
            self._last[uid] = now
            log_facts(f"prefill {done}/{total}", {"agent": self._agents[uid]})

    def writes(self, uid: str) -> None:
        """See `Observer.writes`."""

    def ended(self, uid: str | None, record: AnswerRecord) -> None:
        """See `Observer.ended`."""
        del record
        self._last.pop(uid or "", None)
        self._agents.pop(uid or "", None)
