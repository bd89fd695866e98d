"""Converts the states of mlx-lm's own caches to trees in a checkpoint, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import mlx.core as mx
from mlx_lm.models import cache as mlx_caches

from semantic.adapters.mlx.arrays import ordered_bytes_of
from semantic.adapters.mlx.kv_cache.checkpoint import Anything, ArrayForm, StoredArray, Tree
from semantic.adapters.mlx.kv_cache.contiguous.layers import MlxLmCache
from semantic.domain.errors import BackendError, CacheReconstructionError, UnsupportedModelError

_TOKEN_AXIS = 2
"""The axis of tokens in keys and values, (1, kv_heads, tokens, head_dim)."""

_KNOWN: dict[str, type[object]] = {
    kind.__name__: kind
    for kind in (mlx_caches.KVCache, mlx_caches.RotatingKVCache, mlx_caches.ArraysCache)
}


_ATTENDS = ("KVCache", "RotatingKVCache")
"""Names of mlx-lm's caches whose state begins with keys, values and an offset."""


class _FromState(Protocol):
    def from_state(self, state: object) -> MlxLmCache: ...


def expected_state(cache: MlxLmCache) -> Tree:
    """Return the form that the states of all caches like `cache` have."""
    name = class_name(cache)
    if name not in _KNOWN:
        return name, [(attribute, Anything()) for attribute in sorted(vars(cache))]
    return name, _form(cache.state, attends=name in _ATTENDS)


def write_state(cache: MlxLmCache) -> Tree:
    """Return the state of `cache` with contiguous arrays."""
    name = class_name(cache)
    if name not in _KNOWN:
        return name, [
            (attribute, _stored(value)) for attribute, value in sorted(vars(cache).items())
        ]
    return name, _stored(cache.state)


def read_state(tree: Tree, expected: Tree, length: int, empty: MlxLmCache) -> MlxLmCache:
    """Return a cache of `length` tokens with the state in `tree`. Raises CacheReconstructionError
    if the tree contradicts itself or `length`."""
    name, state = cast(tuple[str, Tree], tree)
    if name not in _KNOWN:
        return _with_attributes(empty, cast(list[tuple[str, Tree]], state), length)
    _, expected_tree = cast(tuple[str, Tree], expected)
    _check(name, state, expected_tree, length)
    return cast(_FromState, _KNOWN[name]).from_state(_loaded(state))


def class_name(cache: object) -> str:
    """Return the cache's class name. Raises UnsupportedModelError if the cache cannot be stored."""
    name = type(cache).__name__
    if _KNOWN.get(name, type(cache)) is not type(cache) or not hasattr(cache, "__dict__"):
        raise UnsupportedModelError(f"cannot store a {name} in a checkpoint")
    return name


def _with_attributes(
    empty: MlxLmCache, attributes: Sequence[tuple[str, Tree]], length: int
) -> MlxLmCache:
    found = copy.copy(empty)
    for name, tree in attributes:
        value = _loaded(tree)
        was_tuple = isinstance(vars(empty).get(name), tuple)
        vars(found)[name] = tuple(cast(list[object], value)) if was_tuple else value
    if vars(found).get("offset", length) != length:
        raise CacheReconstructionError(f"checkpoint: the {type(found).__name__} contradicts itself")
    return found


def _each(tree: object, change: Callable[[object], object]) -> object:
    if isinstance(tree, list | tuple):
        items = [_each(item, change) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    return change(tree)


def _form(state: object, *, attends: bool) -> Tree:
    axis = _TOKEN_AXIS if attends else None

    def form_of(leaf: object) -> object:
        if not isinstance(leaf, mx.array):
            return _plain(leaf)
        return ArrayForm(leaf.dtype, tuple(leaf.shape), axis)

    return cast(Tree, _each(state, form_of))


def _stored(state: object) -> Tree:
    def stored(leaf: object) -> object:
        if not isinstance(leaf, mx.array):
            return _plain(leaf)
        form = ArrayForm(leaf.dtype, tuple(leaf.shape))
        return StoredArray(form, [ordered_bytes_of(leaf)])

    return cast(Tree, _each(state, stored))


def _plain(state: object) -> Tree:
    if state is None or type(state) in (int, str, bool, float):
        return cast(Tree, state)
    raise BackendError(f"a cache's state holds a {type(state).__name__}")


def _loaded(tree: Tree) -> object:
    return _each(tree, lambda leaf: leaf.load() if isinstance(leaf, StoredArray) else leaf)


def _check(name: str, state: Tree, expected: Tree, length: int) -> None:
    if name in _ATTENDS:
        keys, values, offset, *rest = cast(Sequence[Tree], state)
        held = _tokens(keys)
        fits = held == _tokens(values) and offset == length
        if rest:
            keep, size, index = cast(list[int], rest)
            same = [keep, size] == list(cast(Sequence[Tree], expected)[3:5])
            fits = fits and same and min(length, size) <= held
            fits = fits and _is_write_position(index, held, length, size)
        else:
            fits = fits and length <= held
        if not fits:
            raise CacheReconstructionError(f"checkpoint: the {name} contradicts itself")


def _is_write_position(index: int, held: int, length: int, size: int) -> bool:
    if held == size and length >= size:
        return 0 <= index <= size  # any index of the ring
    return index == min(held, length)  # after the last token


def _tokens(tree: Tree) -> int:
    if not isinstance(tree, StoredArray):
        raise CacheReconstructionError("checkpoint: keys or values are missing")
    return tree.form.shape[_TOKEN_AXIS]
