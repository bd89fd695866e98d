"""In which form a model's caches are kept: each in arrays of its own, or in shared pages.

A form makes the caches of sequences, turns them into blocks, and turns both into bytes. Each gets
only what it made itself, so what one makes is opaque to the other. Knows what a backend asks of a
form; not which is chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from mlx.nn.layers.base import Module

from semantic.adapters.mlx.kv_cache.contiguous.bodies import Bodies
from semantic.adapters.mlx.kv_cache.contiguous.buffer import KVBuffer
from semantic.adapters.mlx.kv_cache.contiguous.layers import ContiguousCache, LayerCaches
from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention
from semantic.adapters.mlx.kv_cache.paged.bodies import Columns, PagedBodies
from semantic.adapters.mlx.kv_cache.paged.cache import PagedCache
from semantic.adapters.mlx.kv_cache.paged.dialect import METAL, dialect_here
from semantic.adapters.mlx.kv_cache.paged.kernels import HEAD_DIMS, PagedKernels, tile_of
from semantic.adapters.mlx.kv_cache.paged.kinds import PageKind, page_kinds
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.self_test import computes_attention
from semantic.adapters.mlx.kv_cache.probe import pages_work, query_heads
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.adapters.mlx.kv_cache.staging import Landing
from semantic.domain.block_hash import Part
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.stored import BlockLayout
from semantic.domain.value_objects import ModelCacheSpec

LayerCache = ContiguousCache | PagedCache
"""One layer's cache of one sequence."""

Memory = KVBuffer | Columns
"""What bodies are being written to."""


class SequenceLayers(Protocol):
    """Makes the caches of a model's sequences; see `LayerCaches` and `PagedLayers`."""

    @property
    def ragged(self) -> tuple[bool, ...]: ...
    def set_aside(self, n_bytes: int) -> None: ...
    def abandon(self) -> None: ...
    def empty(self, capacity: int) -> list[LayerCache]: ...
    def restored(
        self, blocks: AgentBlocks, length: int, capacity: int, *, exclusive: bool
    ) -> list[LayerCache]: ...
    def reserve(self, caches: Sequence[LayerCache], capacity: int) -> None: ...
    def fill(
        self,
        caches: Sequence[LayerCache],
        blocks: Sequence[Sequence[KVBlock]],
        length: int,
    ) -> list[KVBlock]: ...


class SequenceBodies(Protocol):
    """Turns caches into bodies and back; see `Bodies` and `PagedBodies`."""

    @property
    def layout(self) -> BlockLayout: ...
    def export_block(
        self, caches: Sequence[LayerCache], length: int, part: Part, start: int, stop: int
    ) -> bytes: ...
    def export_checkpoint(self, caches: Sequence[LayerCache], length: int) -> bytes: ...
    def loading(
        self,
        caches: Sequence[LayerCache],
        landing: Landing[Memory],
        part: Part,
        start: int,
        stop: int,
    ) -> list[list[memoryview]]: ...
    def loaded(
        self,
        caches: Sequence[LayerCache],
        landing: Landing[Memory],
        length: int,
        checkpoint: bytes | None,
    ) -> list[LayerCache]: ...


@dataclass(frozen=True, slots=True)
class CacheForms:
    """The caches of a model and their bytes."""

    layers: SequenceLayers
    bodies: SequenceBodies


def in_buffers(
    model: Module,
    spec: ModelCacheSpec,
    shapes: Sequence[LayerShape | None],
    ragged: Sequence[bool],
) -> CacheForms:
    """Every cache in arrays of its own; `ragged[i]` says whether layer i uses ours."""
    layers = LayerCaches(model, spec, shapes, ragged)
    bodies = Bodies(model, spec, shapes, layers)
    return CacheForms(cast(SequenceLayers, layers), cast(SequenceBodies, bodies))


def in_pages(
    spec: ModelCacheSpec,
    kinds: Sequence[PageKind],
    attention: Sequence[PagedAttention],
    *,
    at_once: bool = True,
) -> CacheForms:
    """All caches in pages of `kinds`, over which `attention` computes; see `PagedLayers`."""
    shapes = {number: kind.shape for kind in kinds for number in kind.layers}
    layers = PagedLayers(spec, kinds, attention, at_once=at_once)
    bodies = PagedBodies(spec, [shapes[number] for number in range(spec.n_layers)], layers)
    return CacheForms(cast(SequenceLayers, layers), cast(SequenceBodies, bodies))


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
