"""Which decode batch a model gets on this device, and the measurement that decides on padding.

Ragged and padded batches are timed with real steps over random keys and values, sequences of equal
length. What padding costs beyond its attention is bounded, not measured: capacities may not differ
much. Knows devices and forms of caches; not which requests decode.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module

from semantic.adapters.mlx.batch.decode_batch import (
    Agree,
    ContinuousBatch,
    DecodeBatch,
    NewSequence,
)
from semantic.adapters.mlx.batch.generator_batch import GeneratorBatch, OneByOne
from semantic.adapters.mlx.batch.padded_batch import PaddedBatch
from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache.contiguous.cache import FullCache
from semantic.adapters.mlx.kv_cache.contiguous.layers import ContiguousLayers
from semantic.adapters.mlx.kv_cache.forms import CacheLayers, LayerCache
from semantic.adapters.mlx.kv_cache.probe import LogitsProbe
from semantic.adapters.mlx.sampling.sampler import make_sampler
from semantic.domain.errors import UnsupportedModelError
from semantic.domain.value_objects import (
    BLOCK_TOKENS,
    LayerKind,
    ModelCacheSpec,
    SamplingParams,
    SequenceId,
)
from semantic.ports.generation import at_once

BATCHES = (1, 2, 4, 8)
"""Batch sizes to measure."""

_WARM_UP, _STEPS = 3, 7
_TOKENS = BLOCK_TOKENS - 2 * (_WARM_UP + _STEPS)
"""Tokens of each sequence, so that all steps fit into its first block."""

_CLEARLY = 0.9
"""Padding is chosen if it takes at most this share of the ragged time; less gain is noise."""

_MAX_PADDING_RATIO = 1.5
"""Maximum memory of a padded batch, relative to the capacity of its sequences: a pool's budget
counts capacity without padding, and attention over more was not measured."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of a step of `batch` sequences, ragged and padded."""

    batch: int
    ragged_ms: float
    padded_ms: float

    @property
    def padded(self) -> bool:
        """Whether a batch of this size decodes padded."""
        return self.padded_ms <= _CLEARLY * self.ragged_ms


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measurements, smallest batch first, and the decision that follows."""

    times: tuple[StepTimes, ...]
    max_padding_ratio: float = _MAX_PADDING_RATIO

    def pads(self, capacities: Sequence[int]) -> bool:
        """Whether sequences of these capacities (tokens each) should decode padded.

        Uses the largest measured batch that is not larger: ragged attention costs more with each
        sequence, so what pays for fewer pays for more.
        """
        measured = [one for one in self.times if one.batch <= len(capacities)]
        if not measured or not measured[-1].padded:
            return False
        return len(capacities) * max(capacities) <= self.max_padding_ratio * sum(capacities)


def calibrate(
    model: Module, layers: CacheLayers, clock: Callable[[], float] = time.perf_counter
) -> Calibration:
    """Time a few steps of batches of each size, ragged and padded.

    All caches of `layers` must be `FullCache`s.
    """

    def timed(batch: ContinuousBatch, size: int) -> float:
        return _step_ms(batch, [_filled(layers) for _ in range(size)], clock)

    times = tuple(
        StepTimes(
            size,
            timed(ContinuousBatch(model), size),
            timed(PaddedBatch(model, lambda _: True, stable_steps=0), size),
        )
        for size in BATCHES
    )
    mx.clear_cache()
    return Calibration(times)


def _step_ms(
    batch: ContinuousBatch, sequences: Sequence[list[LayerCache]], clock: Callable[[], float]
) -> float:
    """Median time of a step; each waits for the one before it, as in service."""
    taken: list[float] = []
    greedy = make_sampler(SamplingParams(), 0)
    with mx.stream(batch.stream):
        batch.join(
            [
                NewSequence(SequenceId(i), caches, 0, [], greedy, [], logprobs=False)
                for i, caches in enumerate(sequences)
            ]
        )
        for _ in range(_WARM_UP + _STEPS):
            start = clock()
            batch.step()
            taken.append(clock() - start)
    mx.synchronize(batch.stream)
    return 1000 * statistics.median(taken[_WARM_UP:])


def _filled(layers: CacheLayers) -> list[LayerCache]:
    """Caches of a sequence of random keys and values; MLX's global random state is untouched."""
    caches = layers.empty(BLOCK_TOKENS)
    for number, cache in enumerate(caches):
        if isinstance(cache, FullCache):
            k, v = (
                mx.random.normal(
                    (*x.shape[:2], _TOKENS, x.shape[3]), x.dtype, key=mx.random.key(number)
                )
                for x in cache.state
            )
            cache.buffer.write(0, _TOKENS, k, v)
            cache.offset = _TOKENS
    mx.eval([cache.state for cache in caches])
    return caches


CalibrationFor = Callable[[Module, CacheLayers], Calibration | None]
"""Measures a model's batches; returns None if they decode ragged without a measurement."""


def calibrate_here(model: Module, layers: CacheLayers) -> Calibration | None:
    """Measure on a GPU; None on a CPU, where padding gains nothing."""
    if on_cpu() or not padding_works(model):
        return None
    try:
        return calibrate(model, layers)
    except RuntimeError:
        return None  # too little memory for a few blocks is too little for copies later


def padding_works(model: Module) -> bool:
    """Whether a batch computes the right logits with mlx-lm's own padded caches.

    Also beyond windows, chunks and budgets of sparse attention: there padding may move a choice.
    """
    probe = LogitsProbe(model)
    with probe.narrowed() as narrow:
        if narrow is not None and at_once(narrow.computing()) and not narrow.accepts_padding():
            return False
    return probe.accepts_padding()


def choose_batching(
    model: Module, spec: ModelCacheSpec, layers: CacheLayers, measure: CalibrationFor
) -> Calibration | None:
    """The measurements of a model whose batches can decode ragged and padded; else None.

    All its layers must keep every token, in contiguous caches of ours.
    """
    if not isinstance(layers, ContiguousLayers) or not all(layers.ragged):
        return None
    if any(layer.kind is not LayerKind.FULL for layer in spec.layers):
        return None
    return measure(model, layers)


def new_batch(
    model: Module,
    layers: CacheLayers,
    calibration: Calibration | None,
    agree: Agree | None = None,
) -> DecodeBatch:
    """An empty batch for sequences with the caches of `layers`. Raises UnsupportedModelError if
    ranks cannot `agree` on its tokens."""
    if not layers.together:
        return OneByOne(model, agree)
    if not all(layers.ragged):
        if agree is not None:
            raise UnsupportedModelError(
                "batches of this model need mlx-lm's own caches: start it on one device"
            )
        return GeneratorBatch(model)
    if calibration is None:
        return ContinuousBatch(model, agree=agree)
    return PaddedBatch(model, calibration.pads)
