"""Request fields of OpenAI's wires: which are supported, and the checks of a field's JSON value.

Every field that OpenAI documents is in a table, as supported, ignored or refused; a test compares
the tables with the SDK. Fields in no table are accepted and logged once. Knows names and JSON
types; not what a field means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import TypeAdapter

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.logs import WarnOnce
from semantic.adapters.http.request_body import validated

T = TypeVar("T")

Json = dict[str, object]
"""A JSON object."""

_LONGEST_NAME: Final = 80

warnings: Final = WarnOnce()


@dataclass(frozen=True, slots=True)
class Field:
    """Support for one field. With a `refusal` only the values in `unless` are accepted."""

    refusal: str | None = None
    unless: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        """True if a request may contain this `value`."""
        return self.refusal is None or any(
            type(value) is type(one) and value == one for one in self.unless
        )


SUPPORTED: Final = Field()

IGNORED: Final = Field()
"""Accepted without effect: accounting tags and hints that change no answer."""


def _refused(refusal: str, *unless: object) -> Field:
    return Field(refusal, unless)


_SHARED: Final[dict[str, Field]] = {
    "model": SUPPORTED,
    "frequency_penalty": SUPPORTED,
    "logit_bias": SUPPORTED,
    "logprobs": SUPPORTED,
    "max_tokens": SUPPORTED,
    "n": SUPPORTED,
    "presence_penalty": SUPPORTED,
    "seed": SUPPORTED,
    "stop": SUPPORTED,
    "stream": SUPPORTED,
    "stream_options": SUPPORTED,
    "temperature": SUPPORTED,
    "top_p": SUPPORTED,
    "user": IGNORED,
}

_EXTENSIONS: Final[dict[str, Field]] = {
    "agent_id": SUPPORTED,
    "ignore_eos": SUPPORTED,
    "min_p": SUPPORTED,
    "min_tokens": _refused("a least number of tokens cannot be enforced", 0),
    "repetition_penalty": SUPPORTED,
    "top_k": SUPPORTED,
}
"""Fields outside of OpenAI's API that clients of local servers send."""

CHAT_FIELDS: Final[dict[str, Field]] = {
    **_SHARED,
    **_EXTENSIONS,
    "audio": _refused("this server writes text only"),
    "chat_template_kwargs": SUPPORTED,
    "function_call": _refused("deprecated: use tool_choice"),
    "functions": _refused("deprecated: use tools"),
    "max_completion_tokens": SUPPORTED,
    "messages": SUPPORTED,
    "metadata": IGNORED,
    "modalities": _refused("this server writes text only", ["text"]),
    "moderation": _refused("this server moderates nothing"),
    "parallel_tool_calls": SUPPORTED,
    "prediction": _refused("predicted outputs are not supported"),
    "prompt_cache_key": IGNORED,
    "prompt_cache_options": IGNORED,
    "prompt_cache_retention": IGNORED,
    "reasoning_effort": SUPPORTED,
    "response_format": SUPPORTED,
    "safety_identifier": IGNORED,
    "service_tier": _refused("there is one tier only", "auto", "default"),
    "store": _refused("completions are not stored", False),
    "tool_choice": SUPPORTED,
    "tools": SUPPORTED,
    "top_logprobs": SUPPORTED,
    "verbosity": _refused("this model has no such setting", "medium"),
    "web_search_options": _refused("this server searches nothing"),
}

COMPLETION_FIELDS: Final[dict[str, Field]] = {
    **_SHARED,
    **_EXTENSIONS,
    "best_of": SUPPORTED,
    "echo": SUPPORTED,
    "prompt": SUPPORTED,
    "suffix": _refused("this model completes at the end only", ""),
}

STREAM_OPTION_FIELDS: Final[dict[str, Field]] = {
    "continuous_usage_stats": SUPPORTED,
    "include_obfuscation": _refused("chunks are not obfuscated", False),
    "include_usage": SUPPORTED,
}


CHECKED_BY_ELEMENT: Final = frozenset(
    {"messages", "prompt", "response_format", "stop", "tool_choice", "tools"}
)

_PLACEHOLDERS: Final[dict[str, object]] = {"messages": [], "prompt": ""}
"""Stand-ins for required fields that are checked by element."""


def known_fields(
    body: Mapping[str, object], fields: Mapping[str, Field], within: str = ""
) -> dict[str, object]:
    """The fields of `body` that are in the table and not null.

    `within` is the path prefix of a nested `body`. Raises FieldError for a refused field.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in given.keys() - fields.keys():
        warnings.warn(f"field {within + name!a:.{_LONGEST_NAME}} is unknown and has no effect")
    known = {name: value for name, value in given.items() if name in fields}
    for name, value in known.items():
        _check(within + name, value, fields[name])
    return known


def _check(path: str, value: object, field: Field) -> None:
    if field.accepts(value):
        return
    allowed = " or ".join(repr(one) for one in field.unless)
    hint = f"; only {allowed} is accepted" if allowed else ""
    raise FieldError(f"{path}: {field.refusal}{hint}", param=path)


def without_elements(known: Mapping[str, object]) -> dict[str, object]:
    """`known` as the SDK's types can validate it at once.

    Fields that are validated element by element, so that errors name the element's path, are left
    out, or replaced by an empty value where the type requires them.
    """
    plain = {name: value for name, value in known.items() if name not in CHECKED_BY_ELEMENT}
    return plain | {name: value for name, value in _PLACEHOLDERS.items() if name in known}


def at_least_one(name: str, value: int | None) -> int | None:
    """`value`. Raises FieldError for one below 1."""
    if value is not None and value < 1:
        raise FieldError(f"{name} must be at least 1, got {value}", param=name)
    return value


def object_at(path: str, value: object) -> dict[str, object]:
    """`value` without its nulls. Raises FieldError unless it is a JSON object."""
    if not isinstance(value, dict):
        raise FieldError(f"{path}: expected an object", param=path)
    return {name: inner for name, inner in value.items() if inner is not None}


def list_at(path: str, value: object) -> Sequence[object]:
    """`value`. Raises FieldError unless it is a list."""
    if not isinstance(value, list):
        raise FieldError(f"{path}: expected a list", param=path)
    return value


def text_at(path: str, value: object) -> str:
    """`value`. Raises FieldError unless it is a string."""
    if not isinstance(value, str):
        raise FieldError(f"{path}: expected a text", param=path)
    return value


def validated_at(path: str, adapter: TypeAdapter[T], element: Mapping[str, object]) -> T:
    """`element` as validated by `adapter`. Raises FieldError with the path from the body's root."""
    try:
        return validated(adapter, element)
    except FieldError as error:
        whole = f"{path}.{error.param}" if error.param else path
        problem = str(error).removeprefix(f"{error.param}: ")
        raise FieldError(f"{whole}: {problem}", param=whole) from error
