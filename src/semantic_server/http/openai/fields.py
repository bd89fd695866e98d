"""Tables of every field of OpenAI's APIs. Each field is supported, ignored or refused."""

from __future__ import annotations

from typing import Final, TypeVar

from semantic_server.http.logs import WarnOnce
from semantic_server.http.request_fields.table import (
    FOREIGN,
    IGNORED,
    SUPPORTED,
    Field,
    WireFields,
    ignored,
    refused,
    supported,
)

T = TypeVar("T")

Json = dict[str, object]
"""A JSON object."""

warnings: Final = WarnOnce()


_SHARED: Final[dict[str, Field]] = {
    **supported(
        "model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop "
        "stream stream_options temperature top_p"
    ),
    "user": IGNORED,
}

_EXTENSIONS: Final[dict[str, Field]] = {
    **supported("agent_id ignore_eos min_p repetition_penalty semantic top_k"),
    "min_tokens": refused("this server cannot enforce a minimum of tokens", 0),
}
"""Fields outside of OpenAI's API that clients of local servers send."""

CONSTRAINTS: Final = (
    "guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs",
)  # fmt: skip
"""Fields of vLLM that constrain an answer."""

CHAT_FIELDS: Final[dict[str, Field]] = {
    **_SHARED,
    **_EXTENSIONS,
    **dict.fromkeys(CONSTRAINTS, SUPPORTED),
    "add_special_tokens": refused("the template adds them", False),
    "audio": refused("this server writes text only"),
    **supported(
        "chat_template_kwargs max_completion_tokens messages parallel_tool_calls reasoning "
        "prediction reasoning_effort response_format tool_choice tools top_logprobs"
    ),
    "function_call": refused("deprecated: use tool_choice"),
    "functions": refused("deprecated: use tools"),
    **ignored(
        "metadata prompt_cache_key prompt_cache_options prompt_cache_retention "
        "safety_identifier service_tier store"
    ),
    "modalities": refused("this server writes text only", ["text"]),
    "moderation": refused("this server has no moderation"),
    "verbosity": refused("this model has no such setting", "medium"),
    "web_search_options": refused("this server has no web search"),
}

CHAT_REASONING_FIELDS: Final[dict[str, Field]] = {
    **supported("effort enabled max_tokens"),
    "exclude": refused("replies always have reasoning", False),
}
"""Members of `reasoning`, which clients of many servers send."""

COMPLETION_FIELDS: Final[dict[str, Field]] = {
    **_SHARED,
    **_EXTENSIONS,
    **dict.fromkeys(CONSTRAINTS, SUPPORTED),
    "add_special_tokens": refused("send token ids for a prompt without them", True),
    **supported("best_of echo prompt"),
    "suffix": refused("this model can only append to text", ""),
}

EMBEDDING_FIELDS: Final[dict[str, Field]] = {
    **supported("dimensions encoding_format input model semantic"),
    "user": IGNORED,
}

RERANK_FIELDS: Final[dict[str, Field]] = {
    **supported("documents model query return_documents semantic top_n"),
    **dict.fromkeys(
        ("max_chunks_per_doc", "max_tokens_per_doc"), refused("this server never cuts documents")
    ),
    "rank_fields": refused("only the text of a document counts", ["text"]),
    "return_embeddings": refused("use /v1/embeddings", False),
    "top_k": refused("use top_n"),
    "user": IGNORED,
}

STRUCTURED_FIELDS: Final[dict[str, Field]] = {
    **supported("choice grammar json json_object regex"),
    "disable_additional_properties": refused("the server enforces a schema as it is", False),
    "disable_any_whitespace": refused("JSON may have white space", False),
    "disable_fallback": IGNORED,
    "structural_tag": refused("not supported; use strict tools"),
    "whitespace_pattern": refused("clients cannot set white space in JSON"),
}
"""Members of `structured_outputs`."""

_THINKING: Final = "use reasoning_effort, or enable_thinking in chat_template_kwargs"
_FORM: Final = "use response_format or structured_outputs"

OTHER_SERVERS: Final[dict[str, Field]] = {
    **FOREIGN,
    "allowed_token_ids": refused("use logit_bias", []),
    "ebnf": refused(_FORM),
    "prompt_logprobs": refused("use echo with logprobs on /v1/completions", 0),
    "regex": refused(_FORM),
    "stop_token_ids": refused("answers stop only at texts: use stop", []),
    "format": refused(_FORM, ""),
    "raw": refused("use /v1/completions for a prompt without a template", False),
    "system": refused("send a message with the role system", ""),
    "think": refused(_THINKING),
    "grammar": refused(_FORM, ""),
    "json_schema": refused(_FORM),
    "repeat_penalty": refused("use repetition_penalty", 1, 1.0),
    "enable_thinking": refused(_THINKING),
    "random_seed": refused("use seed"),
    "reasoning": refused(_THINKING, {}),
    "safe_prompt": refused("send a message with the role system", False),
    "thinking": refused(_THINKING, {}),
    # Other routes of this server
    **dict.fromkeys(CONSTRAINTS, refused("use text.format")),
    "input": refused("a field of /v1/responses"),
    "instructions": refused("a field of /v1/responses"),
    "logprobs": refused("use include and top_logprobs", False),
    "max_completion_tokens": refused("use max_tokens, or max_output_tokens on /v1/responses"),
    "max_output_tokens": refused("use max_tokens"),
    "max_tokens": refused("use max_output_tokens"),
    "messages": refused("a field of /v1/chat/completions"),
    "n": refused("a response has one answer", 1),
    "prompt": refused("a field of /v1/completions"),
    "reasoning_effort": refused("use reasoning.effort"),
    "response_format": refused("use structured_outputs, or text.format on /v1/responses"),
    "stop_sequences": refused("use stop", []),
    "tool_choice": refused("a field of /v1/chat/completions", "none", "auto"),
    "tools": refused("a field of /v1/chat/completions", []),
}
"""Fields of other servers or routes."""

STREAM_OPTION_FIELDS: Final[dict[str, Field]] = {
    "continuous_usage_stats": SUPPORTED,
    "include_obfuscation": refused("this server does not obfuscate chunks", False),
    "include_usage": SUPPORTED,
}


CHECKED_BY_ELEMENT: Final = frozenset(
    {"messages", "prompt", "response_format", "stop", "tool_choice", "tools", *CONSTRAINTS}
)


known_fields: Final = WireFields(OTHER_SERVERS, warnings).known
