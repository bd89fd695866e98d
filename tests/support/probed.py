"""A tiny model that passed the probe and the self-test at load is not tested at every load again.

The tests of both call them themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from unittest import mock

from semantic.adapters.mlx.kv_cache import forms
from semantic.adapters.mlx.kv_cache.contiguous.layers import ContiguousLayers
from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention
from semantic.adapters.mlx.kv_cache.paged.kinds import PageKind
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.self_test import computes_attention
from semantic.adapters.mlx.kv_cache.probe import LogitsProbe

_passed: Final[dict[tuple[object, ...], object]] = {}
"""What passed, with the model, so that no other takes over its id. Failures are not remembered."""

_accepts = LogitsProbe.accepts


@contextmanager
def probed_once() -> Iterator[None]:
    """Within, models of `tiny_model` that passed before are taken as they are."""
    with (
        mock.patch.object(LogitsProbe, "accepts", _accepts_once),
        mock.patch.object(forms, "computes_attention", _computes_once),
    ):
        yield


def _accepts_once(probe: LogitsProbe, layers: ContiguousLayers | PagedLayers) -> bool:
    # Of mlx-lm's own caches there is one form, which knows no layers.
    key = (type(layers), id(probe.model), tuple(getattr(layers, "ragged", ())))
    if key not in _passed and _accepts(probe, layers):
        _passed[key] = probe.model
    return key in _passed


def _computes_once(
    kind: PageKind,
    attention: PagedAttention,
    n_heads: int,
    sinks: frozenset[bool],
    *,
    latent: bool,
) -> bool:
    key = (type(attention), kind, n_heads, sinks, latent)
    if key not in _passed and computes_attention(kind, attention, n_heads, sinks, latent=latent):
        _passed[key] = kind
    return key in _passed
