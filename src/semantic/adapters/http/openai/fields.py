"""Request fields of OpenAI's wires: which are supported, and the checks of a field's JSON value.

Every field that OpenAI documents is in a table, as supported, ignored or refused; a test compares
the tables with the SDK. So is what other servers take and clients send, if it changes an answer.
Of fields in no table those that look like a known one are refused, others logged once. Knows names
and JSON types; not what a field means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import TypeAdapter

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.logs import WarnOnce
from semantic.adapters.http.request_body import check_spelling, validated

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
    "add_special_tokens": _refused("the template adds them", False),
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
    "verbosity": _refused("this model has no such setting", "medium"),
    "web_search_options": _refused("this server searches nothing"),
}

CHAT_REASONING_FIELDS: Final[dict[str, Field]] = {
    "effort": SUPPORTED,
    "enabled": SUPPORTED,
    "exclude": _refused("reasoning is always returned", False),
    "max_tokens": SUPPORTED,
}
"""The object `reasoning` of clients that speak to many servers; OpenAI's has `reasoning_effort`."""

COMPLETION_FIELDS: Final[dict[str, Field]] = {
    **_SHARED,
    **_EXTENSIONS,
    **dict.fromkeys(CONSTRAINTS, SUPPORTED),
    "add_special_tokens": _refused("send token ids for a prompt without them", True),
    "best_of": SUPPORTED,
    "echo": SUPPORTED,
    "prompt": SUPPORTED,
    "suffix": _refused("this model completes at the end only", ""),
}

STRUCTURED_FIELDS: Final[dict[str, Field]] = {
    "choice": SUPPORTED,
    "disable_additional_properties": _refused("a schema is enforced as it is", False),
    "disable_any_whitespace": _refused("JSON may have white space", False),
    "disable_fallback": IGNORED,
    "grammar": SUPPORTED,
    "json": SUPPORTED,
    "json_object": SUPPORTED,
    "regex": SUPPORTED,
    "structural_tag": _refused("not supported; use strict tools"),
    "whitespace_pattern": _refused("white space in JSON cannot be set"),
}
"""Members of `structured_outputs`."""

_NO_TEMPLATE: Final = "the model's own template is used"
_ONE_SAMPLER: Final = "this way to sample is not supported"
_THINKING: Final = "use reasoning_effort, or enable_thinking in chat_template_kwargs"
_FORM: Final = "use response_format or structured_outputs"

OTHER_SERVERS: Final[dict[str, Field]] = {
    # vLLM and SGLang
    "add_generation_prompt": _refused(_NO_TEMPLATE, True),
    "allowed_token_ids": _refused("use logit_bias", []),
    "background": _refused("answers are not computed in the background", False),
    "bad_words": _refused("words cannot be excluded", []),
    "cache_salt": _refused("caches are kept apart by API keys", ""),
    "chat_template": _refused(_NO_TEMPLATE),
    "continue_final_message": _refused("an answer cannot be continued", False),
    "documents": _refused("write documents into a message", []),
    "ebnf": _refused(_FORM),
    "echo": _refused("a conversation cannot be repeated", False),
    "guided_decoding_backend": IGNORED,
    "guided_whitespace_pattern": _refused("white space in JSON cannot be set"),
    "include_reasoning": _refused("reasoning is always returned", True),
    "include_stop_str_in_output": _refused("stop strings are never part of an answer", False),
    "kv_transfer_params": _refused("keys and values are not transferred", {}),
    "length_penalty": _refused("there is no beam search", 1, 1.0),
    "logits_processors": _refused("logits processors cannot be sent", []),
    "priority": IGNORED,
    "prompt_logprobs": _refused("use echo with logprobs on /v1/completions", 0),
    "regex": _refused(_FORM),
    "request_id": IGNORED,
    "return_token_ids": _refused("token ids are not returned", False),
    "return_tokens_as_token_ids": _refused("token ids are not returned", False),
    "separate_reasoning": _refused("reasoning is always apart", True),
    "skip_special_tokens": _refused("special tokens are never part of an answer", True),
    "spaces_between_special_tokens": IGNORED,
    "stop_token_ids": _refused("answers are cut at texts only: use stop", []),
    "thinking_token_budget": _refused("reasoning has no limit of its own"),
    "truncate_prompt_tokens": _refused("prompts are never truncated"),
    "use_beam_search": _refused("there is no beam search", False),
    "vllm_xargs": _refused("there are no such arguments here", {}),
    # Ollama
    "context": _refused("send the conversation itself"),
    "format": _refused(_FORM, ""),
    "images": _refused("images cannot be read by this model", []),
    "keep_alive": IGNORED,
    "num_ctx": _refused("the context is a setting of the server"),
    "num_predict": _refused("use max_tokens"),
    "options": _refused("send its members as fields of the body", {}),
    "raw": _refused("use /v1/completions for a prompt without a template", False),
    "system": _refused("send a message with the role system", ""),
    "template": _refused(_NO_TEMPLATE, ""),
    "think": _refused(_THINKING),
    # llama.cpp and LM Studio
    "cache_prompt": IGNORED,
    "draft_model": IGNORED,
    "dry_multiplier": _refused(_ONE_SAMPLER, 0, 0.0),
    "dynatemp_range": _refused(_ONE_SAMPLER, 0, 0.0),
    "grammar": _refused(_FORM, ""),
    "id_slot": IGNORED,
    "json_schema": _refused(_FORM),
    "mirostat": _refused(_ONE_SAMPLER, 0),
    "n_predict": _refused("use max_tokens"),
    "reasoning_format": _refused("reasoning is always apart", "auto", "deepseek"),
    "repeat_penalty": _refused("use repetition_penalty", 1, 1.0),
    "samplers": _refused(_ONE_SAMPLER, []),
    "tfs_z": _refused(_ONE_SAMPLER, 1, 1.0),
    "timings_per_token": IGNORED,
    "ttl": IGNORED,
    "typical_p": _refused(_ONE_SAMPLER, 1, 1.0),
    "xtc_probability": _refused(_ONE_SAMPLER, 0, 0.0),
    # Hosted models and routers
    "enable_thinking": _refused(_THINKING),
    "extra_body": _refused("send its members as fields of the body", {}),
    "models": IGNORED,
    "plugins": _refused("there are no plugins here", []),
    "provider": IGNORED,
    "random_seed": _refused("use seed"),
    "reasoning": _refused(_THINKING, {}),
    "route": IGNORED,
    "safe_prompt": _refused("send a message with the role system", False),
    "thinking": _refused(_THINKING, {}),
    "top_a": _refused(_ONE_SAMPLER, 0, 0.0),
    "transforms": _refused("prompts are never changed", []),
    "usage": IGNORED,
    # Other routes of this server
    **dict.fromkeys(CONSTRAINTS, _refused("use text.format")),
    "input": _refused("a field of /v1/responses"),
    "instructions": _refused("a field of /v1/responses"),
    "logprobs": _refused("use include and top_logprobs", False),
    "max_completion_tokens": _refused("use max_tokens, or max_output_tokens on /v1/responses"),
    "max_output_tokens": _refused("use max_tokens"),
    "max_tokens": _refused("use max_output_tokens"),
    "max_tokens_to_sample": _refused("use max_tokens"),
    "messages": _refused("a field of /v1/chat/completions"),
    "n": _refused("a response has one answer", 1),
    "prompt": _refused("a field of /v1/completions"),
    "reasoning_effort": _refused("use reasoning.effort"),
    "response_format": _refused("use structured_outputs, or text.format on /v1/responses"),
    "stop_sequences": _refused("use stop", []),
    "tool_choice": _refused("a field of /v1/chat/completions", "none", "auto"),
    "tools": _refused("a field of /v1/chat/completions", []),
}
"""Fields that clients send to other servers or routes, where they are in no table of the route:
what would change an answer is refused by name."""

STREAM_OPTION_FIELDS: Final[dict[str, Field]] = {
    "continuous_usage_stats": SUPPORTED,
    "include_obfuscation": _refused("chunks are not obfuscated", False),
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
    given = {name: value for name, value in body.items() if value is not None}
    unknown = sorted(given.keys() - fields.keys())
    if not within:
        for name in unknown:
            _check(name, given[name], OTHER_SERVERS.get(name, IGNORED))
        unknown = [name for name in unknown if name not in OTHER_SERVERS]
    check_spelling(unknown, fields, within)
    for name in unknown:
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


def validated_at(path: str, adapter: TypeAdapter[T], element: Mapping[str, object]) -> T:
    """`element` as validated by `adapter`. Raises FieldError with the path from the body's root."""
    try:
        return validated(adapter, element)
    except FieldError as error:
        whole = f"{path}.{error.param}" if error.param else path
        problem = str(error).removeprefix(f"{error.param}: ")
        raise FieldError(f"{whole}: {problem}", param=whole) from error
