"""Layers that keep several caches become several layers, and the model computes the same."""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache

from semantic.adapters.mlx.kv_cache.model_spec import flat, flatten, read_spec
from semantic.domain.value_objects import LayerKind
from tests.support.tiny_models import build, randomize


def model_with_lists() -> Module:
    model = build("falcon_h1")
    randomize(model)
    return model


def test_a_flattened_model_computes_the_same() -> None:
    model = model_with_lists()
    tokens = mx.array([[3, 1, 4, 1, 5]])
    caches = make_prompt_cache(model)
    assert [type(cache) for cache in caches] == [CacheList, CacheList]
    before = model(tokens, cache=caches)
    flatten(model)
    ours = make_prompt_cache(model)
    assert [type(cache) for cache in ours] == [ArraysCache, KVCache] * 2
    assert mx.array_equal(model(tokens, cache=ours), before)
    assert mx.array_equal(model(tokens), before)
    assert [cache.offset for cache in ours[1::2]] == [5, 5]


def test_flattening_twice_changes_nothing() -> None:
    model = model_with_lists()
    flatten(model)
    once = type(model)
    flatten(model)
    assert type(model) is once
    assert (once.__name__, once.__module__) == ("Model", "mlx_lm.models.falcon_h1")


def test_a_model_without_lists_stays_as_it_is() -> None:
    model = build("llama")
    before = type(model)
    flatten(model)
    assert type(model) is before


def test_lists_in_lists_are_flat_too() -> None:
    parts = [KVCache() for _ in range(4)]
    nested = [parts[0], CacheList(parts[1], CacheList(parts[2], parts[3]))]
    assert flat(nested) == parts


def test_each_part_is_a_layer_of_its_kind() -> None:
    spec = read_spec(model_with_lists())
    assert spec is not None
    assert spec.layer_types == (LayerKind.STATE, LayerKind.FULL) * 2
