"""Request fields of OpenAI's wires: which are supported, and the checks of a field's JSON value.

Every field that OpenAI documents is in a table, as supported, ignored or refused; a test compares
the tables with the SDK. So is what other servers take and clients send, if it changes an answer.
Knows names and JSON types; not what a field means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from pydantic import TypeAdapter

from semantic_server.http.errors import FieldError
from semantic_server.http.logs import WarnOnce
from semantic_server.http.request_body import LazyAdapter, validated
from semantic_server.http.request_fields.table import (
    FOREIGN,
    IGNORED,
    SUPPORTED,
    Field,
    fields_of,
    refused,
)

T = TypeVar("T")

Json = dict[str, object]
"""A JSON object."""

warnings: Final = WarnOnce()


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
    "min_tokens": refused("a least number of tokens cannot be enforced", 0),
    "repetition_penalty": SUPPORTED,
    "semantic": SUPPORTED,
    "top_k": SUPPORTED,
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
    "chat_template_kwargs": SUPPORTED,
    "function_call": refused("deprecated: use tool_choice"),
    "functions": refused("deprecated: use tools"),
    "max_completion_tokens": SUPPORTED,
    "messages": SUPPORTED,
    "metadata": IGNORED,
    "modalities": refused("this server writes text only", ["text"]),
    "moderation": refused("this server moderates nothing"),
    "parallel_tool_calls": SUPPORTED,
    "prediction": IGNORED,
    "prompt_cache_key": IGNORED,
    "prompt_cache_options": IGNORED,
    "prompt_cache_retention": IGNORED,
    "reasoning": SUPPORTED,
    "reasoning_effort": SUPPORTED,
    "response_format": SUPPORTED,
    "safety_identifier": IGNORED,
    "service_tier": IGNORED,
    "store": IGNORED,
    "tool_choice": SUPPORTED,
    "tools": SUPPORTED,
    "top_logprobs": SUPPORTED,
    "verbosity": refused("this model has no such setting", "medium"),
    "web_search_options": refused("this server searches nothing"),
}

CHAT_REASONING_FIELDS: Final[dict[str, Field]] = {
    "effort": SUPPORTED,
    "enabled": SUPPORTED,
    "exclude": refused("reasoning is always returned", False),
    "max_tokens": SUPPORTED,
}
"""The object `reasoning` of clients that speak to many servers; OpenAI's has `reasoning_effort`."""

COMPLETION_FIELDS: Final[dict[str, Field]] = {
    **_SHARED,
    **_EXTENSIONS,
    **dict.fromkeys(CONSTRAINTS, SUPPORTED),
    "add_special_tokens": refused("send token ids for a prompt without them", True),
    "best_of": SUPPORTED,
    "echo": SUPPORTED,
    "prompt": SUPPORTED,
    "suffix": refused("this model completes at the end only", ""),
}

EMBEDDING_FIELDS: Final[dict[str, Field]] = {
    "dimensions": SUPPORTED,
    "encoding_format": SUPPORTED,
    "input": SUPPORTED,
    "model": SUPPORTED,
    "semantic": SUPPORTED,
    "user": IGNORED,
}

STRUCTURED_FIELDS: Final[dict[str, Field]] = {
    "choice": SUPPORTED,
    "disable_additional_properties": refused("a schema is enforced as it is", False),
    "disable_any_whitespace": refused("JSON may have white space", False),
    "disable_fallback": IGNORED,
    "grammar": SUPPORTED,
    "json": SUPPORTED,
    "json_object": SUPPORTED,
    "regex": SUPPORTED,
    "structural_tag": refused("not supported; use strict tools"),
    "whitespace_pattern": refused("white space in JSON cannot be set"),
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
    "stop_token_ids": refused("answers are cut at texts only: use stop", []),
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
"""Fields that clients send to other servers or routes, where they are in no table of the route:
what would change an answer is refused by name."""

STREAM_OPTION_FIELDS: Final[dict[str, Field]] = {
    "continuous_usage_stats": SUPPORTED,
    "include_obfuscation": refused("chunks are not obfuscated", False),
    "include_usage": SUPPORTED,
}


CHECKED_BY_ELEMENT: Final = frozenset(
    {"messages", "prompt", "response_format", "stop", "tool_choice", "tools", *CONSTRAINTS}
)

_PLACEHOLDERS: Final[dict[str, object]] = {"messages": [], "prompt": ""}
"""Stand-ins for required fields that are checked by element."""


def known_fields(
    body: Mapping[str, object], fields: Mapping[str, Field], within: str = ""
) -> dict[str, object]:
    """The fields of `body` that are in the table and not null.

    `within` is the path prefix of a nested `body`. Raises FieldError for a refused field, and for
    one that another server knows, or that is spelled like a known one.
    """
    return fields_of(body, fields, {} if within else OTHER_SERVERS, warnings, within)


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


def tokens_at(path: str, value: object) -> int | None:
    """`value`. Raises FieldError unless it is None or a whole number of 0 or more."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise FieldError(f"{path}: expected a whole number of 0 or more", param=path)
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


def name_at(path: str, given: Mapping[str, object]) -> str:
    """The name in the object at `path`. Raises FieldError unless it is a text that says one."""
    name = text_at(f"{path}.name", given.get("name"))
    if not name:
        raise FieldError(f"{path}.name: expected a name", param=f"{path}.name")
    return name


def validated_by_type(
    path: str, adapters: Mapping[str, LazyAdapter[T]], element: Mapping[str, object]
) -> T:
    """`element` as validated by the adapter that its member `type` names. Raises FieldError."""
    kind = element.get("type")
    if not isinstance(kind, str) or kind not in adapters:
        at = f"{path}.type"
        raise FieldError(f"{at}: expected one of {', '.join(adapters)}", param=at)
    return validated_at(path, adapters[kind](), element)


def validated_at(path: str, adapter: TypeAdapter[T], element: Mapping[str, object]) -> T:
    """`element` as validated by `adapter`. Raises FieldError with the path from the body's root."""
    try:
        return validated(adapter, element)
    except FieldError as error:
        whole = f"{path}.{error.param}" if error.param else path
        problem = str(error).removeprefix(f"{error.param}: ")
        raise FieldError(f"{whole}: {problem}", param=whole) from error
