"""How fast a model's batches decode on this device: each sequence for itself, and padded.

Measured with real steps over made-up keys and values, sequences of equal length. What padding costs
beside its attention is bounded, not measured: the longest sequence may not make the others much
longer. Knows no device and no form of caches but the two it compares.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module

from semantic.adapters.mlx.batch.decode_batch import ContinuousBatch, DecodeBatch, NewSequence
from semantic.adapters.mlx.batch.generator_batch import GeneratorBatch
from semantic.adapters.mlx.batch.padded_batch import PaddedBatch
from semantic.adapters.mlx.kv_cache.contiguous.cache import FullCache
from semantic.adapters.mlx.kv_cache.contiguous.layers import ContiguousLayers
from semantic.adapters.mlx.kv_cache.forms import CacheLayers, LayerCache
from semantic.adapters.mlx.kv_cache.probe import padding_works
from semantic.adapters.mlx.sampling.sampler import make_sampler
from semantic.domain.value_objects import (
    BLOCK_TOKENS,
    LayerKind,
    ModelCacheSpec,
    SamplingParams,
    SequenceId,
)

BATCHES = (1, 2, 4, 8)
"""Sizes of the batches that are measured."""

_WARM_UP, _STEPS = 3, 7
_TOKENS = BLOCK_TOKENS - 2 * (_WARM_UP + _STEPS)
"""Of each sequence, so that all steps fit into its first block."""

_CLEARLY = 0.9
"""Of the time one by one: padding is chosen when it takes no more. Less is noise."""

_MOST_ROOM = 1.5
"""A padded batch may take this much of what its sequences have room for: a pool's budget counts
their room and no padding, and nobody measured attention over more."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds that a step of `batch` sequences takes, one by one and padded."""

    batch: int
    ragged_ms: float
    padded_ms: float

    @property
    def padded(self) -> bool:
        """Whether such a batch decodes padded."""
        return self.padded_ms <= _CLEARLY * self.ragged_ms


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, the smallest batch first, and what follows from it."""

    times: tuple[StepTimes, ...]
    max_padding_ratio: float = _MOST_ROOM

    def pads(self, rooms: Sequence[int]) -> bool:
        """Whether sequences with room for that many tokens each should decode padded.

        By the largest batch measured that is not larger than theirs: one by one costs more for
        each sequence more, so what pays for fewer pays for them.
        """
        measured = [one for one in self.times if one.batch <= len(rooms)]
        if not measured or not measured[-1].padded:
            return False
        return len(rooms) * max(rooms) <= self.max_padding_ratio * sum(rooms)


def calibrate(
    model: Module, layers: CacheLayers, clock: Callable[[], float] = time.perf_counter
) -> Calibration:
    """Decode a few steps of batches of each size, in both ways.

    All caches that `layers` make are FullCaches.
    """

    def timed(batch: ContinuousBatch, size: int) -> float:
        return _step_ms(batch, [_filled(layers) for _ in range(size)], clock)

    times = tuple(
        StepTimes(
            size,
            timed(ContinuousBatch(model), size),
            timed(PaddedBatch(model, lambda _: True, calm=0), size),
        )
        for size in BATCHES
    )
    mx.clear_cache()
    return Calibration(times)


def _step_ms(
    batch: ContinuousBatch, sequences: Sequence[list[LayerCache]], clock: Callable[[], float]
) -> float:
    """Median time of a step; as when it serves, each waits for the one before it."""
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
    """Caches of a sequence of random keys and values; nobody else's random numbers change."""
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
"""Measures a model's batches; None where one by one is the choice without that."""


def calibrate_here(model: Module, layers: CacheLayers) -> Calibration | None:
    """Measure on a GPU. On a CPU padding gains nothing, and no time at load is spent on it."""
    if mx.default_device() == mx.Device(mx.cpu) or not padding_works(model):
        return None
    try:
        return calibrate(model, layers)
    except RuntimeError:
        return None  # no room for a few blocks now: then there is none for copies later


def choose_batching(
    model: Module, spec: ModelCacheSpec, layers: CacheLayers, measure: CalibrationFor
) -> Calibration | None:
    """What was measured, for a model whose batches can decode in both ways; else None.

    All its layers must keep every token, in buffers of our own.
    """
    if not isinstance(layers, ContiguousLayers) or not all(layers.ragged):
        return None
    if any(layer.kind is not LayerKind.FULL for layer in spec.layers):
        return None
    return measure(model, layers)


def new_batch(model: Module, layers: CacheLayers, calibration: Calibration | None) -> DecodeBatch:
    """An empty batch for sequences with caches that `layers` make."""
    if not all(layers.ragged):
        return GeneratorBatch(model)
    return ContinuousBatch(model) if calibration is None else PaddedBatch(model, calibration.pads)
