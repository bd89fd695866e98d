"""A stored response as bytes, and the key under which they are found.

Bytes that are not exactly what was written are nothing. Knows no place where they are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final, cast

from semantic.domain.chat import Message, Role, Tool, ToolCall
from semantic.domain.digest import digest
from semantic.domain.responses import StoredResponse

_BODY: Final = b"\n"
"""Between what stands in a response and its body; JSON in one line has none."""


class DamagedRecordError(Exception):
    """The bytes are not what was written."""


def key_of(tenant: str, response_id: str) -> bytes:
    """What a response is found by, 32 bytes. Without the tenant's name nobody can derive it, and
    it tells nothing of either."""
    return digest("response-key-v1", _utf8(tenant), _utf8(response_id))


def encoded(response: StoredResponse) -> bytes:
    """`response` in bytes."""
    facts = asdict(response)
    body = facts.pop("body")
    # Escaped, so that half a surrogate pair comes back as it was.
    return json.dumps(facts, separators=(",", ":")).encode() + _BODY + _utf8(body)


def decoded(data: bytes) -> StoredResponse:
    """What `encoded` was given. Raises DamagedRecordError for anything else."""
    head, mark, body = data.partition(_BODY)
    try:
        facts = json.loads(head)
        if not mark or not isinstance(facts, dict):
            raise DamagedRecordError("expected an object and a body")
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
