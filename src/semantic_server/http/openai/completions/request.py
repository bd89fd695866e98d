"""The body of a completion, parsed into one engine request per choice of each prompt.

Validates every field before anything is generated. Knows the wire's fields; not its replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from semantic.application.chat.call_grammar import answer_grammar
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, ServedModel
from semantic_server.http.errors import FieldError
from semantic_server.http.openai.fields import (
    COMPLETION_FIELDS,
    at_least_one,
    known_fields,
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
from semantic_server.http.openai.validators import CompletionBody, completion_adapter
from semantic_server.http.request_body import validated

_DEFAULT_MAX_TOKENS: Final = 16
"""As OpenAI documents it."""

_MAX_LOGPROBS: Final = 5

TextPrompt = str | tuple[int, ...]
"""A text or token ids."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Completions: one engine request for each of the `n` choices of each prompt.

    With `only_score` the prompt is scored and nothing answered: the one token that the engine has
    to generate is not returned.
    """

    prompts: tuple[TextPrompt, ...]
    choices: tuple[Ask, ...]
    n: int
    options: StreamOptions
    echo: bool = False
    logprobs: bool = False
    only_score: bool = False


def completion_request(
    body: Mapping[str, object], model: ServedModel, caller: Caller
) -> CompletionRequest:
    """Parse `body`. Raises InvalidRequestError and ModelNotFoundError."""
    known = known_fields(body, COMPLETION_FIELDS)
    prompts = _prompts(known.get("prompt"), model.vocab_size)
    checked = validated(completion_adapter(), without_elements(known))
    check_model(checked["model"], model)
    n = number_of_choices(checked.get("n"), len(prompts))
    _check_best_of(checked.get("best_of"), n)
    echo = bool(checked.get("echo"))
    max_tokens = _max_tokens(checked.get("max_tokens"), echo=echo)
    sampling = sampling_of(checked, known.get("stop"), model)
    sampling = _with_logprobs(sampling, checked)
    form = constraint_of(known)
    if form is not None:
        sampling = replace(sampling, grammar=answer_grammar(form))
    return CompletionRequest(
        prompts,
        choices_of(prompts, n, sampling, max(max_tokens, 1), caller),
        n,
        stream_options(known, force_usage=caller.force_usage),
        echo=echo,
        logprobs=checked.get("logprobs") is not None,
        only_score=max_tokens == 0,
    )


def _prompts(value: object, vocab_size: int) -> tuple[TextPrompt, ...]:
    """The field `prompt`: a text, a list of texts, token ids, or a list of lists of token ids.

    Raises FieldError for anything else, for an empty prompt and for an unknown token id.
    """
    if isinstance(value, list) and value and not _are_ids(value):
        return tuple(_prompt(f"prompt[{i}]", one, vocab_size) for i, one in enumerate(value))
    return (_prompt("prompt", value, vocab_size),)


def _prompt(path: str, value: object, vocab_size: int) -> TextPrompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and _are_ids(value):
        _check_ids(path, value, vocab_size)
        return tuple(value)
    empty = value in ("", [])
    expected = "it must not be empty" if empty else "expected a text or token ids"
    raise FieldError(f"{path}: {expected}", param=path)


def _are_ids(values: Sequence[object]) -> bool:
    return all(type(one) is int for one in values)


def _check_ids(path: str, ids: Sequence[int], vocab_size: int) -> None:
    wrong = next((i for i, one in enumerate(ids) if not 0 <= one < vocab_size), None)
    if wrong is not None:
        at = f"{path}[{wrong}]"
        raise FieldError(f"{at}: token ids are 0 or more and below {vocab_size}", param=at)


def _check_best_of(best_of: int | None, n: int) -> None:
    if best_of not in {None, n}:
        raise FieldError(
            f"best_of: expected n ({n}), all choices are returned; got {best_of}", param="best_of"
        )


def _max_tokens(value: int | None, *, echo: bool) -> int:
    if value is None:
        return _DEFAULT_MAX_TOKENS
    if value == 0 and echo:
        return 0
    at_least_one("max_tokens", value)
    return value


def _with_logprobs(sampling: SamplingParams, body: CompletionBody) -> SamplingParams:
    top = body.get("logprobs")
    if top is None:
        return sampling
    if not 0 <= top <= _MAX_LOGPROBS:
        raise FieldError(
            f"logprobs must be between 0 and {_MAX_LOGPROBS}, got {top}", param="logprobs"
        )
    return replace(sampling, logprobs=top, prompt_logprobs=top if body.get("echo") else None)
