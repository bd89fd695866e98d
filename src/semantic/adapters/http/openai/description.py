"""What the API's description says of both routes, without importing the SDK that defines them."""

from __future__ import annotations


def described(required: str) -> dict[str, object]:
    """Body and reply of a route whose body needs the field `required` beside the model's name."""
    properties = {
        "model": {"type": "string"},
        required: {},
        "stream": {"type": "boolean"},
    }
    body = {
        "type": "object",
        "description": "As OpenAI documents it; fields that are not supported are a 400.",
        "required": ["model", required],
        "properties": properties,
    }
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": "The reply, or a stream of its chunks.",
                "content": {
                    "application/json": {"schema": {"type": "object"}},
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            }
        },
    }
