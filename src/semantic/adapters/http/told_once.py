"""Warnings that stand in the log once, however often there is a reason for them."""

from __future__ import annotations

from typing import Final

from semantic.adapters.http.errors import logger

_MOST: Final = 1000
"""Warnings remembered, so that a client that invents names cannot fill the memory."""


class Warnings:
    """Says each thing once, and after a thousand things nothing any more."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, message: str) -> None:
        """Log `message` as a warning, unless it was logged before."""
        if message not in self._said and len(self._said) < _MOST:
            self._said.add(message)
            logger.warning("%s", message)
