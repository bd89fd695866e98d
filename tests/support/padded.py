"""Tiny models whose batches decode padded as soon as they may, wherever the tests run.

"llama padded" is the model "llama" so.
"""

from __future__ import annotations

import math

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.batch.padded_batch import Calibration, PaddedBatch, StepTimes
from semantic.adapters.mlx.kv_cache.forms import CacheLayers
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from tests.support.probed import probed_once
from tests.support.tiny_models import tiny_model

PADDED = " padded"

ALWAYS = Calibration((StepTimes(1, ragged_ms=2.0, padded_ms=1.0),), max_padding_ratio=math.inf)
"""Padded whatever the size, and however long the longest is."""


def padded_backend(
    name: str, model_id: str | None = None, texts: MLXTokenizer | None = None
) -> MLXBackend:
    """The tiny model with that name, with or without " padded"."""
    model = tiny_model(name.removesuffix(PADDED))
    with probed_once():
        backend = wrap_model(model, model_id, texts, attention=None, calibration=_always)
    assert isinstance(backend._batch, PaddedBatch), "the model's batches cannot be padded"
    return backend


def _always(model: object, layers: CacheLayers) -> Calibration:  # noqa: ARG001
    return ALWAYS
