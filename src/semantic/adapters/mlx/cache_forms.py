"""In which form a model's caches are kept: each in arrays of its own, or in shared pages.

A form makes the caches of sequences, turns them into blocks, and turns both into bytes. Each gets
only what it made itself, so what one makes is opaque to the other. Knows what a backend asks of a
form; not which is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from mlx.nn.layers.base import Module

from semantic.adapters.mlx.bodies import Bodies
from semantic.adapters.mlx.kv_buffer import KVBuffer, LayerShape
from semantic.adapters.mlx.landing import Landing
from semantic.adapters.mlx.layer_caches import LayerCache, LayerCaches
from semantic.adapters.mlx.paged.attention import PagedAttention
from semantic.adapters.mlx.paged.bodies import Columns, PagedBodies
from semantic.adapters.mlx.paged.kinds import PageKind
from semantic.adapters.mlx.paged.layers import PagedLayers
from semantic.domain.block_hash import Part
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.stored import BlockLayout
from semantic.domain.value_objects import ModelCacheSpec

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
    return CacheForms(layers, cast(SequenceBodies, bodies))


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
