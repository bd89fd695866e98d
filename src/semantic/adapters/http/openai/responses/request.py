"""The body of a request for a response, as what is asked of the served model.

Everything is checked before anything is asked. Knows the wire's fields and where earlier responses
are; not how answers come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from semantic.adapters.http.errors import FieldError, WireError
from semantic.adapters.http.openai.caller import Caller
from semantic.adapters.http.openai.fields import known_fields, warnings
from semantic.adapters.http.openai.limits import at_least_one, check_model
from semantic.adapters.http.openai.parts import list_at, object_at, text_at
from semantic.adapters.http.openai.responses.fields import (
    CACHE_OPTION_FIELDS,
    REASONING_FIELDS,
    RESPONSE_FIELDS,
    STREAM_OPTION_FIELDS,
)
from semantic.adapters.http.openai.responses.items import Input, input_of
from semantic.adapters.http.openai.responses.text_format import TextFormat, text_format_of
from semantic.adapters.http.openai.responses.tool_choice import Choice, choice_among
from semantic.adapters.http.openai.responses.toolbox import Json, Toolbox
from semantic.adapters.http.openai.sampling import sampling_of
from semantic.adapters.http.openai.template_options import template_options
from semantic.adapters.http.request_body import validated
from semantic.application.chat.response_history import History, ResponseGoneError, history_of
from semantic.domain.chat import Chat, Message
from semantic.domain.value_objects import SamplingParams
from semantic.ports.responses import ResponsesPort
from semantic.ports.serving import Ask, ServedModel

if TYPE_CHECKING:
    from semantic.adapters.http.openai.body_types import ResponseBody

_READ_BY_PART: Final = frozenset(
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
"""So that each error names the very part."""

_MOST_TOP_LOGPROBS: Final = 20
_SEALED: Final = "reasoning.encrypted_content"
_LOGPROBS: Final = "message.output_text.logprobs"
_WITHOUT_MEANING: Final = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""About items that no response of this server has."""


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A request for a response.

    `own` is what this request said, `toolbox` the names of its functions. With `sealed` thoughts
    are told also as what a client can send back unread, with `logprobs` every text has them.
    `told` are the fields of the reply's body that the request decides.
    """

    ask: Ask
    own: Input
    toolbox: Toolbox
    told: Json
    previous: str | None = None
    stream: bool = False
    store: bool = True
    sealed: bool = False
    logprobs: bool = False


def response_request(
    body: Mapping[str, object], model: ServedModel, caller: Caller, responses: ResponsesPort
) -> ResponseRequest:
    """What `body` asks of `model`. May have to wait for `responses`.

    Raises InvalidRequestError, ModelNotFoundError, and WireError where the response to go on from
    is not kept.
    """
    from semantic.adapters.http.openai.body_types import response_adapter

    known = known_fields(body, RESPONSE_FIELDS)
    checked = validated(
        response_adapter(),
        {name: value for name, value in known.items() if name not in _READ_BY_PART},
    )
    if "model" not in checked:
        raise FieldError("model: expected a model's name", param="model")
    check_model(checked["model"], model)
    included = _included(known.get("include", []))
    reasoning, stream = _checked_parts(known)
    sampling = sampling_of(checked, known.get("stop"), model)
    sampling = _with_logprobs(sampling, checked, asked=_LOGPROBS in included)
    max_tokens = at_least_one("max_output_tokens", checked.get("max_output_tokens"))
    previous = checked.get("previous_response_id")
    toolbox = Toolbox()
    toolbox.add_given("tools", known.get("tools", []))
    own = input_of(known.get("input"), toolbox)
    history = None if previous is None else _history(responses, caller.tenant, previous)
    if history is not None:
        toolbox.add_earlier(history.tools)
    choice = choice_among(toolbox, known.get("tool_choice"))
    text = text_format_of(known.get("text"))
    effort = reasoning.get("effort")
    chat = Chat(
        _messages(checked.get("instructions"), history, own),
        choice.tools,
        choice.choice,
        parallel_tool_calls=checked.get("parallel_tool_calls") is not False,
        answer_format=text.answer_format,
        template_options=template_options(
            effort if isinstance(effort, str) else None,
            object_at("chat_template_kwargs", known.get("chat_template_kwargs", {})),
        ),
    )
    agent = caller.agent or (None if history is None else history.agent)
    return ResponseRequest(
        Ask(chat, sampling, max_tokens, agent, caller.tenant, caller.identity),
        own,
        toolbox,
        _told(checked, chat, sampling, toolbox, choice, text, reasoning),
        previous,
        stream=stream,
        store=checked.get("store") is not False,
        sealed=_SEALED in included,
        logprobs=sampling.logprobs is not None,
    )


def _included(value: object) -> frozenset[str]:
    """What a reply is to have beside what it always has."""
    found = [text_at(f"include[{i}]", one) for i, one in enumerate(list_at("include", value))]
    for one in found:
        if one not in _WITHOUT_MEANING | {_SEALED, _LOGPROBS}:
            warnings.warn(f"include of {one!a:.80} is unknown and has no effect")
    return frozenset(found)


def _checked_parts(known: Mapping[str, object]) -> tuple[Json, bool]:
    """The field `reasoning`, and whether a stream is wanted. Raises FieldError."""
    reasoning: Json = {}
    for name, table in (
        ("reasoning", REASONING_FIELDS),
        ("prompt_cache_options", CACHE_OPTION_FIELDS),
        ("stream_options", STREAM_OPTION_FIELDS),
    ):
        part = known_fields(object_at(name, known.get(name, {})), table, f"{name}.")
        if name == "reasoning":
            reasoning = part
    stream = known.get("stream") is True
    if "stream_options" in known and not stream:
        raise FieldError(
            "stream_options: only for a stream; expected stream to be true", param="stream_options"
        )
    return reasoning, stream


def _with_logprobs(sampling: SamplingParams, body: ResponseBody, *, asked: bool) -> SamplingParams:
    top = body.get("top_logprobs") or 0
    if not 0 <= top <= _MOST_TOP_LOGPROBS:
        raise FieldError(
            f"top_logprobs must be between 0 and {_MOST_TOP_LOGPROBS}, got {top}",
            param="top_logprobs",
        )
    return replace(sampling, logprobs=top) if asked or top else sampling


def _history(responses: ResponsesPort, tenant: str, previous: str) -> History:
    try:
        return history_of(responses, tenant, previous)
    except ResponseGoneError as error:
        message = f"Previous response with id {previous!r:.200} not found."
        if error.response_id != previous:
            message = (
                f"The history of response {previous!r:.200} is not whole: response "
                f"{error.response_id!r:.200} not found."
            )
        raise WireError(
            HTTPStatus.BAD_REQUEST,
            message,
            param="previous_response_id",
            code="previous_response_not_found",
        ) from error


def _messages(instructions: str | None, history: History | None, own: Input) -> tuple[Message, ...]:
    """The whole conversation. Instructions are those of this request alone."""
    first = () if instructions is None else (Message("system", instructions),)
    said = (*(history.messages if history is not None else ()), *own.messages)
    if not said:
        raise FieldError("input: expected a text or at least one item", param="input")
    return (*first, *said)


def _told(
    body: ResponseBody,
    chat: Chat,
    sampling: SamplingParams,
    toolbox: Toolbox,
    choice: Choice,
    text: TextFormat,
    reasoning: Json,
) -> Json:
    """What the reply's body repeats of the request, with what holds where nothing was said."""
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
        "store": body.get("store") is not False,
        "temperature": sampling.temperature,
        "text": {"format": text.told, "verbosity": "medium"},
        "tool_choice": choice.told,
        "tools": toolbox.told,
        "top_logprobs": sampling.logprobs or 0,
        "top_p": sampling.top_p or 1.0,
        "truncation": "disabled",
        "user": body.get("user"),
    }
