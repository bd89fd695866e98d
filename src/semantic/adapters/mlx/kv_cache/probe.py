"""Probe at load: which of a model's layers can use our caches, by running a few tokens both ways.

Most of mlx-lm's models can. Some compute with what the cache returns or call another attention;
their layers keep mlx-lm's own caches. Knows no list of models.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

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

_EXACT = 1e-3
"""Maximum difference of logits on a CPU in fp32, relative to their norm."""

_ROUNDED = {mx.bfloat16: 5e-2}
_ROUNDED_LESS = 2e-2
"""Differences that are rounding in any model, by type; fp16, and fp32 that a GPU multiplies in
TF32, have three more bits than bf16."""

_TIMES_MLX_LM = 2.0
_MOST_ROUNDED = 0.4
"""Rounding is up to so many times what mlx-lm's own batch differs by, and at most this: in a deep
mixture of experts it routes tokens to other experts. Wrong attention in one kind of layers differs
by 0.8 and more."""

_STRAYS = 2
"""How many of the six logit vectors do not count under rounding: those that differ most. Rounding
can route a token of a mixture of experts to another expert; a layer that is wrong is wrong in
all."""

# What a model raises that uses a handle as an array.
_NOT_AN_ARRAY = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class _Evaluated(Protocol):
    @property
    def state(self) -> object: ...


class _Layers(Protocol):
    def empty(self, capacity: int) -> Sequence[_Evaluated]: ...


class _Merges(Protocol):
    def merge(self, caches: Sequence[object]) -> object: ...


class LogitsProbe:
    """A model's logits of sequences that decode alone; compares batches with other caches to them.

    Batches add in another order than single sequences, so on a GPU their logits differ. How much is
    rounding is measured: mlx-lm's own batch of the same sequences is the yardstick.
    """

    def __init__(self, model: Module, decoding: Module | None = None) -> None:
        """Single sequences are computed by `model`, batches by `decoding` if it is another."""
        attention_hook.install(model)
        self.model = model
        self._decoding = decoding or model

    def accepts(self, layers: _Layers) -> bool:
        """Whether a batch with these caches computes the right logits."""
        try:
            found = _batched(self._decoding, layers)
        except _NOT_AN_ARRAY:
            return False
        differences = self._differences(found)
        if self._exact:
            return all(one <= _EXACT for one in differences)
        counted = _without_strays(differences)
        # False for NaN. The yardstick costs a run of its own and is rarely needed.
        return counted <= self._rounded or counted <= self._yardstick

    def accepts_padding(self) -> bool:
        """Whether a batch with mlx-lm's own padded caches computes the right logits."""
        return self.accepts(_Padded(self.model))

    @functools.cached_property
    def _solo(self) -> list[mx.array]:
        return _solo(self.model)

    @property
    def _exact(self) -> bool:
        return self._solo[0].dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu)

    @property
    def _rounded(self) -> float:
        return _ROUNDED.get(self._solo[0].dtype, _ROUNDED_LESS)

    @functools.cached_property
    def _yardstick(self) -> float:
        """The largest difference that is rounding in this model; 0 if mlx-lm's batch is wrong."""
        try:
            padded = self._differences(_batched(self.model, _Padded(self.model)))
        except _NOT_AN_ARRAY:
            return 0.0
        theirs = _without_strays(padded)
        return min(_TIMES_MLX_LM * theirs, _MOST_ROUNDED) if theirs <= _MOST_ROUNDED else 0.0

    def _differences(self, found: Sequence[mx.array]) -> list[float]:
        """Of each logit vector, relative to its norm."""
        differences: list[float] = []
        for ours, alone in zip(found, self._solo, strict=True):
            right = alone.astype(mx.float32)
            apart = mx.linalg.norm(ours.astype(mx.float32) - right, axis=-1)
            differences += cast(list[float], (apart / mx.linalg.norm(right, axis=-1)).tolist())
        return differences


def choose_layers(
    probe: LogitsProbe, spec: ModelCacheSpec, shapes: Sequence[LayerShape | None]
) -> tuple[bool, ...]:
    """For each layer whether it can use our cache.

    All layers together if that works, else each layer that works alone. Raises
    UnsupportedModelError if a batch is wrong even with mlx-lm's own caches.
    """
    model = probe.model

    def works(ragged: Sequence[bool]) -> bool:
        return probe.accepts(ContiguousLayers(model, spec, shapes, ragged))

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


class _Padded:
    """Makes mlx-lm's own caches, which a batch pads."""

    def __init__(self, model: Module) -> None:
        self._model = model

    def empty(self, capacity: int) -> list[_Evaluated]:  # noqa: ARG002
        return cast(list[_Evaluated], make_prompt_cache(self._model))


class AttentionUse(NamedTuple):
    """How a kind's layers call attention: number of query heads, and with sinks, without or both.

    No query heads if attention was never called.
    """

    n_heads: int
    sinks: frozenset[bool]


def attention_use(
    model: Module, spec: ModelCacheSpec, kinds: Sequence[PageKind]
) -> list[AttentionUse]:
    """How each kind's layers call attention in a batch; nothing is computed."""
    attention_hook.install(model)
    recorders = [_Recorder() for _ in kinds]
    caches = PagedLayers(spec, kinds, recorders).empty(BLOCK_TOKENS)
    with contextlib.suppress(*_NOT_AN_ARRAY):
        model(mx.zeros((1, 1), dtype=mx.int32), cache=[cache.merge([cache]) for cache in caches])
    return [AttentionUse(recorder.n_heads, frozenset(recorder.sinks)) for recorder in recorders]


class _Recorder(PortableAttention):
    """Records how attention is called."""

    def __init__(self) -> None:
        self.n_heads = 0
        self.sinks: set[bool] = set()

    def attend(self, step: DecodeStep) -> mx.array:
        self.n_heads = step.q.shape[1]
        self.sinks.add(step.sinks is not None)
        return step.q


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


def _without_strays(differences: Sequence[float]) -> float:
    """The mean of all but the largest; NaN if one is NaN."""
    if any(math.isnan(one) for one in differences):
        return math.nan
    return statistics.mean(sorted(differences)[:-_STRAYS])
