"""Who sent a request, and what the server was set up to tell them. Not a part of any body."""

from __future__ import annotations

from dataclasses import dataclass

from semantic.domain.identity import Identity


@dataclass(frozen=True, slots=True)
class Caller:
    """The agent that a request names, if it does, its tenant, and who asks by its client's account.

    With `force_usage` streams tell usage to clients that did not ask for it.
    """

    agent: str | None = None
    tenant: str = ""
    force_usage: bool = False
    identity: Identity | None = None
