"""Helpers of requests to OpenAI's APIs: their caller, sampling and stream options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from fastapi import Request

from semantic.application.chat.call_grammar import choice_grammar, regex_grammar
from semantic.application.models.model_names import unknown_model
from semantic.domain.chat import AnswerFormat
from semantic.domain.errors import ModelNotFoundError
from semantic.domain.identity import NO_HINTS, Hints, Identity
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, Prompt, ServedModel
from semantic_server.http.context import settings_of
from semantic_server.http.errors import FieldError
from semantic_server.http.identity import agent_of, identity_of, tenant_of
from semantic_server.http.openai.fields import (
    CHECKED_BY_ELEMENT,
    STREAM_OPTION_FIELDS,
    STRUCTURED_FIELDS,
    known_fields,
)
from semantic_server.http.openai.validators import ChatBody, CompletionBody, ResponseBody
from semantic_server.http.request_fields.table import list_at, object_at, own_field_of, text_at

MAX_CHOICES: Final = 128
"""The maximum number of choices in one request, over all its prompts."""

_RANGES: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}

_MAX_BIAS: Final = 100
_MAX_STOPS: Final = 64
_SEEDS: Final = 2**63


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. With `force_usage`, each stream ends with a usage chunk. Without
    `keep`, the server stores nothing."""

    agent: str | None = None
    tenant: str = ""
    force_usage: bool = False
    identity: Identity | None = None
    keep: bool = True
    hints: Hints = NO_HINTS


def caller_of(request: Request, body: Mapping[str, object]) -> Caller:
    """Return the sender of a request. Raises FieldError, and WireError for an operator."""
    return Caller(
        agent_of(request, body),
        tenant_of(request),
        settings_of(request).force_usage,
        identity_of(request, body),
        *own_field_of(request, body),
    )


def check_model(name: str, model: ServedModel) -> None:
    """Raise ModelNotFoundError unless `name` is a served name."""
    if not model.accepts(name):
        raise ModelNotFoundError(unknown_model(name, model.names))


# Choices


def number_of_choices(n: int | None, n_prompts: int = 1) -> int:
    """Return the number of choices per prompt. Raises FieldError for more than `MAX_CHOICES`
    choices in the whole request."""
    n = 1 if n is None else n
    if n_prompts > MAX_CHOICES:
        raise FieldError(
            f"prompt must have at most {MAX_CHOICES} prompts, got {n_prompts}", param="prompt"
        )
    if n < 1 or n * n_prompts > MAX_CHOICES:
        each = "" if n_prompts == 1 else f" for {n_prompts} prompts"
        most = MAX_CHOICES // n_prompts
        raise FieldError(f"n must be between 1 and {most}{each}, got {n}", param="n")
    return n


def choices_of(
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingParams,
    max_tokens: int | None,
    caller: Caller,
    thinking_tokens: int | None = None,
    predicted: str = "",
) -> tuple[Ask, ...]:
    """Return one engine request per choice of each prompt. Only the first choice continues the
    caller's agent."""
    return tuple(
        Ask(
            prompt,
            _sampling_of_choice(sampling, choice),
            max_tokens,
            agent=_agent_of_choice(caller.agent, number * n + choice),
            tenant=caller.tenant,
            identity=caller.identity,
            thinking_tokens=thinking_tokens,
            keep=caller.keep,
            hints=caller.hints,
            predicted=predicted,
        )
        for number, prompt in enumerate(prompts)
        for choice in range(n)
    )


def _sampling_of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + choice) % _SEEDS)


def _agent_of_choice(agent: str | None, index: int) -> str | None:
    return agent if agent is None or index == 0 else f"{agent}/{index + 1}"


# Validation by element

_PLACEHOLDERS: Final[dict[str, object]] = {"messages": [], "prompt": ""}
"""Placeholders for fields that the SDK's types require."""


def without_elements(known: Mapping[str, object]) -> dict[str, object]:
    """Return `known` without the elements of lists. Other validators check the elements."""
    plain = {name: value for name, value in known.items() if name not in CHECKED_BY_ELEMENT}
    return plain | {name: value for name, value in _PLACEHOLDERS.items() if name in known}


# Constraints


def constraint_of(known: Mapping[str, object]) -> AnswerFormat | None:
    """Return the constraint on an answer's form, or None. Raises FieldError for an invalid
    constraint, and for several constraints."""
    given = {f"guided_{kind}": kind for kind in _FORMS}
    found = {name: (kind, known[name]) for name, kind in given.items() if name in known}
    if _STRUCTURED in known:
        members = object_at(_STRUCTURED, known[_STRUCTURED])
        members = known_fields(members, STRUCTURED_FIELDS, f"{_STRUCTURED}.")
        forms = {kind: members[kind] for kind in (*_FORMS, "json_object") if kind in members}
        if not forms:
            raise FieldError(
                f"{_STRUCTURED}: expected one of {', '.join(_FORMS)}", param=_STRUCTURED
            )
        found |= {f"{_STRUCTURED}.{kind}": (kind, value) for kind, value in forms.items()}
    names = [*found, *(["response_format"] if _is_form(known) else [])]
    if len(names) > 1:
        raise FieldError(
            f"{names[1]}: {names[0]} already constrains the answer; expected only one",
            param=names[1],
        )
    for path, (kind, value) in found.items():
        return _FORMS.get(kind, _any_object)(path, value)
    return None


def _is_form(known: Mapping[str, object]) -> bool:
    value = known.get("response_format")
    return value is not None and not (isinstance(value, dict) and value.get("type") == "text")


def _any_object(path: str, value: object) -> AnswerFormat:
    if value is not True:
        raise FieldError(f"{path}: expected true", param=path)
    return AnswerFormat()


def _json_form(path: str, value: object) -> AnswerFormat:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise FieldError(f"{path}: expected a JSON schema", param=path) from error
    if not isinstance(value, dict):
        raise FieldError(f"{path}: expected a JSON schema", param=path)
    return AnswerFormat(value)


def _regex_form(path: str, value: object) -> AnswerFormat:
    return AnswerFormat(grammar=regex_grammar(_text_of_form(path, value)))


def _grammar_form(path: str, value: object) -> AnswerFormat:
    text = _text_of_form(path, value)
    if "::=" in text:
        raise FieldError(f"{path}: expected Lark's notation (start: ...), got GBNF", param=path)
    return AnswerFormat(grammar=text)


def _choice_form(path: str, value: object) -> AnswerFormat:
    choices = [_text_of_form(f"{path}[{i}]", one) for i, one in enumerate(list_at(path, value))]
    if not choices:
        raise FieldError(f"{path}: expected at least one string", param=path)
    return AnswerFormat(grammar=choice_grammar(choices))


def _text_of_form(path: str, value: object) -> str:
    text = text_at(path, value)
    if not text:
        raise FieldError(f"{path} must not be empty", param=path)
    return text


_STRUCTURED: Final = "structured_outputs"
_FORMS: Final[dict[str, Callable[[str, object], AnswerFormat]]] = {
    "json": _json_form,
    "regex": _regex_form,
    "choice": _choice_form,
    "grammar": _grammar_form,
}


# Sampling parameters


def sampling_of(
    body: ChatBody | CompletionBody | ResponseBody, stop: object, model: ServedModel
) -> SamplingParams:
    """Return the sampling parameters of `body`. `model` supplies the defaults. Raises FieldError
    for a value out of range."""
    usual = model.sampling
    sampling = replace(
        usual,
        temperature=_number(body, "temperature", usual.temperature),
        top_p=_number(body, "top_p", usual.top_p),
        min_p=_number(body, "min_p", usual.min_p),
        presence_penalty=_number(body, "presence_penalty", usual.presence_penalty),
        frequency_penalty=_number(body, "frequency_penalty", usual.frequency_penalty),
    )
    sampling = _with_other_neutrals(sampling, body)
    bias, seed = body.get("logit_bias"), body.get("seed")
    if stop is not None:
        sampling = replace(sampling, stop=_stops(stop))
    if bias is not None:
        sampling = replace(sampling, logit_bias=_biases(bias, model.vocab_size))
    if seed is not None:
        # OpenAI's seeds are any 64-bit integers; the engine's are not negative.
        sampling = replace(sampling, seed=seed % _SEEDS)
    if "ignore_eos" in body:
        sampling = replace(sampling, ignore_eos=body["ignore_eos"])
    return sampling


def _number(body: Mapping[str, object], name: str, default: float) -> float:
    value = body.get(name)
    if not isinstance(value, (int, float)):
        return default
    low, high = _RANGES[name]
    if not low <= value <= high:
        raise FieldError(f"{name} must be between {low} and {high}, got {value}", param=name)
    return float(value)


def _with_other_neutrals(
    sampling: SamplingParams, body: ChatBody | CompletionBody | ResponseBody
) -> SamplingParams:
    """Set the parameters whose neutral value differs between the API and the domain."""
    if "top_k" in body:
        top_k = body["top_k"]
        if top_k < -1:
            raise FieldError(f"top_k must be -1 or more, got {top_k}", param="top_k")
        sampling = replace(sampling, top_k=max(top_k, 0))
    if "repetition_penalty" in body:
        penalty = _number(body, "repetition_penalty", 1)
        sampling = replace(sampling, repetition_penalty=None if penalty == 1 else penalty)
    return sampling


def _stops(stop: object) -> tuple[str, ...]:
    given = [stop] if isinstance(stop, str) else list_at("stop", stop)
    stops = tuple(text_at(f"stop[{i}]", one) for i, one in enumerate(given))
    if len(stops) > _MAX_STOPS:
        raise FieldError(f"stop must have at most {_MAX_STOPS} strings", param="stop")
    if not all(stops):
        raise FieldError("stop must not have empty strings", param="stop")
    return stops


def _biases(biases: Mapping[str, int], vocab_size: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):  # noqa: PLR2004
            raise FieldError(f"logit_bias: {token[:40]!r} is not a token id", param="logit_bias")
        if int(token) >= vocab_size:
            raise FieldError(
                f"logit_bias: token ids must be below {vocab_size}, got {token}", param="logit_bias"
            )
        if abs(bias) > _MAX_BIAS:
            raise FieldError(
                f"logit_bias must be between -{_MAX_BIAS} and {_MAX_BIAS}, got {bias}",
                param="logit_bias",
            )
        found[int(token)] = float(bias)
    return found


# Stream options


UsagePlace = Literal["nowhere", "finish", "own chunk"]
"""The place of the usage in a stream: a choice's last chunk, or a separate chunk."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How to send a reply. `running_usage` adds the usage to the last chunk of each choice."""

    stream: bool = False
    usage: UsagePlace = "finish"
    running_usage: bool = False


def stream_options(body: Mapping[str, object], *, force_usage: bool) -> StreamOptions:
    """Return the stream options of a body. Raises FieldError if a body without `stream` has
    some."""
    stream = body.get("stream") is True
    value = body.get("stream_options")
    if value is None:
        return StreamOptions(stream, "own chunk" if force_usage else "finish")
    if not stream:
        raise FieldError("stream_options requires stream to be true", param="stream_options")
    path = "stream_options"
    options = known_fields(object_at(path, value), STREAM_OPTION_FIELDS, f"{path}.")
    running = _flag(options, "continuous_usage_stats")
    wanted = _flag(options, "include_usage")
    usage: UsagePlace = "finish"
    if wanted or force_usage or running:
        usage = "own chunk"
    elif "include_usage" in options:
        usage = "nowhere"
    return StreamOptions(stream, usage, running)


def _flag(options: Mapping[str, object], name: str) -> bool:
    value = options.get(name, False)
    if not isinstance(value, bool):
        path = f"stream_options.{name}"
        raise FieldError(f"{path}: expected true or false", param=path)
    return value
