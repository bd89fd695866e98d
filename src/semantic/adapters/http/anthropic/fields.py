"""What becomes of each top-level field of a request for a message.

A test compares these tables with the SDK's own: a field that is new there is in none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.logs import WarnOnce

WORKS: Final = frozenset({
    "max_tokens", "messages", "model", "output_config", "output_format", "stop_sequences",
    "stream", "system", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_p",
})  # fmt: skip
"""They do what they are documented to do."""

OURS: Final = frozenset({"agent_id"})

NO_EFFECT: Final[Mapping[str, str]] = {
    "betas": "what they switch on is there, or is asked for by other fields",
    "billing_policy": "nothing is billed",
    "cache_control": "everything is cached anyway",
    "context_management": "no edit is applied, and the answer says so",
    "diagnostics": "GET /v1/agents/{id}/why tells it",
    "fallback_credit_token": "nothing is billed",
    "fallbacks": "one model is served, and it never declines",
    "inference_geo": "it runs here",
    "metadata": "its user_id may say who asks; it changes no answer",
    "service_tier": "there is one",
    "speed": "there is one",
    "user_profile_id": "nothing is billed",
    "workspace_id": "the API key alone decides",
}
"""Accepted, since leaving them out of account gives the answer that was asked for."""

REFUSED: Final[Mapping[str, str]] = {
    "compaction": "this server does not summarize conversations",
    "container": "this server runs no code",
    "mcp_servers": "this server calls no MCP servers",
    "thread": "this server keeps no messages: send all of them (their KV cache is kept)",
}
"""An error unless empty: an answer without them would not be what was asked for."""

_LONGEST_NAME: Final = 80


def check_fields(body: Mapping[str, object], warnings: WarnOnce) -> None:
    """Warn of fields that nobody knows. Raises FieldError for one that cannot be served."""
    for name, value in body.items():
        if name in REFUSED and value:
            raise FieldError(f"{name}: {REFUSED[name]}", param=name)
        if not (name in WORKS or name in OURS or name in NO_EFFECT or name in REFUSED):
            shown = repr(name[:_LONGEST_NAME])
            warnings.warn(f"/v1/messages: the field {shown} is not known and has no effect")
