"""Tiny models whose caches lie in pages, wherever the tests run.

"llama in pages" is the model "llama" with them.
"""

from __future__ import annotations

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.paged.attention import PortableAttention
from semantic.adapters.mlx.paged.kinds import PageKind
from semantic.adapters.mlx.provider import wrap_model
from semantic.adapters.mlx.tokenizer import MLXTokenizer
from tests.support.tiny_models import tiny_model

SUFFIX = " in pages"


def tiny_backend(
    name: str, model_id: str | None = None, texts: MLXTokenizer | None = None
) -> MLXBackend:
    """The tiny model with that name, in pages if the name says so."""
    model = tiny_model(name.removesuffix(SUFFIX))
    if not name.endswith(SUFFIX):
        return wrap_model(model, model_id, texts)
    backend = wrap_model(model, model_id, texts, attention=_portable)
    assert backend.in_pages, "the model's layers do not lie in pages"
    return backend


def _portable(kind: PageKind) -> PortableAttention:  # noqa: ARG001
    return PortableAttention()
