"""What a body of POST /v1/messages asks for, in the terms of every wire.

Translates; decides nothing about models. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from semantic.adapters.http.anthropic.conversation import (
    ConversationReader,
    read_choice,
    read_tools,
)
from semantic.adapters.http.anthropic.sdk_types import SdkTypes, object_at
from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.logs import WarnOnce
from semantic.adapters.http.request_body import validated
from semantic.domain.chat import AnswerFormat, Chat
from semantic.domain.value_objects import SamplingParams

if TYPE_CHECKING:
    from anthropic.types.beta import BetaThinkingConfigParam
    from anthropic.types.beta.message_count_tokens_params import MessageCountTokensParams
    from anthropic.types.beta.message_create_params import MessageCreateParamsBase

SUPPORTED: Final = frozenset({
    "max_tokens", "messages", "model", "output_config", "output_format", "stop_sequences",
    "stream", "system", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_p",
})  # fmt: skip
"""They do what they are documented to do."""

EXTENSIONS: Final = frozenset({"agent_id"})

IGNORED: Final[Mapping[str, str]] = {
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

_MIN_TOP_P: Final = 1e-9
"""Of 0 the likeliest token alone is meant; in `SamplingParams` 0 means off."""
_MIN_TEMPERATURE: Final = 1e-6
"""Below it the likeliest token alone is meant, too: in fp32 it has no reciprocal."""
_MAX_STOPS: Final = 64
"""All of them are looked for at each token, where other answers wait."""
_MIN_BUDGET: Final = 1024
_EFFORTS: Final = {"xhigh": "high", "max": "high"}
"""Templates know no more than high."""


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A message that was asked for.

    `max_tokens` is 0 when only the prompt is to be computed. `omit_thinking`: the client
    wants to know that there were thoughts, not what they were. `report_context_edits`: it asked for
    edits of the context and wants to be told which were applied.
    """

    chat: Chat
    sampling: SamplingParams
    max_tokens: int
    stream: bool
    omit_thinking: bool = False
    report_context_edits: bool = False


def read_request(
    sdk: SdkTypes, body: Mapping[str, object], sampling: SamplingParams, warnings: WarnOnce
) -> MessageRequest:
    """What `body` asks for; what it does not say is as in `sampling`.

    Raises InvalidRequestError naming the first field that is wrong.
    """
    check_fields(body, warnings)
    body = _without_nulls(body)
    params = validated(sdk.create, body)
    max_tokens = params["max_tokens"]
    if max_tokens < 0:
        raise FieldError(f"max_tokens: expected 0 or more, got {max_tokens}", param="max_tokens")
    thinking = params.get("thinking")
    _check_budget(thinking)
    return MessageRequest(
        _chat(sdk, body, params, warnings),
        _sampling(body, tuple(params.get("stop_sequences") or ()), sampling),
        max_tokens,
        _stream(body),
        omit_thinking=thinking is not None and thinking.get("display") == "omitted",
        report_context_edits=params.get("context_management") is not None,
    )


def read_chat(sdk: SdkTypes, body: Mapping[str, object], warnings: WarnOnce) -> Chat:
    """The conversation of a body of POST /v1/messages/count_tokens. Raises as `read_request`."""
    check_fields(body, warnings)
    body = _without_nulls(body)
    return _chat(sdk, body, validated(sdk.count, body), warnings)


def _without_nulls(body: Mapping[str, object]) -> Mapping[str, object]:
    """`body` without its nulls: clients write one for a field that they do not give."""
    return {name: value for name, value in body.items() if value is not None}


def _chat(
    sdk: SdkTypes,
    body: Mapping[str, object],
    params: MessageCreateParamsBase | MessageCountTokensParams,
    warnings: WarnOnce,
) -> Chat:
    tools = read_tools(sdk, body.get("tools"), warnings)
    choice, parallel = read_choice(params.get("tool_choice"), tools)
    reader = ConversationReader(sdk)
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


def _template_options(
    thinking: BetaThinkingConfigParam | None, effort: str | None
) -> Mapping[str, object]:
    options: dict[str, object] = {}
    if thinking is not None:
        options["enable_thinking"] = thinking["type"] != "disabled"
    if effort is not None:
        options["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return options


def _check_budget(thinking: BetaThinkingConfigParam | None) -> None:
    """A budget is a hint to the model; one that is documented to be refused is refused."""
    if thinking is not None and thinking["type"] == "enabled":
        budget = thinking["budget_tokens"]
        if budget < _MIN_BUDGET:
            raise FieldError(
                f"thinking.budget_tokens: expected at least {_MIN_BUDGET}, got {budget}",
                param="thinking.budget_tokens",
            )


def _answer_format(body: Mapping[str, object]) -> AnswerFormat | None:
    """What `output_config.format`, or `output_format` of older clients, asks for."""
    output = body.get("output_config")
    path = "output_format"
    output_format = body.get(path)
    if output_format is None and output is not None:
        path = "output_config.format"
        output_format = object_at(output, "output_config").get("format")
    if output_format is None:
        return None
    found = object_at(output_format, path)
    if found.get("type") != "json_schema":
        raise FieldError(f"{path}.type: expected json_schema", param=f"{path}.type")
    return AnswerFormat(object_at(found.get("schema"), f"{path}.schema"))


def _sampling(
    body: Mapping[str, object], stop: tuple[str, ...], sampling: SamplingParams
) -> SamplingParams:
    """`sampling` with what the body says. The SDK's newest types do not name all of it."""
    if len(stop) > _MAX_STOPS:
        raise FieldError(
            f"stop_sequences: expected {_MAX_STOPS} texts at most, got {len(stop)}",
            param="stop_sequences",
        )
    if "" in stop:
        raise FieldError(
            "stop_sequences: expected texts that are not empty", param="stop_sequences"
        )
    temperature = _number(body, "temperature")
    if temperature is not None and temperature < _MIN_TEMPERATURE:
        temperature = 0
    top_p = _number(body, "top_p")
    top_k = _whole(body, "top_k")
    return replace(
        sampling,
        stop=stop or sampling.stop,
        temperature=sampling.temperature if temperature is None else temperature,
        top_p=sampling.top_p if top_p is None else max(top_p, _MIN_TOP_P),
        top_k=sampling.top_k if top_k is None else top_k,
    )


def _number(body: Mapping[str, object], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise FieldError(f"{name}: expected a number from 0 to 1, got {value!r:.80}", param=name)
    return float(value)


def _whole(body: Mapping[str, object], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise FieldError(f"{name}: expected a whole number, got {value!r:.80}", param=name)
    return value


def _stream(body: Mapping[str, object]) -> bool:
    value = body.get("stream")
    if value is not None and not isinstance(value, bool):
        raise FieldError(f"stream: expected true or false, got {value!r:.80}", param="stream")
    return bool(value)


def check_fields(body: Mapping[str, object], warnings: WarnOnce) -> None:
    """Warn of fields that nobody knows. Raises FieldError for one that cannot be served."""
    for name, value in body.items():
        if name in REFUSED and value:
            raise FieldError(f"{name}: {REFUSED[name]}", param=name)
        if not (name in SUPPORTED or name in EXTENSIONS or name in IGNORED or name in REFUSED):
            shown = repr(name[:_LONGEST_NAME])
            warnings.warn(f"/v1/messages: the field {shown} is not known and has no effect")
