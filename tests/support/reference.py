"""Reference answers of plain mlx-lm, which every path through the engine must equal.

`generate` decodes them one token at a time, as mlx-lm does. An answer that is there already needs
no decoding to be compared: it is the greedy one if mlx-lm's own model, given the prompt and the
answer at once, finds each token the likeliest after those before. `is_answer` asks that first, for
one pass costs far less than a step for each token; `test_reference.py` compares the two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import cachetools
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

import semantic.adapters.mlx  # noqa: F401  loads OpenBLAS before MLX
from tests.support.eight_bits import new_caches
from tests.support.lanes import THOROUGH
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
    if not _may_be_divided(model):
        return cast(list[_Cache], new_caches(model)), 0
    stop = (len(prompt) - 1) // _CHUNK * _CHUNK
    start = next(
        (at for at in range(stop, 0, -_CHUNK) if (identity, prompt[:at]) in _beginnings), 0
    )
    known = _beginnings[identity, prompt[:start]] if start else new_caches(model)
    caches = copy.deepcopy(cast(list[_Cache], known))
    for at in range(start, stop, _CHUNK):
        model(mx.array([prompt[at : at + _CHUNK]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        _beginnings[identity, prompt[: at + _CHUNK]] = copy.deepcopy(caches)
    return caches, stop


def _may_be_divided(model: Module) -> bool:
    """Whether a prompt's chunks do not matter; else only mlx-lm's own division is right."""
    arguments = getattr(model, "args", None) or getattr(model, "config", None)
    scaling = getattr(arguments, "rope_scaling", None) or {}
    return "dynamic" not in scaling.values() and getattr(model, "model_type", "") != "plamo3"


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
    """Whether `found` is what mlx-lm answers to `prompt`, as `same_answer` compares.

    In the thorough lane mlx-lm always decodes its own answer.
    """
    if not THOROUGH and len(found) == max_tokens and is_greedy(model, prompt, found):
        return True
    return same_answer(model, prompt, found, generate(model, prompt, max_tokens))


def is_greedy(model: Module, prompt: Sequence[int], found: Sequence[int]) -> bool:
    """Whether mlx-lm finds each token of `found` the likeliest after those before.

    Computed in chunks of the prompt and `found` at once, with mlx-lm's own caches.
    """
    if not found:
        return True
    if not _may_be_divided(model):
        return False  # a token that is decoded differs
    caches, n_cached = _begun(model, tuple(prompt))
    given = [*prompt[n_cached:], *found[:-1]]
    likeliest: list[int] = []
    for at in range(0, len(given), _CHUNK):
        logits = model(mx.array([given[at : at + _CHUNK]]), cache=caches)[0]
        likeliest += cast(list[int], mx.argmax(logits, axis=-1).tolist())
    return likeliest[-len(found) :] == list(found)


def logit_gap(model: Module, tokens: Sequence[int], rivals: tuple[int, int]) -> float:
    """How far apart two next tokens are for the model alone, relative to the largest logit."""
    logits = model(mx.array([list(tokens)]))[0, -1].astype(mx.float32)
    gap = mx.abs(logits[rivals[0]] - logits[rivals[1]]) / mx.abs(logits).max()
    return cast(float, gap.item())
