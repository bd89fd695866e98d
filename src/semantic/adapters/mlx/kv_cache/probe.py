"""Probe at load: which of a model's layers can use our caches, by running a few tokens both ways.

Most of mlx-lm's models can. Some compute with what the cache returns or call another attention;
their layers keep mlx-lm's own caches. Knows no list of models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from semantic.adapters.mlx.kv_cache import attention_hook
from semantic.adapters.mlx.kv_cache.contiguous.layers import ContiguousLayers
from semantic.adapters.mlx.kv_cache.paged.attention import DecodeStep, PortableAttention
from semantic.adapters.mlx.kv_cache.paged.kinds import PageKind
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.errors import UnsupportedModelError
from semantic.domain.value_objects import BLOCK_TOKENS, ModelCacheSpec

_PROMPTS = ((3, 1, 4), (1, 5, 9, 2, 6, 5, 3))
_STEPS = ((2, 7), (1, 8), (2, 8))
"""Two sequences of different lengths and the tokens that follow, valid in any vocabulary."""

_TOLERANCE = 1e-3
_TOLERANCE_ROUNDED = 5e-2
"""Maximum difference of a logit, relative to the largest: for fp32 on a CPU, and elsewhere. GPUs
multiply fp32 in TF32, with the mantissa of half precision."""

_MOST_STRAYS = 2
"""How many of the six logit vectors may differ under rounding, which can route a token of a mixture
of experts to another expert. A layer that is wrong is wrong in all of them."""

# What a model raises that uses a handle as an array.
_NOT_AN_ARRAY = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class _Evaluated(Protocol):
    @property
    def state(self) -> object: ...


class _Layers(Protocol):
    def empty(self, capacity: int) -> Sequence[_Evaluated]: ...


class _Merges(Protocol):
    def merge(self, caches: Sequence[object]) -> object: ...


def choose_layers(
    model: Module, spec: ModelCacheSpec, shapes: Sequence[LayerShape | None]
) -> tuple[bool, ...]:
    """For each layer whether it can use our cache.

    All layers together if that works, else each layer that works alone. Raises
    UnsupportedModelError if a batch is wrong even with mlx-lm's own caches.
    """
    attention_hook.install(model)
    expected = _solo(model)

    def works(ragged: Sequence[bool]) -> bool:
        return _works(model, ContiguousLayers(model, spec, shapes, ragged), expected)

    everything = tuple(shape is not None for shape in shapes)
    if not any(everything) or works(everything):
        return everything
    alone = tuple(
        possible and works([i == layer for i in range(spec.n_layers)])
        for layer, possible in enumerate(everything)
    )
    nothing = (False,) * spec.n_layers
    for ragged in (alone, nothing):
        if works(ragged):
            return ragged
    raise UnsupportedModelError(
        f"{type(model).__module__} gives other answers in a batch than alone, "
        "also with mlx-lm's own caches"
    )


def pages_work(model: Module, layers: PagedLayers) -> bool:
    """Whether a batch computes the right logits with caches in pages."""
    attention_hook.install(model)
    return _works(model, layers, _solo(model))


def padding_works(model: Module) -> bool:
    """Whether a batch computes the right logits with mlx-lm's own padded caches."""
    return _works(model, _Padded(model), _solo(model))


class _Padded:
    """Makes mlx-lm's own caches, which a batch pads."""

    def __init__(self, model: Module) -> None:
        self._model = model

    def empty(self, capacity: int) -> list[_Evaluated]:  # noqa: ARG002
        return cast(list[_Evaluated], make_prompt_cache(self._model))


def query_heads(model: Module, spec: ModelCacheSpec, kinds: Sequence[PageKind]) -> list[int]:
    """Number of query heads of each kind's layers; nothing is computed."""
    attention_hook.install(model)
    recorders = [_Recorder() for _ in kinds]
    caches = PagedLayers(spec, kinds, recorders).empty(BLOCK_TOKENS)
    with contextlib.suppress(*_NOT_AN_ARRAY):
        model(mx.zeros((1, 1), dtype=mx.int32), cache=[cache.merge([cache]) for cache in caches])
    return [recorder.n_heads for recorder in recorders]


class _Recorder(PortableAttention):
    """Records the number of query heads; 0 if attention was never called."""

    def __init__(self) -> None:
        self.n_heads = 0

    def attend(self, step: DecodeStep) -> mx.array:
        self.n_heads = step.q.shape[1]
        return step.q


def _works(model: Module, layers: _Layers, expected: Sequence[mx.array]) -> bool:
    try:
        return _agree(_batched(model, layers), expected)
    except _NOT_AN_ARRAY:
        return False


def _solo(model: Module) -> list[mx.array]:
    """Logits (2, vocab) of each step, each sequence alone, with mlx-lm's own caches."""
    by_sequence: list[list[mx.array]] = []
    for row, prompt in enumerate(_PROMPTS):
        caches = make_prompt_cache(model)
        logits = [model(mx.array([prompt]), cache=caches)[:, -1]]
        logits += [model(mx.array([[step[row]]]), cache=caches)[:, -1] for step in _STEPS]
        mx.eval(logits)
        by_sequence.append(logits[1:])
    return [mx.concatenate(list(step)) for step in zip(*by_sequence, strict=True)]


def _batched(model: Module, layers: _Layers) -> list[mx.array]:
    """`_solo` with both sequences in one batch."""
    sequences = [layers.empty(BLOCK_TOKENS) for _ in _PROMPTS]
    for caches, prompt in zip(sequences, _PROMPTS, strict=True):
        model(mx.array([prompt]), cache=caches)
        mx.eval([cache.state for cache in caches])
    batch = [cast(_Merges, layer[0]).merge(layer) for layer in zip(*sequences, strict=True)]
    logits = [model(mx.array(step)[:, None], cache=batch)[:, -1] for step in _STEPS]
    mx.eval(logits)
    return logits


def _agree(found: Sequence[mx.array], expected: Sequence[mx.array]) -> bool:
    exact = expected[0].dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu)
    tolerance = _TOLERANCE if exact else _TOLERANCE_ROUNDED
    agreeing = 0
    for ours, theirs in zip(found, expected, strict=True):
        right = theirs.astype(mx.float32)
        difference = mx.abs(ours.astype(mx.float32) - right).max(axis=-1)
        # False for NaN.
        agreeing += cast(int, (difference <= tolerance * mx.abs(right).max(axis=-1)).sum().item())
    compared = len(_STEPS) * len(_PROMPTS)
    return agreeing >= (compared if exact else compared - _MOST_STRAYS)
