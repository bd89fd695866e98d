"""The body of a completion as what is asked of the served model.

Everything is checked before anything is asked. Knows the wire's fields; not how answers come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.caller import Caller
from semantic.adapters.http.openai.choices import asks_for, number_of_choices
from semantic.adapters.http.openai.fields import COMPLETION_FIELDS, known_fields
from semantic.adapters.http.openai.limits import at_least_one, check_model
from semantic.adapters.http.openai.sampling import sampling_of
from semantic.adapters.http.openai.stream_options import StreamOptions, stream_options
from semantic.adapters.http.request_body import validated
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, ServedModel

if TYPE_CHECKING:
    from semantic.adapters.http.openai.body_types import CompletionBody

_USUAL_MAX_TOKENS: Final = 16
"""As OpenAI documents it."""

_MOST_LOGPROBS: Final = 5

TextPrompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for completions: an ask for each of the `n` choices of each prompt.

    With `only_score` nothing is to be answered: the one token that a request has to generate is
    not told.
    """

    prompts: tuple[TextPrompt, ...]
    asks: tuple[Ask, ...]
    n: int
    options: StreamOptions
    echo: bool = False
    logprobs: bool = False
    only_score: bool = False


def completion_request(
    body: Mapping[str, object], model: ServedModel, caller: Caller
) -> CompletionRequest:
    """What `body` asks of `model`. Raises InvalidRequestError and ModelNotFoundError."""
    from semantic.adapters.http.openai.body_types import completion_adapter, plain_fields

    known = known_fields(body, COMPLETION_FIELDS)
    prompts = prompts_of(known.get("prompt"), model.vocab_size)
    checked = validated(completion_adapter(), plain_fields(known))
    check_model(checked["model"], model)
    n = number_of_choices(checked.get("n"), len(prompts))
    _check_best_of(checked.get("best_of"), n)
    echo = bool(checked.get("echo"))
    max_tokens = _max_tokens(checked.get("max_tokens"), echo=echo)
    sampling = sampling_of(checked, known.get("stop"), model)
    sampling = _with_logprobs(sampling, checked)
    return CompletionRequest(
        prompts,
        asks_for(prompts, n, sampling, max(max_tokens, 1), caller),
        n,
        stream_options(known, force_usage=caller.force_usage),
        echo=echo,
        logprobs=checked.get("logprobs") is not None,
        only_score=max_tokens == 0,
    )


def prompts_of(value: object, vocab_size: int) -> tuple[TextPrompt, ...]:
    """The prompts of a body: a text, a list of texts, token ids, or a list of lists of them.

    Raises FieldError for anything else, for a prompt of nothing, and for an id that is no token.
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
        return _USUAL_MAX_TOKENS
    if value == 0 and echo:
        return 0
    at_least_one("max_tokens", value)
    return value


def _with_logprobs(sampling: SamplingParams, body: CompletionBody) -> SamplingParams:
    top = body.get("logprobs")
    if top is None:
        return sampling
    if not 0 <= top <= _MOST_LOGPROBS:
        raise FieldError(
            f"logprobs must be between 0 and {_MOST_LOGPROBS}, got {top}", param="logprobs"
        )
    return replace(sampling, logprobs=top, prompt_logprobs=top if body.get("echo") else None)
