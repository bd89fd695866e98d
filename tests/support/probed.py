"""A tiny model that passed the probe and the self-test at load is not tested at every load again.

The tests of both call them themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from unittest import mock

from mlx.nn.layers.base import Module

from semantic.adapters.mlx.kv_cache import forms
from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention
from semantic.adapters.mlx.kv_cache.paged.kinds import PageKind
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.self_test import computes_attention
from semantic.adapters.mlx.kv_cache.probe import choose_layers, pages_work
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.adapters.mlx.model import provider
from semantic.domain.value_objects import ModelCacheSpec

_passed: Final[dict[tuple[object, ...], object]] = {}
"""What passed, with the model, so that no other takes over its id. Failures are not remembered."""


@contextmanager
def probed_once() -> Iterator[None]:
    """Within, models of `tiny_model` that passed before are taken as they are."""
    with (
        mock.patch.object(provider, "choose_layers", _choose_layers),
        mock.patch.object(forms, "pages_work", _pages_work),
        mock.patch.object(forms, "computes_attention", _computes_attention),
    ):
        yield


def _choose_layers(
    model: Module, spec: ModelCacheSpec, shapes: Sequence[LayerShape | None]
) -> tuple[bool, ...]:
    key = ("contiguous", id(model))
    if key in _passed:
        return (True,) * spec.n_layers
    chosen = choose_layers(model, spec, shapes)
    if all(chosen):
        _passed[key] = model
    return chosen


def _pages_work(model: Module, layers: PagedLayers) -> bool:
    key = ("pages", id(model))
    if key not in _passed and pages_work(model, layers):
        _passed[key] = model
    return key in _passed


def _computes_attention(kind: PageKind, attention: PagedAttention, n_heads: int) -> bool:
    key = ("attention", type(attention), kind, n_heads)
    if key not in _passed and computes_attention(kind, attention, n_heads):
        _passed[key] = kind
    return key in _passed
