"""Layers that keep several caches, as several layers that keep one each.

A `CacheList` of mlx-lm has parts of different kinds: two attentions, or an attention and a state.
Each part is stored, batched and cut back by what it is. A flattened model takes and makes caches
without lists. Knows mlx-lm's lists; not what the parts hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList, make_prompt_cache

_Nesting = tuple["_Nesting", ...] | None
"""The parts of a layer's cache; None for a cache that is no list."""


def flat(caches: Sequence[object]) -> list[object]:
    """`caches` with the parts of lists in place of the lists."""
    return [
        leaf
        for cache in caches
        for leaf in (flat(cache.caches) if isinstance(cache, CacheList) else [cache])
    ]


def flatten(model: Module) -> None:
    """Make `model` take and make flat caches, if its layers keep lists. Idempotent."""
    nesting = tuple(map(_nesting, cast(list[object], make_prompt_cache(model))))
    if any(one is not None for one in nesting):
        # Only calls with caches change: weights, modules and names stay those of the model.
        object.__setattr__(model, "__class__", _flat_class(type(model), nesting))


def _flat_class(original: type[Module], nesting: Sequence[_Nesting]) -> type[Module]:
    call = cast(Callable[..., mx.array], original.__call__)
    make = cast("Callable[[Module], list[object]]", getattr(original, "make_cache"))  # noqa: B009

    def flat_call(
        self: Module, inputs: mx.array, cache: Sequence[object] | None = None, **others: object
    ) -> mx.array:
        if cache is None:
            return call(self, inputs, **others)
        leaves = iter(cache)
        return call(self, inputs, cache=[_nested(one, leaves) for one in nesting], **others)

    def make_cache(self: Module) -> list[object]:
        return flat(make(self))

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    methods = {"__call__": flat_call, "make_cache": make_cache}
    return type(original.__name__, (original,), {**names, **methods})


def _nesting(cache: object) -> _Nesting:
    return tuple(map(_nesting, cache.caches)) if isinstance(cache, CacheList) else None


def _nested(nesting: _Nesting, leaves: Iterator[object]) -> object:
    if nesting is None:
        return next(leaves)
    return CacheList(*(_nested(one, leaves) for one in nesting))
