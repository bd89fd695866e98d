"""Who sent a request, and what the server was set up to tell them. Not a part of any body."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """The agent that a request names, if it does, and its tenant.

    With `force_usage` streams tell usage to clients that did not ask for it.
    """

    agent: str | None = None
    tenant: str = ""
    force_usage: bool = False
