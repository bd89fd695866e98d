"""What a request tells the model's template beside the conversation; the same on every wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from semantic.adapters.http.errors import FieldError

_QUIET_EFFORTS: Final = frozenset({"none", "minimal"})
"""Efforts at which a model that can do without a thought does without."""

_RESERVED: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names by which a template gets the conversation itself, or by which it would be another one."""


def template_options(effort: str | None, own: Mapping[str, object]) -> dict[str, object]:
    """Options for an effort of reasoning, and the client's `own` over them.

    Raises FieldError for an option that is not the client's to set.
    """
    options: dict[str, object] = {}
    if effort is not None:
        options = {"reasoning_effort": effort, "enable_thinking": effort not in _QUIET_EFFORTS}
    for name in own:
        if name in _RESERVED or name.startswith("return_") or name.endswith("_token"):
            path = "chat_template_kwargs"
            raise FieldError(f"{path}: {name!r} is not the client's to set", param=path)
    return options | dict(own)
