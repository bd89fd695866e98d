"""Translates the fields of POST /v1/messages to the domain's types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from semantic.domain.chat import AnswerFormat, Chat
from semantic.domain.value_objects import SamplingParams
from semantic_server.http.anthropic.conversation import ConversationReader, read_choice, read_tools
from semantic_server.http.anthropic.request_types import MessageCountTokensParams
from semantic_server.http.anthropic.validators import MessageBody, ThinkingConfig, Validators
from semantic_server.http.errors import FieldError
from semantic_server.http.logs import WarnOnce
from semantic_server.http.request_body import validated
from semantic_server.http.request_fields.table import (
    FOREIGN,
    IGNORED,
    SUPPORTED,
    Field,
    fields_of,
    ignored,
    mapping_at,
    refused,
    supported,
)

MESSAGE_FIELDS: Final[dict[str, Field]] = {
    "betas": IGNORED,  # their features are always on, or set by other fields
    **ignored(
        "billing_policy diagnostics fallback_credit_token inference_geo service_tier speed "
        "user_profile_id"
    ),
    "cache_control": IGNORED,  # the server caches all prompts
    "compaction": refused("this server does not summarize conversations"),
    "container": refused("this server runs no code"),
    "context_management": SUPPORTED,  # the server applies no edit, and its reply says so
    "fallbacks": IGNORED,  # the only model never declines
    **supported(
        "max_tokens messages model output_config stop_sequences stream system thinking "
        "tool_choice tools"
    ),
    "mcp_servers": refused("this server calls no MCP servers", []),
    "metadata": IGNORED,  # its user_id may identify the session
    "thread": refused("this server keeps no messages: send all of them (it keeps their KV cache)"),
    "workspace_id": IGNORED,  # the API key alone determines the tenant
    # Older versions of the SDK
    **supported("output_format temperature top_k top_p"),
    # Outside of Anthropic's API; clients send them.
    "agent_id": SUPPORTED,
    "anthropic_beta": IGNORED,
    "anthropic_version": IGNORED,
    "semantic": SUPPORTED,
}
"""Fields of a message request."""

_ELSEWHERE: Final = "not in this API; use /v1/chat/completions"
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
    "access_programs": refused("this server has no such programs"),
    "add_special_tokens": refused("the template adds them", False),
    "allowed_token_ids": refused("this server cannot exclude tokens", []),
    "audio": refused("this server writes text only"),
    "best_of": refused("a message has one answer", 1),
    "chat_template_kwargs": refused(_THINKING, {}),
    "frequency_penalty": refused(_ELSEWHERE, 0, 0.0),
    "function_call": refused("use tool_choice", "none", "auto"),
    "functions": refused("use tools", []),
    "ignore_eos": refused(_ELSEWHERE, False),
    "include": refused("this server has nothing to include", []),
    "instructions": refused(_SYSTEM, ""),
    "logit_bias": refused(_ELSEWHERE, {}),
    "logprobs": refused(_ELSEWHERE, False, 0),
    "max_completion_tokens": refused("use max_tokens"),
    "max_output_tokens": refused("use max_tokens"),
    "min_p": refused(_ELSEWHERE, 0, 0.0),
    "min_tokens": refused("this server cannot enforce a minimum of tokens", 0),
    "modalities": refused("this server writes text only", ["text"]),
    "moderation": refused("this server has no moderation"),
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
    "stop_token_ids": refused("answers stop only at texts: use stop_sequences", []),
    "suffix": refused("this model can only append to text", ""),
    "top_logprobs": refused(_ELSEWHERE, 0),
    "truncation": refused("this server never truncates input", "disabled"),
    "verbosity": refused("this model has no such setting", "medium"),
    "web_search_options": refused("this server has no web search"),
}  # fmt: skip
"""Fields of other APIs and servers, which this API handles too."""


_MAX_STOPS: Final = 64
"""The maximum number of stop sequences. The server compares each token with all of them."""
_MIN_BUDGET: Final = 1024
_EFFORTS: Final = {"xhigh": "high", "max": "high"}
"""The effort that a chat template gets. Templates know no effort above high."""


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A parsed message request. If `max_tokens` is 0, the server computes only the prompt.
    `thinking_tokens` limits reasoning. None sets no limit."""

    chat: Chat
    sampling: SamplingParams
    max_tokens: int
    stream: bool
    thinking_tokens: int | None = None
    omit_thinking: bool = False
    report_context_edits: bool = False


def read_request(
    validators: Validators,
    body: Mapping[str, object],
    sampling: SamplingParams,
    warnings: WarnOnce,
    *,
    interleaved: bool = False,
) -> MessageRequest:
    """Parse `body`, with defaults from `sampling`. `interleaved` allows thinking between tool
    calls. Raises InvalidRequestError for the first invalid field."""
    body = fields_of(body, MESSAGE_FIELDS, OTHER_WIRES, warnings)
    params = validated(validators.create, body)
    max_tokens = params["max_tokens"]
    if max_tokens < 0:
        raise FieldError(f"max_tokens: expected 0 or more, got {max_tokens}", param="max_tokens")
    thinking = params.get("thinking")
    budget = _budget(thinking)
    if budget is not None and not interleaved and 0 < max_tokens <= budget:
        raise FieldError(
            f"thinking.budget_tokens: expected less than max_tokens ({max_tokens}), got {budget}",
            param="thinking.budget_tokens",
        )
    return MessageRequest(
        _chat(validators, body, params, warnings),
        _sampling(params, sampling),
        max_tokens,
        params.get("stream", False),
        thinking_tokens=budget,
        omit_thinking=thinking is not None and thinking.get("display") == "omitted",
        report_context_edits=params.get("context_management") is not None,
    )


def read_chat(validators: Validators, body: Mapping[str, object], warnings: WarnOnce) -> Chat:
    """Return the conversation to count the tokens of. Raises the same errors as `read_request`."""
    body = fields_of(body, MESSAGE_FIELDS, OTHER_WIRES, warnings)
    return _chat(validators, body, validated(validators.count, body), warnings)


def _chat(
    validators: Validators,
    body: Mapping[str, object],
    params: MessageBody | MessageCountTokensParams,
    warnings: WarnOnce,
) -> Chat:
    tools = read_tools(validators, body.get("tools"), warnings)
    choice, parallel = read_choice(params.get("tool_choice"), tools)
    reader = ConversationReader(validators)
    messages = reader.read(body)
    output = params.get("output_config") or {}
    return Chat(
        messages,
        tools,
        choice,
        parallel,
        _answer_format(body),
        _template_options(params.get("thinking"), reader.effort or output.get("effort")),
    )


def _template_options(thinking: ThinkingConfig | None, effort: str | None) -> Mapping[str, object]:
    options: dict[str, object] = {}
    if thinking is not None:
        options["enable_thinking"] = thinking["type"] != "disabled"
    if effort is not None:
        options["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return options


def _budget(thinking: ThinkingConfig | None) -> int | None:
    if thinking is None or thinking["type"] != "enabled":
        return None
    budget = thinking["budget_tokens"]
    if budget < _MIN_BUDGET:
        raise FieldError(
            f"thinking.budget_tokens: expected at least {_MIN_BUDGET}, got {budget}",
            param="thinking.budget_tokens",
        )
    return budget


def _answer_format(body: Mapping[str, object]) -> AnswerFormat | None:
    """Return the answer's required format. Older clients send it as `output_format`."""
    output = body.get("output_config")
    path = "output_format"
    output_format = body.get(path)
    if output_format is None and output is not None:
        path = "output_config.format"
        output_format = mapping_at("output_config", output).get("format")
    if output_format is None:
        return None
    found = mapping_at(path, output_format)
    if found.get("type") != "json_schema":
        raise FieldError(f"{path}.type: expected json_schema", param=f"{path}.type")
    return AnswerFormat(mapping_at(f"{path}.schema", found.get("schema")))


def _sampling(params: MessageBody, sampling: SamplingParams) -> SamplingParams:
    stop = tuple(params.get("stop_sequences") or ())
    if len(stop) > _MAX_STOPS:
        raise FieldError(
            f"stop_sequences must have at most {_MAX_STOPS} strings, got {len(stop)}",
            param="stop_sequences",
        )
    if "" in stop:
        raise FieldError("stop_sequences must not have empty strings", param="stop_sequences")
    return replace(
        sampling,
        stop=stop or sampling.stop,
        temperature=params.get("temperature", sampling.temperature),
        top_p=params.get("top_p", sampling.top_p),
        top_k=params.get("top_k", sampling.top_k),
    )
