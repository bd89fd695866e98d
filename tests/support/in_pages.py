"""Tiny models with paged caches on any device; "llama in pages" is the model "llama" with them."""

from __future__ import annotations

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.kv_cache.paged.page_pool import PageKind
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.domain.value_objects import KvBits
from tests.support.drafted import DRAFTED, drafted_backend
from tests.support.eight_bits import EIGHT
from tests.support.lanes import THOROUGH
from tests.support.padded import PADDED, padded_backend
from tests.support.probed import probed_once
from tests.support.tiny_models import tiny_model

SUFFIX = " in pages"

_NAMES = ("llama", "gemma3", "gpt_oss", "windows", "deepseek_v3") if THOROUGH else ("gemma3",)
IN_PAGES = tuple(name + SUFFIX for name in _NAMES)
"""All kinds of layers: full attention alone, windows, sinks, several windows, latents."""


def tiny_backend(
    name: str, model_id: str | None = None, texts: MLXTokenizer | None = None
) -> MLXBackend:
    """The tiny model with that name, in pages or padded if the name says so."""
    if name.endswith(DRAFTED):
        return drafted_backend(name, model_id, texts)
    if name.endswith(PADDED):
        return padded_backend(name, model_id, texts)
    model = tiny_model(name.removesuffix(SUFFIX))
    bits: KvBits = 8 if EIGHT in name else 16
    if not name.endswith(SUFFIX):
        with probed_once():
            return wrap_model(model, model_id, texts, kv_bits=bits)
    with probed_once():
        backend = wrap_model(model, model_id, texts, attention=_portable, kv_bits=bits)
    assert backend.in_pages, "the model's layers do not lie in pages"
    return backend


def _portable(kind: PageKind) -> PortableAttention:  # noqa: ARG001
    return PortableAttention()
