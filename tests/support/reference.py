"""Reference answers of plain mlx-lm, which every path through the engine must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import cachetools
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import semantic.adapters.mlx  # noqa: F401  loads OpenBLAS before MLX
from tests.support.rounding import equally_likely

_CHUNK: Final = 256
"""Tokens of a prompt computed at once: attention over a long prompt in one piece costs far more."""

_MOST_BEGINNINGS: Final = 192


class _Cache(Protocol):
    @property
    def state(self) -> object: ...


_Key = tuple[tuple[int, ...], tuple[int, ...]]
_beginnings: cachetools.LRUCache[_Key, list[_Cache]] = cachetools.LRUCache(_MOST_BEGINNINGS)
"""mlx-lm's own caches after whole chunks of prompts, by the model's weights and the tokens."""

_weights: dict[int, mx.array] = {}
"""Every weight that a key names, so that no other array takes over its id."""


def generate(
    model: Module, prompt: Sequence[int], max_tokens: int, eos: frozenset[int] = frozenset()
) -> list[int]:
    """Greedy tokens of mlx-lm's own generation loop, with its own caches; the EOS included.

    Whole chunks that prompts begin with alike are computed once in a process.
    """
    caches, n_cached = _begun(model, tuple(prompt))
    rest = mx.array(list(prompt[n_cached:]))
    tokens = []
    for token, _ in generate_step(rest, model, max_tokens=max_tokens, prompt_cache=caches):
        tokens.append(int(token))
        if token in eos:
            break
    return tokens


def _begun(model: Module, prompt: tuple[int, ...]) -> tuple[list[_Cache], int]:
    """Caches that hold the prompt's whole chunks but for its last token, and how many tokens."""
    identity = _identity(model)
    stop = (len(prompt) - 1) // _CHUNK * _CHUNK
    start = next(
        (at for at in range(stop, 0, -_CHUNK) if (identity, prompt[:at]) in _beginnings), 0
    )
    known = _beginnings[identity, prompt[:start]] if start else make_prompt_cache(model)
    caches = copy.deepcopy(cast(list[_Cache], known))
    for at in range(start, stop, _CHUNK):
        model(mx.array([prompt[at : at + _CHUNK]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        _beginnings[identity, prompt[: at + _CHUNK]] = copy.deepcopy(caches)
    return caches, stop


def _identity(model: Module) -> tuple[int, ...]:
    """The model and its weights: another tuple as soon as one of them was exchanged."""
    parameters = cast("Callable[[], object]", model.parameters)()
    leaves = cast(list[tuple[str, mx.array]], tree_flatten(parameters))
    for _, weight in leaves:
        _weights[id(weight)] = weight
    return (id(type(model)), *(id(weight) for _, weight in leaves))


def same_answer(
    model: Module, prompt: Sequence[int], found: Sequence[int], expected: Sequence[int]
) -> bool:
    """Whether greedy tokens are the expected ones, but for a choice between equally likely tokens.

    From such a choice on `found` must be what mlx-lm answers to the tokens before.
    """
    for i, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            if not equally_likely(model, [*prompt, *expected[:i]], (one, other)):
                return False
            so_far, rest = [*prompt, *found[: i + 1]], found[i + 1 :]
            return not rest or is_answer(model, so_far, rest, len(rest))
    return len(found) == len(expected)


def is_answer(model: Module, prompt: Sequence[int], found: Sequence[int], max_tokens: int) -> bool:
    """Whether `found` is what mlx-lm answers to `prompt`, as `same_answer` compares."""
    return same_answer(model, prompt, found, generate(model, prompt, max_tokens))


def logit_gap(model: Module, tokens: Sequence[int], rivals: tuple[int, int]) -> float:
    """How far apart two next tokens are for the model alone, relative to the largest logit."""
    logits = model(mx.array([list(tokens)]))[0, -1].astype(mx.float32)
    gap = mx.abs(logits[rivals[0]] - logits[rivals[1]]) / mx.abs(logits).max()
    return cast(float, gap.item())
