"""Loads an embedding model: a decoder of mlx-lm with the pooling that its files declare.

Call it from the thread that computes. Knows folders; not who asks for vectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from semantic.adapters.mlx.embedding.decoder import DecoderEmbedder
from semantic.adapters.mlx.embedding.pooling import read_length, read_pooling
from semantic.adapters.mlx.model.details import read_details
from semantic.adapters.mlx.model.provider import LOAD_ERRORS, read_context, reading_model
from semantic.domain.errors import SemanticError, UnsupportedModelError
from semantic.ports.embedding import Embedder
from semantic.ports.serving import ModelDetails
from semantic.ports.slices import at_once

_MOST_TOKENS: Final = 1 << 15
"""The longest text of a model that declares more, or nothing."""


def load_embedder(folder: Path) -> tuple[Embedder, ModelDetails]:
    """The embedding model in `folder`.

    Raises ModelNotFoundError for one that mlx-lm cannot load, and UnsupportedModelError for one
    whose vectors would not be those that its makers describe.
    """
    pooling = read_pooling(folder, default="last")
    model, tokenizer, model_id = at_once(reading_model(folder))
    limits = (read_length(folder), read_context(model), _MOST_TOKENS)
    most = min(one for one in limits if one is not None)
    try:
        embedder = DecoderEmbedder(model, tokenizer, f"{model_id}:{pooling}", pooling, most)
    except SemanticError:
        raise
    except LOAD_ERRORS as error:
        raise UnsupportedModelError(f"cannot compute the model in {folder}: {error}") from error
    details = read_details(model, model_id, folder, template="", thinks=False)
    return embedder, details
