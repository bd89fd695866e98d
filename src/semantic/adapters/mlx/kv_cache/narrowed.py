"""Models with small windows, chunks and budgets for the time of a test.

What a model does beyond its window of 4,096 tokens is seen with a few tokens if the window is 8
meanwhile. Knows the names that mlx-lm's models give to such numbers, no models.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import cast

from mlx.nn.layers.base import Module

NARROW = 8
"""Tokens of a narrowed window, chunk or budget of tokens."""

_NUMBERS = (
    (re.compile(r"topk_blocks$"), 2),
    (re.compile(r"(index|candidate)_block_size$"), 4),
    (re.compile(r"(window|window_size|attention_chunk_size|index_topk|floor_scale)$"), NARROW),
    (re.compile(r"max_position_embeddings$"), NARROW),
)
"""Names of numbers, and what they are at most while narrowed."""

_Values = MutableMapping[str, object]


@contextmanager
def narrowed(*models: Module) -> Iterator[bool]:
    """Narrow these models; yields whether any number changed. Nothing else may use them."""
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
    """The narrowed form of a value with this name; the value itself if there is none."""
    most = next((most for pattern, most in _NUMBERS if pattern.search(name)), None)
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    if most is None or not any(type(one) is int and one > most for one in numbers):
        return value
    small = [min(one, most) if type(one) is int else one for one in numbers]
    return type(value)(small) if isinstance(value, list | tuple) else small[0]


def _configurations(models: tuple[Module, ...]) -> Iterator[_Values]:
    """The attributes of all modules and of the arguments that they were made with, each once."""
    seen: set[int] = set()
    for model in models:
        for module in cast(Callable[[], list[Module]], model.modules)():
            yield from _with_inner(vars(module), seen)
            yield from _with_inner(module, seen)


def _with_inner(values: _Values, seen: set[int]) -> Iterator[_Values]:
    """`values`, and those of the configurations in them."""
    if id(values) in seen:
        return
    seen.add(id(values))
    yield values
    for value in list(values.values()):
        if isinstance(value, Module):
            continue  # one of `modules`
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _with_inner(vars(value), seen)
        elif isinstance(value, dict) and all(isinstance(name, str) for name in value):
            yield from _with_inner(value, seen)
