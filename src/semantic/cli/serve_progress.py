"""Prefills of a server as bars on a terminal. Knows answers as they are observed, and rich."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from semantic.cli.progress import new_progress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from semantic.adapters.http.metrics import AnswerRecord


class ProgressBars:
    """Implements the server's `Observer`: a bar for each prompt that is being computed."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._agents: dict[str, str] = {}
        self._bars: dict[str, TaskID] = {}

    def accepted(self, uid: str, agent: str, prompt_tokens: int) -> None:
        """See `Observer.accepted`."""
        del prompt_tokens
        self._agents[uid] = agent

    def prefilled(self, uid: str, done: int, total: int) -> None:
        """See `Observer.prefilled`."""
        if uid not in self._bars:
            if not self._bars:
                self._progress.start()
            name = self._agents.get(uid, "")
            self._bars[uid] = self._progress.add_task(f"prefill {_plain(name)}", total=total)
        self._progress.update(self._bars[uid], completed=done, total=total)

    def first_token(self, uid: str) -> None:
        """See `Observer.first_token`."""
        self._remove(uid)

    def finished(self, uid: str | None, record: AnswerRecord) -> None:
        """See `Observer.finished`."""
        del record
        self._agents.pop(uid or "", None)
        self._remove(uid or "")

    def _remove(self, uid: str) -> None:
        if uid in self._bars:
            self._progress.remove_task(self._bars.pop(uid))
            if not self._bars:
                self._progress.stop()


def progress_bar() -> ProgressBars | None:
    """Bars, if a person looks at them."""
    return ProgressBars(new_progress()) if sys.stderr.isatty() else None


def _plain(name: str) -> str:
    """A client's text without what a terminal or rich would act on."""
    return "".join(mark for mark in name[:40] if mark.isprintable()).replace("[", "(")
