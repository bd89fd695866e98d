"""The two forms of KV caches behind one interface, and the choice of a model's form.

A model gets pages if this device's kernels pass their self-test and the model's logits over pages
are right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from semantic.adapters.mlx.cuda.copies import transfers_here
from semantic.adapters.mlx.kv_cache.attention_hook import is_row_by_row
from semantic.adapters.mlx.kv_cache.block_codec import BlockCodec, BlockMemory, CacheT
from semantic.adapters.mlx.kv_cache.contiguous.block_memory import ContiguousMemory
from semantic.adapters.mlx.kv_cache.contiguous.cache import KVBuffer
from semantic.adapters.mlx.kv_cache.contiguous.layers import (
    ContiguousCache,
    ContiguousLayers,
    MlxLmCache,
    states_of,
)
from semantic.adapters.mlx.kv_cache.contiguous.mlx_lm_state import expected_state
from semantic.adapters.mlx.kv_cache.eight_bits import (
    PACKED_BITS,
    packed_shape,
    packed_shapes,
    packed_spec,
)
from semantic.adapters.mlx.kv_cache.model_spec import read_shapes, read_spec
from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention, PortableAttention
from semantic.adapters.mlx.kv_cache.paged.block_memory import HostPages, PagedMemory
from semantic.adapters.mlx.kv_cache.paged.cache import PagedCache
from semantic.adapters.mlx.kv_cache.paged.dialect import METAL, dialect_here
from semantic.adapters.mlx.kv_cache.paged.kernels import PagedKernels, computable
from semantic.adapters.mlx.kv_cache.paged.layers import (
    CUDA_COSTS,
    METAL_COSTS,
    PORTABLE_COSTS,
    TOGETHER_COSTS,
    PagedLayers,
    RowCosts,
)
from semantic.adapters.mlx.kv_cache.paged.page_pool import PageKind, page_kinds
from semantic.adapters.mlx.kv_cache.paged.self_test import computes_attention
from semantic.adapters.mlx.kv_cache.paged.side_by_side import Beside
from semantic.adapters.mlx.kv_cache.probe import (
    AttentionUse,
    LogitsProbe,
    attention_use,
    choosing_layers,
)
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape, trace
from semantic.adapters.mlx.kv_cache.staging import MemoryT
from semantic.adapters.mlx.transfers import Transfers
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.value_objects import KvBits, LayerKind, ModelCacheSpec
from semantic.ports.generation import Slices

OFF_VARIABLE = "SEMANTIC_PAGES"
"""Environment variable that disables pages if it is "off"."""

_PREPARED_PAGES = 8
"""The number of host pages to allocate at the start."""

LayerCache = ContiguousCache | PagedCache
"""The cache of one layer of one sequence."""

Memory = KVBuffer | HostPages
"""Memory that receives block bodies while a sequence loads."""

AttentionFor = Callable[[PageKind], PagedAttention | None]
"""Returns the attention over pages of a kind; None if the device has no kernels for them."""


class CacheLayers(Protocol):
    """Creates a model's caches."""

    @property
    def ragged(self) -> tuple[bool, ...]: ...
    @property
    def together(self) -> bool: ...
    @property
    def shared(self) -> tuple[bool, ...]: ...
    @property
    def unused_bytes(self) -> int | None: ...
    def set_aside(self, n_bytes: int) -> None: ...
    def shrink(self, room: int, /) -> bool: ...
    def abandon(self) -> None: ...
    def empty(self, capacity: int) -> list[LayerCache]: ...
    def restored(
        self, blocks: AgentBlocks, length: int, capacity: int, *, exclusive: bool
    ) -> list[LayerCache]: ...
    def reserve(self, caches: Sequence[LayerCache], capacity: int) -> None: ...
    def fill(
        self, caches: Sequence[LayerCache], blocks: Sequence[Sequence[KVBlock]], length: int
    ) -> list[KVBlock]: ...


_TRACED = 16
"""The number of tokens after which all states have their final shapes."""


@dataclass(frozen=True, slots=True)
class CacheForm:
    """A model, its caches, and the codec that converts them to bytes."""

    model: Module
    spec: ModelCacheSpec
    layers: CacheLayers
    codec: BlockCodec[LayerCache, Memory]


def contiguous_form(
    model: Module,
    spec: ModelCacheSpec,
    shapes: Sequence[LayerShape | None],
    ragged: Sequence[bool],
    *,
    together: bool = True,
) -> CacheForm:
    """Return the form in which every cache has separate arrays; see `ContiguousLayers`."""
    layers = ContiguousLayers(model, spec, shapes, ragged, together=together)
    theirs = [
        i
        for i, layer in enumerate(spec.layers)
        if layer.kind is not LayerKind.FULL and not layers.ours[i]
    ]
    empty = dict(enumerate(cast(list[MlxLmCache], make_prompt_cache(model)))) if theirs else {}
    memory = ContiguousMemory(spec, shapes, transfers_here())
    return _form(model, spec, shapes, layers, {i: empty[i] for i in theirs}, memory)


def paged_form(
    probe: LogitsProbe,
    spec: ModelCacheSpec,
    kinds: Sequence[PageKind],
    attention: Sequence[PagedAttention],
    costs: RowCosts,
    beside: Beside,
) -> CacheForm:
    """Return the form that keeps tokens in pages of `kinds`."""
    by_layer = {number: kind.shape for kind in kinds for number in kind.layers}
    shapes = [by_layer.get(number) for number in range(spec.n_layers)]
    make = states_of(probe.model, spec)
    # A Mac shares its memory with all other programs, so do not take any before it is used.
    at_once = dialect_here() is not METAL
    layers = PagedLayers(
        spec, kinds, attention, at_once=at_once, costs=costs, states=make, beside=beside
    )
    transfers = transfers_for(attention)
    if transfers is not None:
        for pool in layers.pools:
            pool.locate = transfers.driver.address
            if pool.kind.ring is None:
                transfers.prepare(pool.kind.page_bytes, _PREPARED_PAGES)
    empty = {} if make is None else make()
    memory = PagedMemory(attention, transfers)
    form = _form(probe.model, spec, shapes, layers, empty, memory)
    return replace(form, model=probe.decoding)


def _form(
    model: Module,
    spec: ModelCacheSpec,
    shapes: Sequence[LayerShape | None],
    layers: ContiguousLayers | PagedLayers,
    empty: Mapping[int, MlxLmCache],
    memory: BlockMemory[CacheT, MemoryT],
) -> CacheForm:
    # This reads only the shapes, and discards the arrays without computing them.
    traced = cast(list[MlxLmCache], trace(model, _TRACED)) if empty else []
    states = {i: expected_state(traced[i]) for i in empty}
    codec: object = BlockCodec(spec, shapes, layers.ours, states, empty, memory)
    made: object = layers
    return CacheForm(
        model, spec, cast(CacheLayers, made), cast("BlockCodec[LayerCache, Memory]", codec)
    )


def find_kernels(kind: PageKind) -> PagedAttention | None:
    """Return this device's kernels for layers of this kind; None if there are none."""
    dialect = dialect_here()
    if os.environ.get(OFF_VARIABLE) == "off" or dialect is None or not computable(kind, dialect):
        return None
    return PagedKernels(kind, dialect)


CHOSEN_LAYERS: dict[str, tuple[bool, ...] | None] = {}
"""Maps a model's fingerprint to the layers that can use our caches. Testing layers is slow."""


def choosing_contiguous(
    probe: LogitsProbe,
    spec: ModelCacheSpec,
    shapes: Sequence[LayerShape | None],
    name: str | None,
    kv_bits: KvBits = 16,
) -> Slices[CacheForm]:
    """Choose the contiguous form. Yields after each forward pass. If `name` is given, later calls
    with this name reuse the choice. Raises UnsupportedModelError if caches cannot have `kv_bits`.
    """
    if name is not None and name in CHOSEN_LAYERS:
        ragged = CHOSEN_LAYERS[name]
    else:
        ragged = yield from choosing_layers(probe, spec, shapes)
        if name is not None:
            CHOSEN_LAYERS[name] = ragged
    ours = ragged or (False,) * spec.n_layers
    if kv_bits == PACKED_BITS:
        shapes = packed_shapes(shapes, ours)
        spec = packed_spec(spec) or spec
    form = contiguous_form(probe.model, spec, shapes, ours, together=ragged is not None)
    yield None
    return form


def choosing_pages(
    probe: LogitsProbe,
    spec: ModelCacheSpec,
    shapes: Sequence[LayerShape | None],
    attention: AttentionFor,
    kv_bits: KvBits = 16,
) -> Slices[CacheForm | None]:
    """Choose the paged form; return None if it is unusable. Yields after each forward pass. Raises
    UnsupportedModelError if caches cannot have `kv_bits`."""
    form = yield from _testing_pages(probe, spec, shapes, attention, kv_bits)
    if form is None and probe.decoding is not probe.model:
        plain = LogitsProbe(probe.model, agree=probe.agree)
        form = yield from _testing_pages(plain, spec, shapes, attention, kv_bits)
    return form


def _testing_pages(
    probe: LogitsProbe,
    spec: ModelCacheSpec,
    shapes: Sequence[LayerShape | None],
    attention: AttentionFor,
    kv_bits: KvBits,
) -> Slices[CacheForm | None]:
    numbers = page_kinds(spec, shapes)
    if numbers is None or is_row_by_row(probe.model):
        return None  # a batch in pages cannot compute row by row
    kinds = numbers
    if kv_bits == PACKED_BITS:
        kinds = tuple(replace(one, shape=packed_shape(one.shape)) for one in kinds)
    found = [one for kind in kinds if (one := attention(kind)) is not None]
    if not probe.agree(len(found) == len(kinds)):
        return None
    uses = attention_use(probe.model, spec, numbers)
    if not probe.agree(_are_right(kinds, found, uses)):
        return None
    yield None
    # Packed heads round, so compare the model over pages of numbers.
    exact = found if kinds is numbers else [PortableAttention() for _ in kinds]
    for beside in _ways(probe.model, spec):
        if (yield from _comparing_pages(probe, spec, numbers, exact, beside)):
            break
    else:
        return None
    costs = {None: PORTABLE_COSTS, METAL: METAL_COSTS}.get(dialect_here(), CUDA_COSTS)
    together = all(
        isinstance(one, PagedKernels) and one.reads_together(use.n_heads, latent=use.latent)
        for one, use in zip(found, uses, strict=True)
    )
    if probe.agree(together):
        costs = TOGETHER_COSTS
    if kinds is not numbers:
        spec = packed_spec(spec) or spec
    return paged_form(probe, spec, kinds, found, costs, beside)


def _are_right(
    kinds: Sequence[PageKind], found: Sequence[PagedAttention], uses: Sequence[AttentionUse]
) -> bool:
    for one, use in zip(found, uses, strict=True):
        if isinstance(one, PagedKernels):
            one.prepare(use.n_heads, use.sinks, latent=use.latent)
    return all(
        computes_attention(kind, one, use.n_heads, use.sinks, latent=use.latent)
        for kind, one, use in zip(kinds, found, uses, strict=True)
    )


def _comparing_pages(
    probe: LogitsProbe,
    spec: ModelCacheSpec,
    kinds: Sequence[PageKind],
    found: Sequence[PagedAttention],
    beside: Beside,
) -> Slices[bool]:
    def layers_of(
        spec: ModelCacheSpec, kinds: Sequence[PageKind], attention: Sequence[PagedAttention]
    ) -> PagedLayers:
        states = states_of(probe.model, spec)
        return PagedLayers(spec, kinds, attention, states=states, beside=beside)

    tested = False
    with probe.narrowed() as narrow:
        small = None if narrow is None else read_spec(probe.model)
        if narrow is not None and small is not None and (yield from narrow.computing()):
            # Kernels are made for one window, and they have passed their tests already: making
            # kernels for narrowed windows would only take time.
            theirs = page_kinds(small, read_shapes(probe.model)) or ()
            tested = tuple(theirs) == tuple(kinds)
            attention = found if tested else [PortableAttention() for _ in theirs]
            if not theirs:
                return False
            if not (yield from narrow.comparing(layers_of(small, theirs, attention))):
                return False
    return tested or (yield from probe.comparing(layers_of(spec, kinds, found)))


def _ways(model: Module, spec: ModelCacheSpec) -> tuple[Beside, ...]:
    make = states_of(model, spec)
    slots = make is not None and all(isinstance(one, ArraysCache) for one in make().values())
    return ("padded", "even", "alone") if slots else ("alone",)


def transfers_for(attention: Sequence[PagedAttention]) -> Transfers | None:
    """Return `Transfers` with the device's copy engine; None if `attention` may move pages."""
    return transfers_here() if all(isinstance(one, PagedKernels) for one in attention) else None
