"""Tiny models whose batches decode padded as soon as they may, wherever the tests run.

"llama padded" is the model "llama" so.
"""

from __future__ import annotations

from collections.abc import Sequence

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.batch.padded_batch import PaddedBatch
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from tests.support.probed import probed_once
from tests.support.tiny_models import tiny_model

PADDED = " padded"


def padded_backend(
    name: str, model_id: str | None = None, texts: MLXTokenizer | None = None
) -> MLXBackend:
    """The tiny model with that name, with or without " padded"."""
    model = tiny_model(name.removesuffix(PADDED))
    with probed_once():
        backend = wrap_model(model, model_id, texts, attention=None, pads=lambda _: _always)
    assert isinstance(backend._batch, PaddedBatch), "the model's batches cannot be padded"
    return backend


def _always(capacities: Sequence[int]) -> bool:  # noqa: ARG001
    """Padded whatever the size, and however long the longest is."""
    return True
