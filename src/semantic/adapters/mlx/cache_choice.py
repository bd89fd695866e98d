"""Whether a model's caches lie in pages on this device.

They do where there are kernels for all its layers, the kernels compute what MLX computes, and the
model gives the right answers with them. Knows devices and kernels; not what a cache is used for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from mlx.nn.layers.base import Module

from semantic.adapters.mlx.cache_forms import CacheForms, in_pages
from semantic.adapters.mlx.kv_buffer import LayerShape
from semantic.adapters.mlx.paged.attention import PagedAttention
from semantic.adapters.mlx.paged.dialect import METAL, dialect_here
from semantic.adapters.mlx.paged.kernels import HEAD_DIMS, PagedKernels, tile_of
from semantic.adapters.mlx.paged.kinds import PageKind, page_kinds
from semantic.adapters.mlx.paged.layers import PagedLayers
from semantic.adapters.mlx.paged.self_test import computes_attention
from semantic.adapters.mlx.probe import pages_work, query_heads
from semantic.domain.value_objects import ModelCacheSpec

AttentionFor = Callable[[PageKind], PagedAttention | None]
"""What computes over pages of a kind; None when nothing does."""


OFF_VARIABLE = "SEMANTIC_PAGES"
"""Environment variable that keeps caches out of pages when it is "off"."""


def find_kernels(kind: PageKind) -> PagedAttention | None:
    """The kernels of this device, if it has some for layers of this kind."""
    dialect = dialect_here()
    if os.environ.get(OFF_VARIABLE) == "off":
        return None
    if dialect is None or kind.shape.dtype not in dialect.types:
        return None
    if kind.shape.k_head_dim not in HEAD_DIMS or not tile_of(kind, dialect):
        return None
    return PagedKernels(kind, dialect)


def choose_pages(
    model: Module,
    spec: ModelCacheSpec,
    shapes: Sequence[LayerShape | None],
    attention: AttentionFor,
) -> CacheForms | None:
    """The form of caches in pages, if the layers can lie there and the answers are right."""
    kinds = page_kinds(spec, shapes)
    if kinds is None:
        return None
    found = [one for kind in kinds if (one := attention(kind)) is not None]
    if len(found) < len(kinds):
        return None
    heads = query_heads(model, spec, kinds)
    if not all(map(computes_attention, kinds, found, heads)):
        return None
    if not pages_work(model, PagedLayers(spec, kinds, found)):
        return None
    # A Mac's memory is everybody's: nothing is taken there before it is needed.
    return in_pages(spec, kinds, found, at_once=dialect_here() is not METAL)
