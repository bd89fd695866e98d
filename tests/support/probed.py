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
from semantic.adapters.mlx.kv_cache.model_spec import read_shapes, read_spec
from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention
from semantic.adapters.mlx.kv_cache.paged.page_pool import PageKind
from semantic.adapters.mlx.kv_cache.paged.self_test import computes_attention
from semantic.adapters.mlx.kv_cache.paged.side_by_side import Beside
from semantic.adapters.mlx.kv_cache.probe import LogitsProbe, choosing_layers
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.adapters.mlx.model import provider
from semantic.domain.value_objects import ModelCacheSpec
from semantic.ports.generation import Slices

_passed: Final[dict[tuple[object, ...], object]] = {}
"""What passed, with the model, so that no other takes over its id. Failures are not remembered."""

_chosen: Final[dict[int, tuple[LogitsProbe, tuple[bool, ...]]]] = {}
"""That all layers can use our caches, with the probe of their model, by the model's id. A test
that breaks them leaves nothing behind."""

_specs: Final[dict[int, tuple[Module, ModelCacheSpec | None]]] = {}
_shapes: Final[dict[int, tuple[Module, list[LayerShape | None]]]] = {}
"""What is read of a model with its masks, by the model's id."""

_comparing_pages = forms._comparing_pages


@contextmanager
def probed_once() -> Iterator[None]:
    """Within, models of `tiny_model` that passed before are taken as they are."""
    with (
        mock.patch.object(provider, "read_spec", _spec_once),
        mock.patch.object(provider, "read_shapes", _shapes_once),
        mock.patch.object(forms, "choosing_layers", _choosing_once),
        mock.patch.object(forms, "_comparing_pages", _comparing_once),
        mock.patch.object(forms, "computes_attention", _computes_once),
    ):
        yield


def _spec_once(model: Module) -> ModelCacheSpec | None:
    if id(model) not in _specs:
        _specs[id(model)] = model, read_spec(model)
    return _specs[id(model)][1]


def _shapes_once(model: Module) -> list[LayerShape | None]:
    if id(model) not in _shapes:
        _shapes[id(model)] = model, read_shapes(model)
    return list(_shapes[id(model)][1])


def _choosing_once(
    probe: LogitsProbe, spec: ModelCacheSpec, shapes: Sequence[LayerShape | None]
) -> Slices[tuple[bool, ...] | None]:
    key = id(probe.model)
    if key not in _chosen:
        found = yield from choosing_layers(probe, spec, shapes)
        if found is None or not all(found):
            return found
        _chosen[key] = probe, found
    return _chosen[key][1]


def _comparing_once(
    probe: LogitsProbe,
    spec: ModelCacheSpec,
    kinds: Sequence[PageKind],
    found: Sequence[PagedAttention],
    beside: Beside,
) -> Slices[bool]:
    models = probe.model, probe.decoding
    key = (*map(id, models), *map(type, found), beside)
    if key not in _passed:
        if not (yield from _comparing_pages(probe, spec, kinds, found, beside)):
            return False
        _passed[key] = models
    return True


def _computes_once(
    kind: PageKind, attention: PagedAttention, n_heads: int, sinks: frozenset[bool], *, latent: bool
) -> bool:
    key = (type(attention), kind, n_heads, sinks, latent)
    if key not in _passed and computes_attention(kind, attention, n_heads, sinks, latent=latent):
        _passed[key] = kind
    return key in _passed
