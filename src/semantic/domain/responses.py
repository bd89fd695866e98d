"""StoredResponse: one response of the Responses API, its key and its encoding as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, cast

from semantic.domain.chat import Message, Role, Tool, ToolCall
from semantic.domain.identity import digest

_OWNER_BYTES: Final = 16
_BODY: Final = b"\n"
"""Separates a response's fields from its body."""


class DamagedRecordError(Exception):
    """The bytes are not an encoded response."""


def key_of(tenant: str, response_id: str) -> bytes:
    """Return the 32-byte key of a response. It reveals neither the tenant's name nor the id."""
    return digest("response-key-v1", _utf8(tenant), _utf8(response_id))


def owner_of(tenant: str) -> bytes:
    """Return the 16-byte key under which a store counts a tenant's responses."""
    return digest("response-owner-v1", _utf8(tenant))[:_OWNER_BYTES]


def encoded(response: StoredResponse) -> bytes:
    facts = asdict(response)
    body = facts.pop("body")
    # JSON's escapes preserve a lone surrogate.
    return json.dumps(facts, separators=(",", ":")).encode() + _BODY + _utf8(body)


def decoded(data: bytes) -> StoredResponse:
    """Undo `encoded`. Raises DamagedRecordError if `data` is not from `encoded`."""
    head, mark, body = data.partition(_BODY)
    try:
        facts = json.loads(head)
        if not mark or not isinstance(facts, dict):
            raise DamagedRecordError("a recorded response must be a JSON object and a body")
        return StoredResponse(
            facts["id"],
            facts["agent"],
            tuple(map(_message, facts["input"])),
            tuple(map(_message, facts["output"])),
            body.decode("utf-8", "surrogatepass"),
            facts["previous"],
            tuple(Tool(**tool) for tool in facts["tools"]),
            facts["created"],
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedRecordError(f"not a response: {type(error).__name__}") from error


def response_in(data: bytes | None, response_id: str) -> StoredResponse | None:
    """Return the response stored in a record, or None for an unknown response."""
    try:
        found = None if data is None else decoded(data)
    except DamagedRecordError:
        return None
    return found if found is not None and found.id == response_id else None


def _message(facts: Mapping[str, object]) -> Message:
    calls = cast("list[dict[str, str]]", facts["tool_calls"])
    return Message(
        cast("Role", facts["role"]),
        cast("str", facts["content"]),
        cast("str", facts["reasoning"]),
        tuple(ToolCall(**call) for call in calls),
        cast("str | None", facts["tool_call_id"]),
        cast("str | None", facts["name"]),
    )


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The part of a conversation that one response added.

    The response `previous` has the messages before `input`. `body` is JSON in the API's format.
    `created` is Unix time in seconds.
    """

    id: str
    agent: str
    input: tuple[Message, ...]
    output: tuple[Message, ...]
    body: str
    previous: str | None = None
    tools: tuple[Tool, ...] = ()
    created: int = 0
