"""The fields that say how tokens are chosen, as sampling parameters; the same on both wires.

Starts from what the served model does by itself. Knows nothing of messages or prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.parts import list_at, text_at
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import ServedModel

if TYPE_CHECKING:
    from semantic.adapters.http.openai.body_types import ChatBody, CompletionBody, ResponseBody

_RANGES: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}

_LEAST: Final = 1e-6
"""A temperature or a top_p below means the likeliest token alone: in fp32 the one has no
reciprocal and the other is nothing, and any token could come."""

_MOST_BIAS: Final = 100
_MOST_STOPS: Final = 64
_SEEDS: Final = 2**63


def sampling_of(
    body: ChatBody | CompletionBody | ResponseBody, stop: object, model: ServedModel
) -> SamplingParams:
    """What `model` does by itself with all that `body` asks for, and `stop` as it was given.

    Raises FieldError for a value that cannot be.
    """
    usual = model.sampling
    temperature = _number(body, "temperature", usual.temperature)
    sampling = replace(
        usual,
        temperature=0 if temperature < _LEAST else temperature,
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
        # OpenAI's seeds are any 64-bit integers, ours are not negative.
        sampling = replace(sampling, seed=seed % _SEEDS)
    if "ignore_eos" in body:
        sampling = replace(sampling, ignore_eos=body["ignore_eos"])
    return sampling


def for_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """What choice number `choice` of one request samples with: a seed of its own."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + choice) % _SEEDS)


def _number(body: Mapping[str, object], name: str, usual: float) -> float:
    """The number called `name`, or `usual`. Raises FieldError for one out of its range."""
    value = body.get(name)
    if not isinstance(value, (int, float)):
        return usual
    low, high = _RANGES[name]
    if not low <= value <= high:
        raise FieldError(f"{name} must be between {low} and {high}, got {value}", param=name)
    return float(value)


def _with_other_neutrals(
    sampling: SamplingParams, body: ChatBody | CompletionBody | ResponseBody
) -> SamplingParams:
    """With the fields whose neutral value is another one on the wire than here."""
    if "top_k" in body:
        top_k = body["top_k"]
        if top_k < -1:
            raise FieldError(f"top_k must be -1 or more, got {top_k}", param="top_k")
        sampling = replace(sampling, top_k=max(top_k, 0))
    top_p = body.get("top_p")
    if top_p is not None and top_p < _LEAST:
        # None of the probability mass is the likeliest token alone; our 0 means all of it.
        sampling = replace(sampling, top_p=0, top_k=1)
    if "repetition_penalty" in body:
        penalty = _number(body, "repetition_penalty", 1)
        sampling = replace(sampling, repetition_penalty=None if penalty == 1 else penalty)
    return sampling


def _stops(stop: object) -> tuple[str, ...]:
    given = [stop] if isinstance(stop, str) else list_at("stop", stop)
    stops = tuple(text_at(f"stop[{i}]", one) for i, one in enumerate(given))
    if len(stops) > _MOST_STOPS:
        raise FieldError(f"stop: expected {_MOST_STOPS} texts at most", param="stop")
    if not all(stops):
        raise FieldError("stop: expected texts that are not empty", param="stop")
    return stops


def _biases(biases: Mapping[str, int], vocab_size: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):  # noqa: PLR2004
            raise FieldError(f"logit_bias: {token[:40]!r} is no token id", param="logit_bias")
        if int(token) >= vocab_size:
            raise FieldError(
                f"logit_bias: token ids are below {vocab_size}, got {token}", param="logit_bias"
            )
        if abs(bias) > _MOST_BIAS:
            raise FieldError(
                f"logit_bias must be between -{_MOST_BIAS} and {_MOST_BIAS}, got {bias}",
                param="logit_bias",
            )
        found[int(token)] = float(bias)
    return found
