"""Parses the body of a response's request. Prepends the previous responses to its input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Final

from semantic.domain.chat import AnswerFormat, Chat, Message, Tool
from semantic.domain.errors import InvalidRequestError
from semantic.domain.responses import StoredResponse
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, ServedModel
from semantic.ports.store import ResponsesPort
from semantic_server.http.errors import FieldError, WireError
from semantic_server.http.openai.conversation import template_options
from semantic_server.http.openai.fields import Json, known_fields, warnings
from semantic_server.http.openai.requests import Caller, check_model, sampling_of
from semantic_server.http.openai.responses.input_items import ResponseInput, input_of
from semantic_server.http.openai.responses.output_items import KeptItems
from semantic_server.http.openai.responses.tools import Choice, ToolSet, choice_among
from semantic_server.http.openai.validators import (
    ResponseBody,
    response_adapter,
    text_format_adapters,
)
from semantic_server.http.request_body import validated
from semantic_server.http.request_fields.table import (
    IGNORED,
    SUPPORTED,
    Field,
    at_least_one,
    ignored,
    list_at,
    object_at,
    supported,
    text_at,
    tokens_at,
    validated_by_type,
)


class ResponseGoneError(InvalidRequestError):
    """The store does not have a referenced response."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"no response {response_id!r:.200}")
        self.response_id = response_id


@dataclass(frozen=True, slots=True)
class History:
    """The conversation up to a stored response, with its last agent and its tools."""

    messages: tuple[Message, ...]
    agent: str
    tools: tuple[Tool, ...]


def history_of(responses: ResponsesPort, tenant: str, response_id: str) -> History:
    """Return the history that ends with `response_id`. Raises ResponseGoneError if a response is
    not stored, and StoreError if the read fails."""
    chain = _chain(responses, tenant, response_id)
    tools = {tool.name: tool for one in chain for tool in one.tools}
    messages = [message for one in chain for message in (*one.input, *one.output)]
    return History(tuple(messages), chain[-1].agent, tuple(tools.values()))


def _chain(responses: ResponsesPort, tenant: str, response_id: str) -> list[StoredResponse]:
    found: list[StoredResponse] = []
    seen: set[str] = set()
    at: str | None = response_id
    while at is not None:
        one = None if at in seen else responses.get(tenant, at)
        if one is None:
            raise ResponseGoneError(at)
        seen.add(at)
        found.append(one)
        at = one.previous
    return found[::-1]


RESPONSE_FIELDS: Final[dict[str, Field]] = {
    "access_programs": Field("this server has no such programs"),
    "background": Field("this server has no background answers", (False,)),
    "context_management": Field("this server does not shorten histories", ([],)),
    "conversation": Field("this server keeps no conversations; use previous_response_id"),
    **ignored(
        "image max_tool_calls metadata prompt_cache_key prompt_cache_retention "
        "safety_identifier service_tier user"
    ),
    **supported(
        "include input instructions max_output_tokens model parallel_tool_calls "
        "previous_response_id prompt_cache_options reasoning store stream stream_options "
        "temperature text tool_choice tools top_logprobs top_p"
    ),
    "moderation": Field("this server has no moderation"),
    "prompt": Field("this server keeps no prompts; send the text itself"),
    "truncation": Field("this server never truncates input", ("disabled",)),
    # Outside of OpenAI's API; clients send them.
    **supported(
        "agent_id chat_template_kwargs frequency_penalty ignore_eos logit_bias min_p "
        "presence_penalty repetition_penalty seed semantic stop top_k"
    ),
    "client_metadata": IGNORED,
    "min_tokens": Field("this server cannot enforce a minimum of tokens", (0,)),
}
"""Fields of the body of POST /v1/responses."""

REASONING_FIELDS: Final[dict[str, Field]] = {
    "context": Field("the model's template decides which thoughts stay", ("auto",)),
    "effort": SUPPORTED,
    "generate_summary": IGNORED,
    "max_tokens": SUPPORTED,
    "mode": Field("this server has one mode only", ("standard",)),
    "summary": IGNORED,
}
"""Members of `reasoning`."""

TEXT_FIELDS: Final[dict[str, Field]] = {
    "format": SUPPORTED,
    "verbosity": Field("this model has no such setting", ("medium",)),
}

CACHE_OPTION_FIELDS: Final[dict[str, Field]] = {
    **ignored("comparison_response_id mode ttl"),
    "prewarm": Field("this server computes no prompt without an answer", (False,)),
}
"""Members of `prompt_cache_options`. The server caches every prompt anyway."""

STREAM_OPTION_FIELDS: Final[dict[str, Field]] = {
    "include_obfuscation": Field("this server does not obfuscate events", (False,))
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
"""Fields that have their own validation, so that an error names the element of a list."""


_MAX_TOP_LOGPROBS: Final = 20
_FORMAT: Final = "text.format"

_ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDE_WITHOUT_EFFECT: Final = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Values of `include` that have no effect on this server's responses."""


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A request for a response. `input` excludes previous responses. `reply_fields` are the fields
    that the reply repeats."""

    ask: Ask
    input: ResponseInput
    tools: ToolSet
    reply_fields: Json
    previous_response_id: str | None = None
    stream: bool = False
    store: bool = True
    encrypted_reasoning: bool = False
    logprobs: bool = False


def response_request(
    body: Mapping[str, object], model: ServedModel, caller: Caller, store: ResponsesPort
) -> ResponseRequest:
    """Parse `body`. May block on `store`. Raises InvalidRequestError, ModelNotFoundError, and
    WireError if `store` lacks a referenced response."""
    known = known_fields(body, RESPONSE_FIELDS)
    checked = validated(
        response_adapter(),
        {name: value for name, value in known.items() if name not in CHECKED_BY_ELEMENT},
    )
    if "model" not in checked:
        raise FieldError("model must be a model's name", param="model")
    check_model(checked["model"], model)
    stored = _stored(checked, keep=caller.keep)
    include = _include(known.get("include", []))
    reasoning, stream = _checked_objects(known)
    sampling = sampling_of(checked, known.get("stop"), model)
    sampling = _with_logprobs(sampling, checked, included=_LOGPROBS in include)
    max_tokens = at_least_one("max_output_tokens", checked.get("max_output_tokens"))
    previous = checked.get("previous_response_id")
    tools = ToolSet()
    tools.add_requested("tools", known.get("tools", []))
    own_input = input_of(known.get("input"), tools, KeptItems(store, caller.tenant))
    history = None if previous is None else _history(store, caller.tenant, previous)
    if history is not None:
        tools.add_previous(history.tools)
    choice = choice_among(tools, known.get("tool_choice"))
    text = _text_format(known.get("text"))
    effort = reasoning.get("effort")
    thinking_tokens = tokens_at("reasoning.max_tokens", reasoning.get("max_tokens"))
    chat = Chat(
        _messages(checked.get("instructions"), history, own_input),
        choice.tools,
        choice.choice,
        parallel_tool_calls=checked.get("parallel_tool_calls") is not False,
        answer_format=text.answer_format,
        template_options=template_options(
            effort if isinstance(effort, str) else None,
            object_at("chat_template_kwargs", known.get("chat_template_kwargs", {})),
            thinking_tokens,
        ),
    )
    ask = Ask(
        chat,
        sampling,
        max_tokens,
        caller.agent or (None if history is None else history.agent),
        caller.tenant,
        caller.identity,
        thinking_tokens,
        caller.keep,
        hints=caller.hints,
    )
    return ResponseRequest(
        ask,
        own_input,
        tools,
        _reply_fields(checked, chat, sampling, tools, choice, text, reasoning) | {"store": stored},
        previous,
        stream=stream,
        store=stored,
        encrypted_reasoning=_ENCRYPTED_REASONING in include,
        logprobs=sampling.logprobs is not None,
    )


def _stored(body: ResponseBody, *, keep: bool) -> bool:
    given = body.get("store")
    if given and not keep:
        raise FieldError("store must be false or missing: keep is false", param="store")
    return keep and given is not False


def _include(value: object) -> frozenset[str]:
    found = [text_at(f"include[{i}]", one) for i, one in enumerate(list_at("include", value))]
    for one in found:
        if one not in _INCLUDE_WITHOUT_EFFECT | {_ENCRYPTED_REASONING, _LOGPROBS}:
            warnings.warn(f"unknown include {one!a:.80} has no effect")
    return frozenset(found)


def _checked_objects(known: Mapping[str, object]) -> tuple[Json, bool]:
    reasoning: Json = {}
    for name, table in (
        ("reasoning", REASONING_FIELDS),
        ("prompt_cache_options", CACHE_OPTION_FIELDS),
        ("stream_options", STREAM_OPTION_FIELDS),
    ):
        nested = known_fields(object_at(name, known.get(name, {})), table, f"{name}.")
        if name == "reasoning":
            reasoning = nested
    stream = known.get("stream") is True
    if "stream_options" in known and not stream:
        raise FieldError("stream_options requires stream to be true", param="stream_options")
    return reasoning, stream


def _with_logprobs(
    sampling: SamplingParams, body: ResponseBody, *, included: bool
) -> SamplingParams:
    top = body.get("top_logprobs") or 0
    if not 0 <= top <= _MAX_TOP_LOGPROBS:
        raise FieldError(
            f"top_logprobs must be between 0 and {_MAX_TOP_LOGPROBS}, got {top}",
            param="top_logprobs",
        )
    return replace(sampling, logprobs=top) if included or top else sampling


def _history(store: ResponsesPort, tenant: str, previous: str) -> History:
    try:
        return history_of(store, tenant, previous)
    except ResponseGoneError as error:
        message = f"Previous response with id {previous!r:.200} not found."
        if error.response_id != previous:
            message = (
                f"The history of response {previous!r:.200} is incomplete: response "
                f"{error.response_id!r:.200} not found."
            )
        raise WireError(
            HTTPStatus.BAD_REQUEST,
            message,
            param="previous_response_id",
            code="previous_response_not_found",
        ) from error


def _messages(
    instructions: str | None, history: History | None, own_input: ResponseInput
) -> tuple[Message, ...]:
    """Return the whole conversation. Omits the instructions of previous requests."""
    system = () if instructions is None else (Message("system", instructions),)
    previous = () if history is None else history.messages
    conversation = (*previous, *own_input.messages)
    if not conversation:
        raise FieldError("input: expected a string or at least one item", param="input")
    return (*system, *conversation)


@dataclass(frozen=True, slots=True)
class _TextFormat:
    """The required form of the answer's text. `reply_value` is the field `text` of the reply."""

    answer_format: AnswerFormat | None = None
    reply_value: Json = field(default_factory=lambda: {"type": "text"})


def _text_format(value: object) -> _TextFormat:
    if value is None:
        return _TextFormat()
    text = known_fields(object_at("text", value), TEXT_FIELDS, "text.")
    if "format" not in text:
        return _TextFormat()
    given = object_at(_FORMAT, text["format"])
    checked = validated_by_type(_FORMAT, text_format_adapters, given)
    if checked["type"] == "text":
        return _TextFormat()
    if checked["type"] == "json_object":
        return _TextFormat(AnswerFormat(), {"type": "json_object"})
    return _TextFormat(AnswerFormat(checked["schema"]), {**checked})


def _reply_fields(
    body: ResponseBody,
    chat: Chat,
    sampling: SamplingParams,
    tools: ToolSet,
    choice: Choice,
    text: _TextFormat,
    reasoning: Json,
) -> Json:
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata", {}),
        "parallel_tool_calls": chat.parallel_tool_calls,
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "temperature": sampling.temperature,
        "text": {"format": text.reply_value, "verbosity": "medium"},
        "tool_choice": choice.reply_value,
        "tools": tools.reply_tools,
        "top_logprobs": sampling.logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.get("user"),
    }
