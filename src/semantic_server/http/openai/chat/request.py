"""The body of a chat completion, parsed into one engine request per choice.

Validates every field before anything is generated. Knows the wire's fields; not its replies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from semantic.domain.chat import Chat
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, ServedModel
from semantic_server.http.errors import FieldError
from semantic_server.http.openai.chat.conversation import (
    answer_format_of,
    choice_among,
    messages_of,
    template_options,
    tools_of,
)
from semantic_server.http.openai.fields import (
    CHAT_FIELDS,
    CHAT_REASONING_FIELDS,
    at_least_one,
    known_fields,
    object_at,
    tokens_at,
    without_elements,
)
from semantic_server.http.openai.requests import (
    Caller,
    StreamOptions,
    check_model,
    choices_of,
    constraint_of,
    number_of_choices,
    sampling_of,
    stream_options,
)
from semantic_server.http.openai.validators import ChatBody, chat_adapter
from semantic_server.http.request_body import validated
from semantic_server.http.request_fields.client_tools import CUSTOM

_MAX_TOP_LOGPROBS: Final = 20
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completion: one engine request per choice, and how to reply.

    `custom` are the names of custom tools.
    """

    choices: tuple[Ask, ...]
    options: StreamOptions
    custom: frozenset[str] = frozenset()


def chat_request(body: Mapping[str, object], model: ServedModel, caller: Caller) -> ChatRequest:
    """Parse `body`. Raises InvalidRequestError and ModelNotFoundError."""
    known = known_fields(body, CHAT_FIELDS)
    checked = validated(chat_adapter(), without_elements(known))
    check_model(checked["model"], model)
    sampling = sampling_of(checked, known.get("stop"), model)
    sampling = _with_logprobs(sampling, checked)
    chat = _chat(checked, known)
    choices = choices_of(
        [chat],
        number_of_choices(checked.get("n")),
        sampling,
        _max_tokens(checked),
        caller,
        _reasoning(known).thinking_tokens,
    )
    custom = frozenset(tool.name for tool in chat.tools if tool.kind == CUSTOM)
    return ChatRequest(choices, stream_options(known, force_usage=caller.force_usage), custom)


def conversation_of(body: Mapping[str, object]) -> Chat:
    """The conversation of a body with the fields of a chat completion, of which only `messages` is
    required. Raises InvalidRequestError."""
    known = known_fields(body, CHAT_FIELDS)
    return _chat(validated(chat_adapter(), {"model": "", **without_elements(known)}), known)


def _chat(checked: ChatBody, known: Mapping[str, object]) -> Chat:
    """The conversation, from the validated body and the fields that are validated by element."""
    tools = tools_of(known.get("tools", []))
    tools, choice = choice_among(tools, known.get("tool_choice"))
    reasoning = _reasoning(known)
    return Chat(
        messages_of(known["messages"]),
        tools,
        choice,
        parallel_tool_calls=checked.get("parallel_tool_calls", True),
        answer_format=constraint_of(known) or answer_format_of(known.get("response_format")),
        template_options=template_options(
            checked.get("reasoning_effort") or reasoning.effort,
            checked.get("chat_template_kwargs", {}),
            reasoning.thinking_tokens,
        ),
    )


class _Reasoning(NamedTuple):
    effort: str | None
    thinking_tokens: int | None


def _reasoning(known: Mapping[str, object]) -> _Reasoning:
    """The field `reasoning`."""
    given = object_at("reasoning", known.get("reasoning", {}))
    fields = known_fields(given, CHAT_REASONING_FIELDS, "reasoning.")
    effort = fields.get("effort")
    if effort is not None and effort not in _EFFORTS:
        path = "reasoning.effort"
        raise FieldError(f"{path}: expected one of {', '.join(_EFFORTS)}", param=path)
    if fields.get("enabled") is False:
        return _Reasoning("none", None)
    tokens = tokens_at("reasoning.max_tokens", fields.get("max_tokens"))
    return _Reasoning(effort if isinstance(effort, str) else None, tokens)


def _max_tokens(body: ChatBody) -> int | None:
    older = at_least_one("max_tokens", body.get("max_tokens"))
    newer = at_least_one("max_completion_tokens", body.get("max_completion_tokens"))
    return older if newer is None else newer


def _with_logprobs(sampling: SamplingParams, body: ChatBody) -> SamplingParams:
    top = body.get("top_logprobs")
    if not body.get("logprobs"):
        if top:
            raise FieldError("top_logprobs: expected logprobs to be true", param="top_logprobs")
        return sampling
    top = 0 if top is None else top
    if not 0 <= top <= _MAX_TOP_LOGPROBS:
        raise FieldError(
            f"top_logprobs must be between 0 and {_MAX_TOP_LOGPROBS}, got {top}",
            param="top_logprobs",
        )
    return replace(sampling, logprobs=top)
