"""Reads a model's cache spec, and the masks and positions that its layers use.

The masks come from a forward pass that MLX never evaluates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from semantic.adapters.mlx.kv_cache import attention_hook, spec_reader
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.value_objects import LayerKind, LayerSpec, ModelCacheSpec

_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "model_max_length")
"""Names of a configuration's number of positions."""

NARROW = 8
"""The number of tokens in a narrowed window, chunk or token budget."""

_NUMBERS = (
    (re.compile(r"topk_blocks$"), 2),
    (re.compile(r"(index|candidate)_block_size$"), 4),
    (re.compile(r"(window|window_size|attention_chunk_size|index_topk|floor_scale)$"), NARROW),
    (re.compile(r"max_position_embeddings$"), NARROW),
)
"""Patterns for names of a configuration's numbers, each with its largest value while narrowed."""

_Values = MutableMapping[str, object]


@contextmanager
def narrowed(*models: Module) -> Iterator[bool]:
    """In the `with` block, shrink the windows of idle models. Yields whether any window changed."""
    changed: list[tuple[_Values, str, object]] = []
    try:
        for values in _configurations(models):
            for name, value in list(values.items()):
                smaller = _smaller(name, value)
                if smaller is not value:
                    changed.append((values, name, value))
                    values[name] = smaller
        yield bool(changed)
    finally:
        for values, name, value in changed:
            values[name] = value


def _smaller(name: str, value: object) -> object:
    most = next((most for pattern, most in _NUMBERS if pattern.search(name)), None)
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    if most is None or not any(type(one) is int and one > most for one in numbers):
        return value
    small = [min(one, most) if type(one) is int else one for one in numbers]
    return type(value)(small) if isinstance(value, list | tuple) else small[0]


def _configurations(models: tuple[Module, ...]) -> Iterator[_Values]:
    seen: set[int] = set()
    for model in models:
        for module in cast(Callable[[], list[Module]], model.modules)():
            yield from _with_inner(vars(module), seen)
            yield from _with_inner(module, seen)


def _with_inner(values: _Values, seen: set[int]) -> Iterator[_Values]:
    if id(values) in seen:
        return
    seen.add(id(values))
    yield values
    for value in list(values.values()):
        if isinstance(value, Module):
            continue  # listed in `modules` itself
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _with_inner(vars(value), seen)
        elif isinstance(value, dict) and all(isinstance(name, str) for name in value):
            yield from _with_inner(value, seen)


_Nesting = tuple["_Nesting", ...] | None
"""The structure of a layer's cache: the caches in it, or None if it is not a list."""


def flat(caches: Sequence[object]) -> list[object]:
    """Return `caches` with each list of caches replaced by the caches in it."""
    return [
        leaf
        for cache in caches
        for leaf in (flat(cache.caches) if isinstance(cache, CacheList) else [cache])
    ]


def flatten(model: Module) -> None:
    """Make `model` accept and create caches without lists. Idempotent."""
    nesting = tuple(map(_nesting, cast(list[object], make_prompt_cache(model))))
    if any(one is not None for one in nesting):
        # Only calls with caches change. The model keeps its weights, modules and names.
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


PROMPT_CHUNK = 2048
"""The number of prompt tokens that mlx-lm computes at once."""

# Errors that a model raises if it needs more from its caches than one traced token provides.
_UNTRACEABLE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def read_spec(model: object) -> ModelCacheSpec | None:
    """Return the spec of an mlx-lm model; None for any other object. Also calls `flatten`."""
    if not isinstance(model, Module):
        return None
    flatten(model)
    spec = spec_reader.read_spec(model)
    masks = _read_masks(model)
    layers = tuple(
        _with_window(layer, mask.window) for layer, mask in zip(spec.layers, masks, strict=True)
    )
    # Below these lengths, windows whose mask overhangs are not full yet.
    sizes = [one.size for one in masks if one.overhangs and one.size is not None]
    limits = [*(size - 1 for size in sizes), *_limits_of_positions(model)]
    return dataclasses.replace(spec, layers=layers, reusable_tokens=min(limits, default=None))


def read_shapes(model: Module) -> list[LayerShape | None]:
    """Like `spec_reader.read_shapes`, but None if a layer's mask is wider than its cache."""
    shapes = spec_reader.read_shapes(model)
    masks = _read_masks(model)
    return [None if mask.overhangs else shape for shape, mask in zip(shapes, masks, strict=True)]


@dataclasses.dataclass(slots=True)
class _Mask:
    """The mask of a layer's attention. It `overhangs` if it is wider than the cache's window."""

    window: int | None = None
    size: int | None = None
    overhangs: bool = False


def _read_masks(model: Module) -> list[_Mask]:
    caches = cast(list[object], make_prompt_cache(model))
    asked: dict[int, tuple[mx.array, int]] = {}
    traced = [_traced(cache, asked) for cache in caches]
    if any(isinstance(cache, _FullCache | _WindowCache) for cache in traced):
        attention_hook.install(model)
        with contextlib.suppress(*_UNTRACEABLE), attention_hook.watching(_note):
            model(mx.zeros((1, 1), dtype=mx.int32), cache=traced)
    # One of the layers with the same window creates the mask for all of them.
    overhanging = {
        cache.mask.size
        for cache in traced
        if isinstance(cache, _WindowCache) and cache.mask.overhangs
    }
    return [
        dataclasses.replace(cache.mask, overhangs=cache.mask.size in overhanging)
        if isinstance(cache, _FullCache | _WindowCache)
        else _Mask()
        for cache in traced
    ]


def _traced(cache: object, asked: dict[int, tuple[mx.array, int]]) -> object:
    if type(cache) is KVCache:
        return _FullCache(asked)
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return _WindowCache(cast(int, cache.max_size))
    return cache


class _FullCache(KVCache):
    def __init__(self, asked: dict[int, tuple[mx.array, int]]) -> None:
        """`asked` maps a mask's id to the mask and its window."""
        cast(Callable[[], None], super().__init__)()
        self.mask = _Mask()
        self.asked = asked

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> object:
        make = cast(Callable[..., object], super().make_mask)
        mask = make(N, return_array=return_array, window_size=window_size)
        if window_size is not None and isinstance(mask, mx.array):
            self.asked[id(mask)] = (mask, window_size)
        return mask


class _WindowCache(RotatingKVCache):
    def __init__(self, size: int) -> None:
        cast(Callable[[int], None], super().__init__)(size)
        self.mask = _Mask(size=size)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> object:
        self.mask.overhangs |= window_size is not None and window_size > (self.mask.size or 0)
        make = cast(Callable[..., object], super().make_mask)
        return make(N, window_size=window_size, return_array=return_array)


def _note(cache: object, mask: object) -> None:
    if isinstance(cache, _FullCache):
        _, cache.mask.window = cache.asked.get(id(mask), (None, None))


def _with_window(layer: LayerSpec, window: int | None) -> LayerSpec:
    if window is None or layer.kind is not LayerKind.FULL:
        return layer
    return dataclasses.replace(layer, kind=LayerKind.SLIDING_WINDOW, window=window)


def _limits_of_positions(model: Module) -> Iterator[int]:
    """Yield the lengths up to which some rotary embeddings do not depend on a chunk's length."""
    known: dict[tuple[object, ...], bool] = {}
    for rope in cast(Callable[[], list[Module]], model.modules)():
        limit = getattr(rope, "max_position_embeddings", None)
        dims = getattr(rope, "dims", None)
        if type(limit) is not int or type(dims) is not int:
            continue
        kind = type(rope), limit, dims
        if kind not in known:
            known[kind] = _depends_on_length(rope, dims)
        if known[kind]:
            yield limit // PROMPT_CHUNK * PROMPT_CHUNK


def _depends_on_length(rope: Module, dims: int) -> bool:
    """Return whether the embedding of the first tokens changes with the number of tokens."""
    turn = cast(Callable[[mx.array], mx.array], rope)
    x = mx.ones((1, 1, 2 * NARROW, dims))
    with narrowed(rope), contextlib.suppress(*_UNTRACEABLE):
        few, many = turn(x[:, :, :NARROW]), turn(x)[:, :, :NARROW]
        return not bool(mx.allclose(few, many, atol=1e-3))
    return False


def read_context(model: object) -> int | None:
    """Return the model's context length in tokens; None if unknown."""
    arguments = getattr(model, "args", None)
    nested = getattr(arguments, "text_config", None)
    for name in _CONTEXT_FIELDS:
        own = getattr(arguments, name, None)
        found = nested.get(name) if own is None and isinstance(nested, Mapping) else own
        if isinstance(found, int) and found > 0:
            return found
    return None
