"""How a model's sequences decode together on this device, and the batch that does it.

In pages, one by one, padded by mlx-lm, or one by one and padded in turns, as a calibration says.
Knows devices and forms of caches; not who decodes.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx.nn.layers.base import Module

from semantic.adapters.mlx.cache_forms import SequenceLayers
from semantic.adapters.mlx.calibration import Calibration, calibrate
from semantic.adapters.mlx.decode_batch import DecodeBatch, OwnBatch
from semantic.adapters.mlx.generator_batch import GeneratorBatch
from semantic.adapters.mlx.layer_caches import LayerCaches
from semantic.adapters.mlx.padded_batch import PaddedBatch
from semantic.adapters.mlx.probe import padding_works
from semantic.domain.value_objects import LayerKind, ModelCacheSpec

CalibrationFor = Callable[[Module, SequenceLayers], Calibration | None]
"""Measures a model's batches; None where one by one is the choice without that."""


def calibrate_here(model: Module, layers: SequenceLayers) -> Calibration | None:
    """Measure on a GPU. On a CPU padding gains nothing, and no time at load is spent on it."""
    if mx.default_device() == mx.Device(mx.cpu) or not padding_works(model):
        return None
    try:
        return calibrate(model, layers)
    except RuntimeError:
        return None  # no room for a few blocks now: then there is none for copies later


def choose_batching(
    model: Module, spec: ModelCacheSpec, layers: SequenceLayers, measure: CalibrationFor
) -> Calibration | None:
    """What was measured, for a model whose batches can decode in both ways; else None.

    All its layers must keep every token, in buffers of our own.
    """
    if not isinstance(layers, LayerCaches) or not all(layers.ragged):
        return None
    if any(layer.kind is not LayerKind.FULL for layer in spec.layers):
        return None
    return measure(model, layers)


def new_batch(
    model: Module, layers: SequenceLayers, calibration: Calibration | None
) -> DecodeBatch:
    """An empty batch for sequences with caches that `layers` make."""
    if not all(layers.ragged):
        return GeneratorBatch(model)
    return OwnBatch(model) if calibration is None else PaddedBatch(model, calibration.pads)
