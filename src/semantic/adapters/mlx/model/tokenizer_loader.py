"""Loads a model's tokenizer alone: to read tokens as text, not to run a model."""

from __future__ import annotations

from typing import cast

from mlx_lm.utils import load_tokenizer as load_wrapped

from semantic.adapters.mlx.model.provider import find_folder
from semantic.adapters.mlx.text.tokenizer import HuggingFaceTokenizer, MLXTokenizer
from semantic.domain.errors import ModelNotFoundError

# What transformers raises for a folder without a tokenizer that it knows.
_BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)


def load_tokenizer(model_id: str) -> MLXTokenizer:
    """The tokenizer of the model that `model_id` names. Raises ModelNotFoundError."""
    folder = find_folder(model_id)
    try:
        wrapped = load_wrapped(folder)
    except _BROKEN as error:
        raise ModelNotFoundError(f"cannot load the tokenizer in {folder}: {error}") from error
    return MLXTokenizer(cast(HuggingFaceTokenizer, wrapped))
