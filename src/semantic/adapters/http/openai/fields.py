"""Every field of a body, and what becomes of it: it works, it is taken note of, or it is refused.

The tables have each field that OpenAI documents; a test compares them with the SDK. What is in no
table is accepted and told of in the log once. Knows names; not how a field is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.logs import WarnOnce

_LONGEST_NAME: Final = 80

warnings: Final = WarnOnce()


@dataclass(frozen=True, slots=True)
class Field:
    """What becomes of a field. With a `refusal` only the values in `unless` are accepted."""

    refusal: str | None = None
    unless: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        """Whether a request may have this `value` here."""
        return self.refusal is None or any(
            type(value) is type(one) and value == one for one in self.unless
        )


WORKS: Final = Field()

NOTED: Final = Field()
"""A tag for the books of a service that has many customers. It changes no answer."""


def _refused(refusal: str, *unless: object) -> Field:
    return Field(refusal, unless)


_SHARED: Final[dict[str, Field]] = {
    "model": WORKS,
    "frequency_penalty": WORKS,
    "logit_bias": WORKS,
    "logprobs": WORKS,
    "max_tokens": WORKS,
    "n": WORKS,
    "presence_penalty": WORKS,
    "seed": WORKS,
    "stop": WORKS,
    "stream": WORKS,
    "stream_options": WORKS,
    "temperature": WORKS,
    "top_p": WORKS,
    "user": NOTED,
}

_EXTENSIONS: Final[dict[str, Field]] = {
    "agent_id": WORKS,
    "ignore_eos": WORKS,
    "min_p": WORKS,
    "min_tokens": _refused("a least number of tokens cannot be enforced", 0),
    "repetition_penalty": WORKS,
    "top_k": WORKS,
}
"""Fields that OpenAI does not have and that clients of local servers send."""

CHAT_FIELDS: Final[dict[str, Field]] = {
    **_SHARED,
    **_EXTENSIONS,
    "audio": _refused("this server writes text only"),
    "chat_template_kwargs": WORKS,
    "function_call": _refused("deprecated: use tool_choice"),
    "functions": _refused("deprecated: use tools"),
    "max_completion_tokens": WORKS,
    "messages": WORKS,
    "metadata": NOTED,
    "modalities": _refused("this server writes text only", ["text"]),
    "moderation": _refused("this server moderates nothing"),
    "parallel_tool_calls": WORKS,
    "prediction": _refused("predicted outputs are not supported"),
    "prompt_cache_key": NOTED,
    "prompt_cache_options": NOTED,
    "prompt_cache_retention": NOTED,
    "reasoning_effort": WORKS,
    "response_format": WORKS,
    "safety_identifier": NOTED,
    "service_tier": _refused("there is one tier only", "auto", "default"),
    "store": _refused("completions are not stored", False),
    "tool_choice": WORKS,
    "tools": WORKS,
    "top_logprobs": WORKS,
    "verbosity": _refused("this model has no such setting", "medium"),
    "web_search_options": _refused("this server searches nothing"),
}

COMPLETION_FIELDS: Final[dict[str, Field]] = {
    **_SHARED,
    **_EXTENSIONS,
    "best_of": WORKS,
    "echo": WORKS,
    "prompt": WORKS,
    "suffix": _refused("this model completes at the end only", ""),
}

STREAM_OPTION_FIELDS: Final[dict[str, Field]] = {
    "continuous_usage_stats": WORKS,
    "include_obfuscation": _refused("chunks are not obfuscated", False),
    "include_usage": WORKS,
}


def known_fields(
    body: Mapping[str, object], fields: Mapping[str, Field], within: str = ""
) -> dict[str, object]:
    """What of `body` is in the table; null means that a field was not given.

    `within` is the path of `body`, if it is not the whole. Raises FieldError for a refused field.
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
