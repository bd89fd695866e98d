"""StoredResponse: one response of the Responses wire, stored under its id.

Knows messages and the agent; neither wires nor storage.
"""

from __future__ import annotations

from dataclasses import dataclass

from semantic.domain.chat import Message, Tool


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """What one response added to a conversation.

    `input` has only the messages of its own request; earlier ones are in the response `previous`.
    `tools` are those that its input added to the conversation. `body` is JSON in the format of its
    wire. `created` is Unix time in seconds.
    """

    id: str
    agent: str
    input: tuple[Message, ...]
    output: tuple[Message, ...]
    body: str
    previous: str | None = None
    tools: tuple[Tool, ...] = ()
    created: int = 0
