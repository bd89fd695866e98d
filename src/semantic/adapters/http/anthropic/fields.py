"""Request fields of Anthropic's wire: which are supported; see `request_fields.table`.

A test compares the table with the SDK's own fields, and those of other wires with their tables.
Knows names; not what a field means.
"""

from __future__ import annotations

from typing import Final

from semantic.adapters.http.request_fields.foreign import FOREIGN
from semantic.adapters.http.request_fields.table import IGNORED, SUPPORTED, Field, refused

MESSAGE_FIELDS: Final[dict[str, Field]] = {
    "betas": IGNORED,  # what they enable is always on, or set by other fields
    "billing_policy": IGNORED,
    "cache_control": IGNORED,  # all prompts are cached
    "compaction": refused("this server does not summarize conversations"),
    "container": refused("this server runs no code"),
    "context_management": SUPPORTED,  # no edit is applied, as the reply reports
    "diagnostics": IGNORED,
    "fallback_credit_token": IGNORED,
    "fallbacks": IGNORED,  # there is one model, which never declines
    "inference_geo": IGNORED,
    "max_tokens": SUPPORTED,
    "mcp_servers": refused("this server calls no MCP servers", []),
    "messages": SUPPORTED,
    "metadata": IGNORED,  # its user_id may identify the session
    "model": SUPPORTED,
    "output_config": SUPPORTED,
    "service_tier": IGNORED,
    "speed": IGNORED,
    "stop_sequences": SUPPORTED,
    "stream": SUPPORTED,
    "system": SUPPORTED,
    "thinking": SUPPORTED,
    "thread": refused("this server keeps no messages: send all of them (their KV cache is kept)"),
    "tool_choice": SUPPORTED,
    "tools": SUPPORTED,
    "user_profile_id": IGNORED,
    "workspace_id": IGNORED,  # the API key alone determines the tenant
    # Of older versions of the SDK.
    "output_format": SUPPORTED,
    "temperature": SUPPORTED,
    "top_k": SUPPORTED,
    "top_p": SUPPORTED,
    # Outside of Anthropic's API; clients send them.
    "agent_id": SUPPORTED,
    "anthropic_beta": IGNORED,
    "anthropic_version": IGNORED,
    "semantic": SUPPORTED,
}
"""A hosted service's accounting and routing are ignored."""

_ELSEWHERE: Final = "not on this wire; use /v1/chat/completions"
_THINKING: Final = "use thinking"
_FORM: Final = "use output_config.format"
_SYSTEM: Final = "use system"
_MESSAGES: Final = "send the conversation in messages"

OTHER_WIRES: Final[dict[str, Field]] = {
    **FOREIGN,
    **dict.fromkeys(
        (
            "client_metadata", "generate_summary", "image", "max_tool_calls", "prediction",
            "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
            "safety_identifier", "store", "stream_options", "user",
        ),
        IGNORED,
    ),
    **dict.fromkeys(
        (
            "ebnf", "format", "grammar", "guided_choice", "guided_grammar", "guided_json",
            "guided_regex", "json_schema", "regex", "structured_outputs", "text",
        ),
        refused(_FORM, "", {}),
    ),
    **dict.fromkeys(("enable_thinking", "think", "thinking_token_budget"), refused(_THINKING)),
    **dict.fromkeys(("input", "prompt"), refused(_MESSAGES, "", [])),
    **dict.fromkeys(("conversation", "previous_response_id"), refused(_MESSAGES)),
    "access_programs": refused("there are no such programs here"),
    "add_special_tokens": refused("the template adds them", False),
    "allowed_token_ids": refused("tokens cannot be excluded", []),
    "audio": refused("this server writes text only"),
    "best_of": refused("a message has one answer", 1),
    "chat_template_kwargs": refused(_THINKING, {}),
    "frequency_penalty": refused(_ELSEWHERE, 0, 0.0),
    "function_call": refused("use tool_choice", "none", "auto"),
    "functions": refused("use tools", []),
    "ignore_eos": refused(_ELSEWHERE, False),
    "include": refused("nothing can be included", []),
    "instructions": refused(_SYSTEM, ""),
    "logit_bias": refused(_ELSEWHERE, {}),
    "logprobs": refused(_ELSEWHERE, False, 0),
    "max_completion_tokens": refused("use max_tokens"),
    "max_output_tokens": refused("use max_tokens"),
    "min_p": refused(_ELSEWHERE, 0, 0.0),
    "min_tokens": refused("a least number of tokens cannot be enforced", 0),
    "modalities": refused("this server writes text only", ["text"]),
    "moderation": refused("this server moderates nothing"),
    "n": refused("a message has one answer", 1),
    "parallel_tool_calls": refused("use tool_choice.disable_parallel_tool_use", True),
    "presence_penalty": refused(_ELSEWHERE, 0, 0.0),
    "prompt_logprobs": refused("use echo with logprobs on /v1/completions", 0),
    "random_seed": refused(_ELSEWHERE),
    "raw": refused("use /v1/completions for a prompt without a template", False),
    "reasoning": refused(_THINKING, {}),
    "reasoning_effort": refused("use output_config.effort"),
    "repeat_penalty": refused(_ELSEWHERE, 1, 1.0),
    "repetition_penalty": refused(_ELSEWHERE, 1, 1.0),
    "response_format": refused(_FORM, {"type": "text"}),
    "safe_prompt": refused(_SYSTEM, False),
    "seed": refused(_ELSEWHERE),
    "stop": refused("use stop_sequences", "", []),
    "stop_token_ids": refused("answers are cut at texts only: use stop_sequences", []),
    "suffix": refused("this model completes at the end only", ""),
    "top_logprobs": refused(_ELSEWHERE, 0),
    "truncation": refused("input is never truncated", "disabled"),
    "verbosity": refused("this model has no such setting", "medium"),
    "web_search_options": refused("this server searches nothing"),
}  # fmt: skip
"""Fields of other wires and servers: what would change an answer is refused by name."""
