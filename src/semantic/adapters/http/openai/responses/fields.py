"""Every field of a request for a response, and what becomes of it; see `openai.fields`.

Knows names; not how a field is read.
"""

from __future__ import annotations

from typing import Final

from semantic.adapters.http.openai.fields import NOTED, WORKS, Field

RESPONSE_FIELDS: Final[dict[str, Field]] = {
    "access_programs": Field("there are no such programs here"),
    "background": Field("answers are not computed in the background", (False,)),
    "context_management": Field("histories are not shortened by the server", ([],)),
    "conversation": Field("conversations are not kept; use previous_response_id"),
    "image": NOTED,
    "include": WORKS,
    "input": WORKS,
    "instructions": WORKS,
    "max_output_tokens": WORKS,
    "max_tool_calls": NOTED,
    "metadata": NOTED,
    "model": WORKS,
    "moderation": Field("this server moderates nothing"),
    "parallel_tool_calls": WORKS,
    "previous_response_id": WORKS,
    "prompt": Field("prompts are not kept; send the text itself"),
    "prompt_cache_key": NOTED,
    "prompt_cache_options": WORKS,
    "prompt_cache_retention": NOTED,
    "reasoning": WORKS,
    "safety_identifier": NOTED,
    "service_tier": Field("there is one tier only", ("auto", "default")),
    "store": WORKS,
    "stream": WORKS,
    "stream_options": WORKS,
    "temperature": WORKS,
    "text": WORKS,
    "tool_choice": WORKS,
    "tools": WORKS,
    "top_logprobs": WORKS,
    "top_p": WORKS,
    "truncation": Field("input is never truncated", ("disabled",)),
    "user": NOTED,
    # Fields that OpenAI does not have and that clients send.
    "agent_id": WORKS,
    "chat_template_kwargs": WORKS,
    "client_metadata": NOTED,
    "frequency_penalty": WORKS,
    "ignore_eos": WORKS,
    "logit_bias": WORKS,
    "min_p": WORKS,
    "min_tokens": Field("a least number of tokens cannot be enforced", (0,)),
    "presence_penalty": WORKS,
    "repetition_penalty": WORKS,
    "seed": WORKS,
    "stop": WORKS,
    "top_k": WORKS,
}
"""`max_tool_calls` and `image` are about tools and inputs that this server does not have."""

REASONING_FIELDS: Final[dict[str, Field]] = {
    "context": Field("which thoughts stay is up to the model's template", ("auto",)),
    "effort": WORKS,
    "generate_summary": NOTED,
    "mode": Field("there is one mode only", ("standard",)),
    "summary": NOTED,
}
"""Thoughts are told as they were written, whether a summary was asked for or not."""

TEXT_FIELDS: Final[dict[str, Field]] = {
    "format": WORKS,
    "verbosity": Field("this model has no such setting", ("medium",)),
}

CACHE_OPTION_FIELDS: Final[dict[str, Field]] = {
    "comparison_response_id": NOTED,
    "mode": NOTED,
    "prewarm": Field("a prompt is not computed without an answer", (False,)),
    "ttl": NOTED,
}
"""Everything is in the cache, as long as there is room: what was asked for is given."""

STREAM_OPTION_FIELDS: Final[dict[str, Field]] = {
    "include_obfuscation": Field("events are not obfuscated", (False,)),
}
