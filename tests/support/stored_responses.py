"""Sample responses for tests of response stores."""

from __future__ import annotations

import json
from dataclasses import replace

from semantic.domain.chat import Message, Tool, ToolCall
from semantic.domain.responses import StoredResponse

CALL = ToolCall("call_1", "look", '{"at": "the sea"}')
ODD = 'a "quoted" line\nand half a pair: \ud83d \u0000 ∅'
"""A text with everything that encodings get wrong: quotes, NUL, a lone surrogate."""


def response(number: int = 1, previous: str | None = None, *, size: int = 0) -> StoredResponse:
    """A response whose texts contain `number`, `size` characters longer."""
    return StoredResponse(
        f"resp_{number}",
        f"agent-{number}",
        (
            Message("developer", f"rule {number}"),
            Message("user", f"{ODD} {number}" + "x" * size, name="ada"),
            Message("tool", "blue", tool_call_id="call_0"),
        ),
        (Message("assistant", f"answer {number}", reasoning=ODD, tool_calls=(CALL, CALL)),),
        json.dumps({"id": f"resp_{number}", "text": ODD}),
        previous,
        (Tool("look", "Looks.", {"type": "object", "properties": {"at": {}}}, strict=True),),
        1_700_000_000 + number,
    )


def with_id(response_id: str) -> StoredResponse:
    """A response with this id."""
    return replace(response(), id=response_id)
