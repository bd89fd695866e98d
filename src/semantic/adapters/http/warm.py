"""What the first request of each wire would otherwise wait for: the import of its SDK's types."""

from __future__ import annotations


def import_sdks() -> None:
    """Takes a second or two; any thread may do it."""
    from semantic.adapters.http.anthropic import sdk_types
    from semantic.adapters.http.openai import body_types

    sdk_types.load()
    body_types.chat_adapter()
    body_types.completion_adapter()
    body_types.response_adapter()
