"""Tiny models with heads of 64, whose caches have 8 bits: "llama in 8 bits".

The reference is mlx-lm with keys and values that are rounded as they enter its own caches.
"""

from __future__ import annotations

from typing import Final

from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from semantic.adapters.mlx.model.cache_quality import rounding

EIGHT: Final = " in 8 bits"
EIGHT_BITS: Final = tuple(
    f"{kind} of 64{EIGHT}"
    for kind in ("llama", "gemma3", "gpt_oss", "moe", "deepseek_v3", "qwen3_next")
)
"""Full attention, windows, windows with sinks, experts, latents, and attention beside states."""

_rounding: dict[int, Module] = {}


def round_caches_of(model: Module) -> Module:
    """Let `new_caches` of this model round keys and values to 8 bits."""
    _rounding[id(model)] = model
    return model


def new_caches(model: Module) -> list[object]:
    """mlx-lm's own caches of a sequence."""
    caches = make_prompt_cache(model)
    return list(rounding(caches) if id(model) in _rounding else caches)
