"""Tables of the fields that an API supports, ignores or refuses, and checks of JSON values.

A misspelled field is an error. Headers such as `X-Semantic-Keep` set members of the field
`semantic`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple, TypeVar

from annotated_types import Ge, Le
from fastapi import Request
from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from semantic.domain.identity import LONGEST_ABSENCE, MOST_PRIORITY, Hints
from semantic_server.http.errors import FieldError
from semantic_server.http.logs import WarnOnce
from semantic_server.http.request_body import LazyAdapter, check_spelling, validated

T = TypeVar("T")

_LONGEST_NAME: Final = 80


@dataclass(frozen=True, slots=True)
class Field:
    """How a route treats one field. With a `refusal`, only the values in `unless` are valid."""

    refusal: str | None = None
    unless: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        """Return True if a request may contain `value`."""
        return self.refusal is None or any(
            type(value) is type(one) and value == one for one in self.unless
        )


SUPPORTED: Final = Field()

IGNORED: Final = Field()
"""A field accepted without effect."""


def supported(names: str) -> dict[str, Field]:
    """Return a table of supported fields. Spaces separate the `names`."""
    return dict.fromkeys(names.split(), SUPPORTED)


def ignored(names: str) -> dict[str, Field]:
    """Return a table of ignored fields. Spaces separate the `names`."""
    return dict.fromkeys(names.split(), IGNORED)


def refused(refusal: str, *unless: object) -> Field:
    """Return a field that the server refuses, unless its value is in `unless`."""
    return Field(refusal, unless)


def fields_of(
    body: Mapping[str, object],
    table: Mapping[str, Field],
    others: Mapping[str, Field],
    warnings: WarnOnce,
    within: str = "",
) -> dict[str, object]:
    """Return the fields of `body` that are in `table` and not null. `within` is the prefix of the
    fields' paths. Raises FieldError for a refused or misspelled field."""
    given = {name: value for name, value in body.items() if value is not None}
    unknown = sorted(given.keys() - table.keys())
    for name in unknown:
        _check(within + name, given[name], others.get(name, IGNORED))
    unknown = [name for name in unknown if name not in others]
    check_spelling(unknown, table, within)
    for name in unknown:
        warnings.warn(f"unknown field {within + name!a:.{_LONGEST_NAME}} has no effect")
    known = {name: value for name, value in given.items() if name in table}
    for name, value in known.items():
        _check(within + name, value, table[name])
    return known


@dataclass(frozen=True, slots=True)
class WireFields:
    """The request fields of one vendor's APIs."""

    others: Mapping[str, Field]
    warnings: WarnOnce

    def known(
        self, body: Mapping[str, object], table: Mapping[str, Field], within: str = ""
    ) -> dict[str, object]:
        """Return the fields of `body` that are in `table`, as `fields_of` does."""
        return fields_of(body, table, {} if within else self.others, self.warnings, within)


def _check(path: str, value: object, field: Field) -> None:
    if field.accepts(value):
        return
    allowed = " or ".join(repr(one) for one in field.unless)
    hint = f"; expected {allowed}" if allowed else ""
    raise FieldError(f"{path}: {field.refusal}{hint}", param=path)


NO_TEMPLATE: Final = "this server uses the model's own template"
PENALTY_CONTEXT: Final = "this server sets the tokens that a penalty covers"
THINKING_LIMIT: Final = "use this API's own limit on reasoning"
ONE_SAMPLER: Final = "this server lacks this kind of sampling"

FOREIGN: Final[dict[str, Field]] = {
    # vLLM and SGLang
    "add_generation_prompt": refused(NO_TEMPLATE, True),
    "background": refused("this server has no background answers", False),
    "bad_words": refused("this server cannot exclude words", []),
    "cache_salt": refused("API keys separate caches", ""),
    "chat_template": refused(NO_TEMPLATE),
    "continue_final_message": refused("this server cannot continue an answer", False),
    "documents": refused("write documents into a message", []),
    "echo": refused("this server cannot echo a conversation", False),
    **ignored("guided_decoding_backend priority request_id spaces_between_special_tokens"),
    "guided_whitespace_pattern": refused("clients cannot set white space in JSON"),
    "include_reasoning": refused("replies always have reasoning", True),
    "include_stop_str_in_output": refused("stop strings are never part of an answer", False),
    "kv_transfer_params": refused("this server does not transfer keys and values", {}),
    "length_penalty": refused("this server has no beam search", 1, 1.0),
    "logits_processors": refused("this server accepts no logits processors", []),
    "return_token_ids": refused("replies have no token ids", False),
    "return_tokens_as_token_ids": refused("replies have no token ids", False),
    "separate_reasoning": refused("reasoning is always separate", True),
    "skip_special_tokens": refused("special tokens are never part of an answer", True),
    "truncate_prompt_tokens": refused("this server never truncates prompts"),
    "custom_logit_processor": refused("this server accepts no logits processors", ""),
    "lora_path": refused("name a model with an adapter", ""),
    "max_thinking_tokens": refused(THINKING_LIMIT),
    "reasoning_budget": refused(THINKING_LIMIT, -1),
    "structural_tag": refused("not supported; use strict tools"),
    "thinking_budget": refused(THINKING_LIMIT),
    "thinking_token_budget": refused(THINKING_LIMIT),
    "use_beam_search": refused("this server has no beam search", False),
    "vllm_xargs": refused("this server has no such arguments", {}),
    # Ollama
    "context": refused("send the conversation itself"),
    "images": refused("this model cannot process images", []),
    "keep_alive": IGNORED,
    "num_ctx": refused("the context is a setting of the server"),
    "num_predict": refused("use max_tokens"),
    "options": refused("send its members as fields of the body", {}),
    "template": refused(NO_TEMPLATE, ""),
    # llama.cpp and LM Studio
    **ignored("cache_prompt draft_model id_slot timings_per_token ttl"),
    "dry_multiplier": refused(ONE_SAMPLER, 0, 0.0),
    "dynatemp_range": refused(ONE_SAMPLER, 0, 0.0),
    "mirostat": refused(ONE_SAMPLER, 0),
    "n_predict": refused("use max_tokens"),
    "reasoning_format": refused("reasoning is always separate", "auto", "deepseek"),
    "samplers": refused(ONE_SAMPLER, []),
    "tfs_z": refused(ONE_SAMPLER, 1, 1.0),
    "typical_p": refused(ONE_SAMPLER, 1, 1.0),
    "xtc_probability": refused(ONE_SAMPLER, 0, 0.0),
    "adaptive_target": refused(ONE_SAMPLER, -1, -1.0),
    "lora": refused("name a model with an adapter", []),
    "repeat_last_n": refused(PENALTY_CONTEXT, 64),
    "top_n_sigma": refused(ONE_SAMPLER, -1, -1.0, 0, 0.0),
    # mlx_lm.server
    "adapters": refused("name a model with an adapter"),
    "repetition_context_size": refused(PENALTY_CONTEXT, 20),
    # transformers and text-generation-webui
    "banned_strings": refused("this server cannot exclude words", []),
    "do_sample": refused("use temperature", True),
    "early_stopping": refused("this server has no beam search", False),
    "epsilon_cutoff": refused(ONE_SAMPLER, 0, 0.0),
    "eta_cutoff": refused(ONE_SAMPLER, 0, 0.0),
    "grammar_string": refused("use a grammar field of this API", ""),
    "guidance_scale": refused(ONE_SAMPLER, 1, 1.0),
    "max_new_tokens": refused("use max_tokens"),
    "min_new_tokens": refused("this server cannot enforce a minimum of tokens", 0),
    "no_repeat_ngram_size": refused(ONE_SAMPLER, 0),
    "num_beams": refused("this server has no beam search", 1),
    "penalty_alpha": refused(ONE_SAMPLER, 0, 0.0),
    "smoothing_factor": refused(ONE_SAMPLER, 0, 0.0),
    "stopping_strings": refused("use stop", []),
    "token_healing": refused("this server never changes prompts", False),
    # Hosted models and routers
    "extra_body": refused("send its members as fields of the body", {}),
    "max_tokens_to_sample": refused("use max_tokens"),
    **ignored("models provider route usage"),
    "plugins": refused("this server has no plugins", []),
    "top_a": refused(ONE_SAMPLER, 0, 0.0),
    "transforms": refused("this server never changes prompts", []),
}
"""Fields of other servers. The server refuses values that would have an effect."""


def at_least_one(name: str, value: int | None) -> int | None:
    """Return `value`. Raises FieldError for a value below 1."""
    if value is not None and value < 1:
        raise FieldError(f"{name} must be at least 1, got {value}", param=name)
    return value


def tokens_at(path: str, value: object) -> int | None:
    """Return `value`. Raises FieldError unless `value` is None or an integer of at least 0."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise FieldError(f"{path}: expected a whole number of 0 or more", param=path)
    return value


def mapping_at(path: str, value: object) -> Mapping[str, object]:
    """Return `value` as a mapping. Raises FieldError unless it is a JSON object."""
    if not isinstance(value, dict):
        raise FieldError(f"{path}: expected an object", param=path)
    return value


def object_at(path: str, value: object) -> dict[str, object]:
    """Return `value` without its null members. Raises FieldError unless it is a JSON object."""
    return {name: inner for name, inner in mapping_at(path, value).items() if inner is not None}


def list_at(path: str, value: object) -> Sequence[object]:
    """Return `value`. Raises FieldError unless `value` is a list."""
    if not isinstance(value, list):
        raise FieldError(f"{path}: expected a list", param=path)
    return value


def text_at(path: str, value: object) -> str:
    """Return `value`. Raises FieldError unless `value` is a string."""
    if not isinstance(value, str):
        raise FieldError(f"{path}: expected a string", param=path)
    return value


def flag_at(path: str, value: object) -> bool:
    """Return `value`. Raises FieldError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise FieldError(f"{path}: expected true or false", param=path)
    return value


def name_at(path: str, given: Mapping[str, object]) -> str:
    """Return the name in the object `given`. Raises FieldError with `path` for a missing name."""
    name = text_at(f"{path}.name", given.get("name"))
    if not name:
        raise FieldError(f"{path}.name: expected a name", param=f"{path}.name")
    return name


def validated_by_type(
    path: str, adapters: Mapping[str, LazyAdapter[T]], element: Mapping[str, object]
) -> T:
    """Validate `element` with the adapter for the value of its member `type`. Raises FieldError."""
    kind = element.get("type")
    if not isinstance(kind, str) or kind not in adapters:
        at = f"{path}.type"
        raise FieldError(f"{at}: expected one of {', '.join(adapters)}", param=at)
    return validated_at(path, adapters[kind](), element)


def validated_at(path: str, adapter: TypeAdapter[T], element: Mapping[str, object]) -> T:
    """Validate `element` with `adapter`. Raises FieldError with a path that begins with `path`."""
    try:
        return validated(adapter, element)
    except FieldError as error:
        raise error.at(f"{path}.{error.param}" if error.param else path) from error


# The field `semantic`


@with_config(ConfigDict(strict=True))
class _Members(TypedDict, total=False):
    keep: bool | None
    done: bool | None
    back_in: Annotated[float, Ge(0), Le(LONGEST_ABSENCE)] | None
    priority: Annotated[int, Ge(-MOST_PRIORITY), Le(MOST_PRIORITY)] | None
    drafts: bool | None


_OWN_FIELD: Final = "semantic"
_MEMBERS: Final = tuple(_Members.__annotations__)
_HEADERS: Final = {name: f"X-Semantic-{name.title().replace('_', '-')}" for name in _MEMBERS}
_members: Final = LazyAdapter(_Members)


class OwnField(NamedTuple):
    """The agent's hints about its future. If `keep` is False, the server stores nothing."""

    keep: bool
    hints: Hints


def own_field_of(request: Request, body: Mapping[str, object]) -> OwnField:
    """Return the members of the field `semantic`. Headers supply its missing members.

    Raises FieldError for an unknown member, a wrong value, and `back_in` together with `done`.
    """
    own, sent = _own(body), _sent(request)
    keep = False not in (own.get("keep"), sent.get("keep"))
    given: _Members = {**sent, **own}
    done, back_in = given.get("done") or False, given.get("back_in")
    if done and back_in is not None:
        path = f"{_OWN_FIELD}.back_in"
        raise FieldError(f"{path}: not allowed with {_OWN_FIELD}.done", param=path)
    drafts = given.get("drafts") is not False
    return OwnField(keep, Hints(done, back_in, given.get("priority") or 0, drafts))


def _own(body: Mapping[str, object]) -> _Members:
    own = body.get(_OWN_FIELD)
    members = {} if own is None else object_at(_OWN_FIELD, own)
    for name in members:
        if name not in _MEMBERS:
            path = f"{_OWN_FIELD}.{name[:_LONGEST_NAME]}"
            known = f"{', '.join(_MEMBERS[:-1])} or {_MEMBERS[-1]}"
            raise FieldError(f"{path}: unknown field; expected {known}", param=path)
    return validated_at(_OWN_FIELD, _members(), members)


def _sent(request: Request) -> _Members:
    sent = {name: request.headers.get(header) for name, header in _HEADERS.items()}
    members = {name: _as_json(text) for name, text in sent.items() if text is not None}
    try:
        return validated(_members(), members)
    except FieldError as error:
        raise error.at(_HEADERS[error.param]) from error


def _as_json(text: str) -> object:
    try:
        return json.loads(text.lower())
    except ValueError:
        return text
