"""Tiny models with heads of 64, whose caches have 8 bits: "llama in 8 bits".

The reference is mlx-lm with keys and values that are rounded as they enter its own caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from semantic.adapters.mlx.kv_cache.eight_bits import pack, unpack

EIGHT: Final = " in 8 bits"
EIGHT_BITS: Final = tuple(
    f"{kind} of 64{EIGHT}"
    for kind in ("llama", "gemma3", "gpt_oss", "moe", "deepseek_v3", "qwen3_next")
)
"""Full attention, windows, windows with sinks, experts, latents, and attention beside states."""

Scheme = Callable[[mx.array], mx.array]
"""Rounds keys or values."""

_rounding: dict[int, Module] = {}


def round_caches_of(model: Module) -> Module:
    """Let `new_caches` of this model round keys and values to 8 bits."""
    _rounding[id(model)] = model
    return model


def new_caches(model: Module) -> list[object]:
    """mlx-lm's own caches of a sequence."""
    caches: Sequence[object] = make_prompt_cache(model)
    return rounding(caches, _in_8_bits) if id(model) in _rounding else list(caches)


def rounding(caches: Sequence[object], scheme: Scheme) -> list[object]:
    """The same caches of mlx-lm, with keys and values that `scheme` rounds as they enter."""
    for cache in caches:
        if isinstance(cache, KVCache | RotatingKVCache):
            cache.__class__ = _rounding_class(cast(type, type(cache)), scheme)
    return list(caches)


def _in_8_bits(numbers: mx.array) -> mx.array:
    return unpack(pack(numbers), numbers.dtype)


@functools.cache
def _rounding_class(own: type, scheme: Scheme) -> type:
    def update_and_fetch(
        self: object, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        rounded = (scheme(one) for one in (keys, values))
        found: tuple[mx.array, mx.array] = own.update_and_fetch(self, *rounded)  # type: ignore[attr-defined]
        return found

    return type(f"Rounding{own.__name__}", (own,), {"update_and_fetch": update_and_fetch})
