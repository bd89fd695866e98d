"""Finds out, when a model is loaded, which of its layers can use our ragged caches.

Most of mlx-lm's models can. Some compute with what the cache returns, or call another attention;
their layers keep mlx-lm's own caches. Rather than list models, a few tokens are run both ways.
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
"""Two sequences of different lengths, and the tokens they go on with, all in any vocabulary."""

_TOLERANCE = 1e-3
_TOLERANCE_ROUNDED = 5e-2
"""Largest difference of a logit, relative to the largest logit: in fp32 on a CPU, and elsewhere. A
GPU multiplies fp32 with the mantissa of half precision (TF32)."""

_MOST_STRAYS = 2
"""Of the six logit vectors compared, how many may differ where numbers are rounded: that can send a
token of a mixture of experts to another expert. A layer that is wrong is wrong in all of them."""

# What a model does to a handle that it takes for an array.
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

    All at once if that works, else each layer that works when it is alone. Raises
    UnsupportedModelError when not even mlx-lm's own caches give a batch the right answers.
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
    """Whether a batch gives the right answers with caches in pages."""
    attention_hook.install(model)
    return _works(model, layers, _solo(model))


def padding_works(model: Module) -> bool:
    """Whether a batch gives the right answers with mlx-lm's own padded caches."""
    return _works(model, _Padded(model), _solo(model))


class _Padded:
    """Makes mlx-lm's own caches, which become padded ones in a batch."""

    def __init__(self, model: Module) -> None:
        self._model = model

    def empty(self, capacity: int) -> list[_Evaluated]:  # noqa: ARG002
        return cast(list[_Evaluated], make_prompt_cache(self._model))


def query_heads(model: Module, spec: ModelCacheSpec, kinds: Sequence[PageKind]) -> list[int]:
    """How many heads the queries of each kind's layers have; nothing is computed for it."""
    attention_hook.install(model)
    recorders = [_Recorder() for _ in kinds]
    caches = PagedLayers(spec, kinds, recorders).empty(BLOCK_TOKENS)
    with contextlib.suppress(*_NOT_AN_ARRAY):
        model(mx.zeros((1, 1), dtype=mx.int32), cache=[cache.merge([cache]) for cache in caches])
    return [recorder.n_heads for recorder in recorders]


class _Recorder(PortableAttention):
    """Notes how many query heads there are; 0 when attention was never asked for."""

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
    """Logits (2, vocab) of each step, each sequence alone with mlx-lm's own caches."""
    columns: list[list[mx.array]] = []
    for row, prompt in enumerate(_PROMPTS):
        caches = make_prompt_cache(model)
        logits = [model(mx.array([prompt]), cache=caches)[:, -1]]
        logits += [model(mx.array([[step[row]]]), cache=caches)[:, -1] for step in _STEPS]
        mx.eval(logits)
        columns.append(logits[1:])
    return [mx.concatenate(list(step)) for step in zip(*columns, strict=True)]


def _batched(model: Module, layers: _Layers) -> list[mx.array]:
    """The same, both sequences in one batch."""
    sequences = [layers.empty(BLOCK_TOKENS) for _ in _PROMPTS]
    for caches, prompt in zip(sequences, _PROMPTS, strict=True):
        model(mx.array([prompt]), cache=caches)
        mx.eval([cache.state for cache in caches])
    batch = [cast(_Merges, column[0]).merge(column) for column in zip(*sequences, strict=True)]
    logits = [model(mx.array(step)[:, None], cache=batch)[:, -1] for step in _STEPS]
    mx.eval(logits)
    return logits


def _agree(found: Sequence[mx.array], expected: Sequence[mx.array]) -> bool:
    exact = expected[0].dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu)
    tolerance = _TOLERANCE if exact else _TOLERANCE_ROUNDED
    agreeing = 0
    for ours, theirs in zip(found, expected, strict=True):
        wanted = theirs.astype(mx.float32)
        difference = mx.abs(ours.astype(mx.float32) - wanted).max(axis=-1)
        # A NaN agrees with nothing.
        agreeing += cast(int, (difference <= tolerance * mx.abs(wanted).max(axis=-1)).sum().item())
    compared = len(_STEPS) * len(_PROMPTS)
    return agreeing >= (compared if exact else compared - _MOST_STRAYS)
