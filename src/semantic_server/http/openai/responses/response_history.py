"""History: the conversation up to a response, through the chain of previous responses.

Knows chains of responses; neither wires nor how responses are stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from semantic.domain.chat import Message, Tool
from semantic.domain.errors import InvalidRequestError
from semantic.domain.responses import StoredResponse
from semantic.ports.store import ResponsesPort


class ResponseGoneError(InvalidRequestError):
    """A response, or one that it continues, is not stored; `response_id` is its id."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"there is no response {response_id!r:.200}")
        self.response_id = response_id


@dataclass(frozen=True, slots=True)
class History:
    """A conversation up to a response, the agent of the last answer, and the tools of all its
    requests, of each name the newest."""

    messages: tuple[Message, ...]
    agent: str
    tools: tuple[Tool, ...]


def history_of(responses: ResponsesPort, tenant: str, response_id: str) -> History:
    """The history up to and including the response `response_id`.

    Raises ResponseGoneError if any response of the chain is not stored, and StoreError if the
    store cannot be read now.
    """
    chain = _chain(responses, tenant, response_id)
    tools = {tool.name: tool for one in chain for tool in one.tools}
    messages = [message for one in chain for message in (*one.input, *one.output)]
    return History(tuple(messages), chain[-1].agent, tuple(tools.values()))


def _chain(responses: ResponsesPort, tenant: str, response_id: str) -> list[StoredResponse]:
    """The responses from the first to `response_id`."""
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
