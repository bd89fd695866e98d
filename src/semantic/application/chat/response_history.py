"""What was said up to a response: its own request and answer, and all that it goes on from.

Knows chains of responses; neither wires nor how responses are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from semantic.domain.chat import Message, Tool
from semantic.domain.errors import InvalidRequestError
from semantic.domain.responses import StoredResponse
from semantic.ports.responses import ResponsesPort


class ResponseGoneError(InvalidRequestError):
    """A response, or one that it goes on from, is not kept; `response_id` is its id."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"there is no response {response_id!r:.200}")
        self.response_id = response_id


@dataclass(frozen=True, slots=True)
class History:
    """A conversation up to a response, the agent that answered last, and the tools it was given
    on the way, the newest of a name."""

    messages: tuple[Message, ...]
    agent: str
    tools: tuple[Tool, ...]


def history_of(responses: ResponsesPort, tenant: str, response_id: str) -> History:
    """The history up to and with the response `response_id`.

    A part of a history is none: raises ResponseGoneError when any response of it is not kept, and
    StoreError when that cannot be told now.
    """
    chain = _chain(responses, tenant, response_id)
    tools = {tool.name: tool for one in chain for tool in one.tools}
    messages = [message for one in chain for message in (*one.input, *one.output)]
    return History(tuple(messages), chain[-1].agent, tuple(tools.values()))


def _chain(responses: ResponsesPort, tenant: str, response_id: str) -> list[StoredResponse]:
    """The responses from the first to that one."""
    found: list[StoredResponse] = []
    seen: set[str] = set()
    at: str | None = response_id
    while at is not None:
        one = None if at in seen else responses.get(tenant, at)
        if one is None:
            raise ResponseGoneError(at)
        seen.add(at)
        found.append(one)
        at = one.previous
    return found[::-1]
