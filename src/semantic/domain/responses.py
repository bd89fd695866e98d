"""A response that was given, kept under its id: a point in an agent's history.

Knows what was said and by whom; neither wires nor how it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from semantic.domain.chat import Message, Tool


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """What one response added to a conversation.

    `input` has only what its own request said; what came before is in the response `previous`.
    `tools` are those that its input brought along, and that stay. `body` is JSON in the shape of
    the wire that gave it. `created` is in seconds since 1970.
    """

    id: str
    agent: str
    input: tuple[Message, ...]
    output: tuple[Message, ...]
    body: str
    previous: str | None = None
    tools: tuple[Tool, ...] = ()
    created: int = 0
