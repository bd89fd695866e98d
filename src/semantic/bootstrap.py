"""The one place where ports meet adapters.

Adapters are imported when they are needed: importing `semantic` loads no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from semantic.domain.value_objects import ModelCacheSpec

if TYPE_CHECKING:
    from semantic.adapters.mlx.backend import MLXBackend
    from semantic.adapters.mlx.tokenizer import MLXTokenizer

DEFAULT_MODEL = "semantic-tiny"
"""The model that ships with the package."""


def load(model_id: str = DEFAULT_MODEL) -> tuple[MLXBackend, MLXTokenizer]:
    """A model and its tokenizer, from a folder, a hub id or the embedded model.

    Raises ModelNotFoundError or UnsupportedModelError.
    """
    from semantic.adapters.mlx.provider import MLXModelProvider

    return MLXModelProvider().load_model(model_id)


def read_bare_model(model: object) -> ModelCacheSpec | None:
    """The spec of a framework's own model object; None when no framework knows it."""
    from semantic.adapters.mlx.spec_reader import read_spec

    return read_spec(model)


def register_readers() -> None:
    """Let `ModelCacheSpec.from_model` read bare models. Doing it again changes nothing."""
    if read_bare_model not in ModelCacheSpec.readers:
        ModelCacheSpec.readers.append(read_bare_model)
