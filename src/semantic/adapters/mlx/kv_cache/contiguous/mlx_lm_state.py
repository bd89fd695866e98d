"""The state of mlx-lm's own caches as trees of a checkpoint.

What a valid state looks like is taken from the model: the caches after one token, built lazily and
never computed. Knows mlx-lm's cache classes; not where a checkpoint is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import mlx.core as mx
from mlx_lm.models import cache as mlx_caches

from semantic.adapters.mlx.arrays import ordered_bytes_of
from semantic.adapters.mlx.kv_cache.checkpoint import ArrayForm, StoredArray, Tree
from semantic.adapters.mlx.kv_cache.contiguous.layers import MlxLmCache
from semantic.domain.errors import (
    BackendError,
    CacheReconstructionError,
    UnsupportedModelError,
)

_TOKEN_AXIS = 2
"""Of keys and values (1, kv_heads, tokens, head_dim)."""

_KNOWN: dict[str, type[object]] = {
    kind.__name__: kind
    for kind in (
        mlx_caches.KVCache,
        mlx_caches.RotatingKVCache,
        mlx_caches.ArraysCache,
        mlx_caches.CacheList,
    )
}


class _FromState(Protocol):
    def from_state(self, state: object) -> MlxLmCache: ...


def expected_state(cache: MlxLmCache) -> Tree:
    """The form of the state of a cache like `cache`, for any number of tokens."""
    return class_name(cache), _form(cache.state, _attends(cache))


def write_state(cache: MlxLmCache) -> Tree:
    """The state of `cache`, with contiguous arrays."""
    return class_name(cache), _stored(cache.state)


def read_state(tree: Tree, expected: Tree, length: int) -> MlxLmCache:
    """Rebuild the cache that `write_state` wrote, after `length` tokens.

    `tree` has the form `expected`. Raises CacheReconstructionError if its numbers contradict it.
    """
    name, state = cast(tuple[str, Tree], tree)
    _, expected_tree = cast(tuple[str, Tree], expected)
    _check(name, state, expected_tree, length)
    return cast(_FromState, _KNOWN[name]).from_state(_loaded(state))


def class_name(cache: object) -> str:
    """Name of the cache's class. Raises UnsupportedModelError if it cannot be stored."""
    name = type(cache).__name__
    if _KNOWN.get(name) is not type(cache):
        raise UnsupportedModelError(f"a {name} cannot be stored in a checkpoint")
    return name


def _attends(cache: object) -> bool:
    return type(cache) in (mlx_caches.KVCache, mlx_caches.RotatingKVCache)


def _form(state: object, attends: bool) -> Tree:
    """The form of `state`; keys and values may have any number of tokens."""
    if isinstance(state, mx.array):
        return ArrayForm(state.dtype, tuple(state.shape), _TOKEN_AXIS if attends else None)
    if isinstance(state, list | tuple):
        if _is_part(state):
            attends = state[1] in ("KVCache", "RotatingKVCache")
        items = [_form(item, attends) for item in state]
        return items if isinstance(state, list) else tuple(items)
    return _plain(state)


def _is_part(state: Sequence[object]) -> bool:
    """Whether it is a (state, class name) of a CacheList."""
    return len(state) == 2 and isinstance(state[1], str)  # noqa: PLR2004


def _stored(state: object) -> Tree:
    if isinstance(state, mx.array):
        form = ArrayForm(state.dtype, tuple(state.shape))
        return StoredArray(form, [ordered_bytes_of(state)])
    if isinstance(state, list | tuple):
        items = [_stored(item) for item in state]
        return items if isinstance(state, list) else tuple(items)
    return _plain(state)


def _plain(state: object) -> Tree:
    if state is None or type(state) is int or type(state) is str:
        return state
    raise BackendError(f"a cache's state holds a {type(state).__name__}")


def _loaded(tree: Tree) -> object:
    if isinstance(tree, StoredArray):
        return tree.load()
    if isinstance(tree, tuple | list):
        items = [_loaded(item) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def _check(name: str, state: Tree, expected: Tree, length: int) -> None:
    """Raise CacheReconstructionError unless the numbers in `state` fit its arrays and `length`."""
    if name == "CacheList":
        parts = zip(cast(list[Tree], state), cast(list[Tree], expected), strict=True)
        for part, expected_part in parts:
            inner, inner_name = cast(tuple[Tree, str], part)
            _check(inner_name, inner, cast(tuple[Tree, str], expected_part)[0], length)
    elif name in ("KVCache", "RotatingKVCache"):
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
            raise CacheReconstructionError(f"a checkpoint with a contradictory {name}")


def _is_write_position(index: int, held: int, length: int, size: int) -> bool:
    """Whether a RotatingKVCache of `held` tokens' arrays may write next at `index`."""
    if held == size and length >= size:
        return 0 <= index <= size  # any index of the ring
    return index == min(held, length)  # after the last token


def _tokens(tree: Tree) -> int:
    if not isinstance(tree, StoredArray):
        raise CacheReconstructionError("a checkpoint without keys and values")
    return tree.form.shape[_TOKEN_AXIS]
