"""Loads an embedding model: a decoder of mlx-lm, or an encoder of mlx-embeddings, with the pooling
that its files declare.

Call it from the thread that computes. Knows folders; not who asks for vectors.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Final

from semantic.adapters.mlx.embedding.decoder import DecoderEmbedder
from semantic.adapters.mlx.embedding.encoder import ENCODERS, EncoderEmbedder, load_encoder
from semantic.adapters.mlx.embedding.pooling import read_length, read_pooling
from semantic.adapters.mlx.model.description import read_config
from semantic.adapters.mlx.model.details import read_details
from semantic.adapters.mlx.model.fingerprint import fingerprint
from semantic.adapters.mlx.model.provider import (
    LOAD_ERRORS,
    load_tokenizer,
    read_context,
    reading_model,
)
from semantic.domain.errors import SemanticError, UnsupportedModelError
from semantic.ports.embedding import Embedder
from semantic.ports.serving import ModelDetails
from semantic.ports.slices import at_once

_MOST_TOKENS: Final = 1 << 15
"""The longest text of a model that declares more, or nothing."""


def load_embedder(folder: Path) -> tuple[Embedder, ModelDetails]:
    """The embedding model in `folder`.

    Raises ModelNotFoundError for one that cannot be loaded, and UnsupportedModelError for one whose
    vectors would not be those that its makers describe, or that needs a package that is not there.
    """
    kind = str(read_config(folder).get("model_type", "")).replace("-", "_")
    load = _encoder if kind in ENCODERS else _decoder
    try:
        return load(folder)
    except SemanticError:
        raise
    except LOAD_ERRORS as error:
        raise UnsupportedModelError(f"cannot compute the model in {folder}: {error}") from error


def _decoder(folder: Path) -> tuple[Embedder, ModelDetails]:
    pooling = read_pooling(folder, default="last")
    model, tokenizer, model_id = at_once(reading_model(folder))
    most = _least(read_length(folder), read_context(model))
    embedder = DecoderEmbedder(model, tokenizer, f"{model_id}:{pooling}", pooling, most)
    return embedder, read_details(model, model_id, folder, template="", thinks=False)


def _encoder(folder: Path) -> tuple[Embedder, ModelDetails]:
    pooling = read_pooling(folder, default="mean")
    model = load_encoder(folder)
    config = read_config(folder)
    tokenizer, padding = load_tokenizer(str(folder)), config.get("pad_token_id")
    padding = padding if type(padding) is int else 0
    # XLM-RoBERTa counts positions from its token for padding.
    shift = padding + 1 if "roberta" in str(config.get("model_type")) else 0
    positions = config.get("max_position_embeddings")
    context = positions - shift if type(positions) is int else None
    most = _least(read_length(folder), context)
    model_id = f"{fingerprint(folder)}:{version('mlx-embeddings')}"
    embedder = EncoderEmbedder(model, tokenizer, f"{model_id}:{pooling}", pooling, most, padding)
    return embedder, read_details(model, model_id, folder, template="", thinks=False)


def _least(*limits: int | None) -> int:
    return min(one for one in (*limits, _MOST_TOKENS) if one is not None)
