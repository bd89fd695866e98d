"""What the API's description says of the routes, without importing the SDK that defines them."""

from __future__ import annotations


def described(reply: str, *required: str, streams: bool = False) -> dict[str, object]:
    """A route whose body needs the whole numbers `required` beside a model and messages."""
    body = {
        "type": "object",
        "description": "As Anthropic documents it.",
        "required": ["model", "messages", *required],
        "properties": {
            "model": {"type": "string"},
            "messages": {"type": "array", "items": {"type": "object"}, "minItems": 1},
            **{name: {"type": "integer", "minimum": 0} for name in required},
        },
    }
    replies = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        replies["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": reply, "content": replies}},
    }
