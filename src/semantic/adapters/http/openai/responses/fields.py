"""Request fields of the responses wire: which are supported; see `openai.fields`.

Knows names; not what a field means.
"""

from __future__ import annotations

from typing import Final

from semantic.adapters.http.request_fields.table import IGNORED, SUPPORTED, Field

RESPONSE_FIELDS: Final[dict[str, Field]] = {
    "access_programs": Field("there are no such programs here"),
    "background": Field("answers are not computed in the background", (False,)),
    "context_management": Field("histories are not shortened by the server", ([],)),
    "conversation": Field("conversations are not kept; use previous_response_id"),
    "image": IGNORED,
    "include": SUPPORTED,
    "input": SUPPORTED,
    "instructions": SUPPORTED,
    "max_output_tokens": SUPPORTED,
    "max_tool_calls": IGNORED,
    "metadata": IGNORED,
    "model": SUPPORTED,
    "moderation": Field("this server moderates nothing"),
    "parallel_tool_calls": SUPPORTED,
    "previous_response_id": SUPPORTED,
    "prompt": Field("prompts are not kept; send the text itself"),
    "prompt_cache_key": IGNORED,
    "prompt_cache_options": SUPPORTED,
    "prompt_cache_retention": IGNORED,
    "reasoning": SUPPORTED,
    "safety_identifier": IGNORED,
    "service_tier": IGNORED,
    "store": SUPPORTED,
    "stream": SUPPORTED,
    "stream_options": SUPPORTED,
    "temperature": SUPPORTED,
    "text": SUPPORTED,
    "tool_choice": SUPPORTED,
    "tools": SUPPORTED,
    "top_logprobs": SUPPORTED,
    "top_p": SUPPORTED,
    "truncation": Field("input is never truncated", ("disabled",)),
    "user": IGNORED,
    # Outside of OpenAI's API; clients send them.
    "agent_id": SUPPORTED,
    "chat_template_kwargs": SUPPORTED,
    "client_metadata": IGNORED,
    "frequency_penalty": SUPPORTED,
    "ignore_eos": SUPPORTED,
    "logit_bias": SUPPORTED,
    "min_p": SUPPORTED,
    "min_tokens": Field("a least number of tokens cannot be enforced", (0,)),
    "presence_penalty": SUPPORTED,
    "repetition_penalty": SUPPORTED,
    "seed": SUPPORTED,
    "semantic": SUPPORTED,
    "stop": SUPPORTED,
    "top_k": SUPPORTED,
}
"""`max_tool_calls` and `image` concern hosted tools and image inputs, which are not served."""

REASONING_FIELDS: Final[dict[str, Field]] = {
    "context": Field("which thoughts stay is up to the model's template", ("auto",)),
    "effort": SUPPORTED,
    "generate_summary": IGNORED,
    "max_tokens": SUPPORTED,
    "mode": Field("there is one mode only", ("standard",)),
    "summary": IGNORED,
}
"""Reasoning is returned verbatim, with or without a requested summary. `max_tokens` is not
OpenAI's."""

TEXT_FIELDS: Final[dict[str, Field]] = {
    "format": SUPPORTED,
    "verbosity": Field("this model has no such setting", ("medium",)),
}

CACHE_OPTION_FIELDS: Final[dict[str, Field]] = {
    "comparison_response_id": IGNORED,
    "mode": IGNORED,
    "prewarm": Field("a prompt is not computed without an answer", (False,)),
    "ttl": IGNORED,
}
"""Every prompt is cached within the quota, so that there is nothing to switch on."""

STREAM_OPTION_FIELDS: Final[dict[str, Field]] = {
    "include_obfuscation": Field("events are not obfuscated", (False,)),
}

CHECKED_BY_ELEMENT: Final = frozenset(
    {
        "chat_template_kwargs",
        "include",
        "input",
        "stop",
        "stream_options",
        "text",
        "tool_choice",
        "tools",
    }
)
"""Fields of a body that are validated by themselves, so that errors name the element's path."""
