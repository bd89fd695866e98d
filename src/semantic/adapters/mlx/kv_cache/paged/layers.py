"""Creates a sequence's paged caches, empty or from blocks, and converts them to blocks.

Caches share the blocks of another agent copy-on-write.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from semantic.adapters.mlx.kv_cache.contiguous.layers import (
    MakeStates,
    MlxLmCache,
    MlxLmState,
    cut_state,
    fill_state,
    require_cut,
)
from semantic.adapters.mlx.kv_cache.merged import StateBatch
from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import (
    BatchMetadata,
    MetadataCache,
    RowSize,
    exact,
    row_size,
    rows_of,
)
from semantic.adapters.mlx.kv_cache.paged.cache import PagedBatch, PagedCache, PagedLayer
from semantic.adapters.mlx.kv_cache.paged.page_pool import (
    PagedBlock,
    PagedSequence,
    PageKind,
    PagePool,
    PageRef,
    PageTable,
)
from semantic.adapters.mlx.kv_cache.paged.side_by_side import (
    Beside,
    ChunkBatch,
    ChunkLayers,
    ChunkLayout,
)
from semantic.domain.entities import AgentBlocks, BlockData, KVBlock
from semantic.domain.errors import CacheReconstructionError
from semantic.domain.value_objects import BLOCK_TOKENS, ModelCacheSpec

_USUAL_LENGTH = 8192
"""The length, in tokens, of a sequence that would fill the pools of all kinds equally."""


class RowCosts(NamedTuple):
    """Limits on the bytes of keys and values that prompt tokens may read as rows of a batch."""

    alone: int  # rows are faster than attention over a chunk
    joined: int  # other sequences may share the pass
    pad_to: int = 1  # chunks are padded to a multiple of this many tokens
    size: RowSize = exact  # batches are padded to this many rows


CUDA_COSTS = RowCosts(alone=96 << 30, joined=16 << 30, pad_to=128, size=row_size)
"""For CUDA: a new shape of attention costs some 60 ms; the device reads at least 3 TB/s."""
TOGETHER_COSTS = CUDA_COSTS._replace(alone=4 << 40, joined=256 << 30)
"""For devices where rows of one sequence read its keys together."""
METAL_COSTS = RowCosts(alone=2 << 30, joined=2 << 30)
"""For Metal: new shapes cost nothing, and the device reads 0.1 to 0.8 TB/s."""
PORTABLE_COSTS = RowCosts(alone=1 << 18, joined=1 << 18, pad_to=16, size=row_size)
"""Low limits, so that small models reach all code paths."""


class PagedLayers:
    """Creates a model's caches in pages of `kinds`."""

    together = True
    """Always True: several sequences can be one batch."""

    def __init__(
        self,
        spec: ModelCacheSpec,
        kinds: Sequence[PageKind],
        attention: Sequence[PagedAttention],
        *,
        at_once: bool = True,
        costs: RowCosts = PORTABLE_COSTS,
        states: MakeStates | None = None,
        beside: Beside = "alone",
    ) -> None:
        """`attention[i]` computes over pages of `kinds[i]`. `states` creates the caches of layers
        without pages. If `at_once`, `set_aside` allocates memory immediately."""
        self.beside: Beside = "alone" if states is None else beside
        self._at_once = at_once
        # A state would include padding.
        self.costs = costs if states is None else costs._replace(pad_to=1)
        self._states = states
        self._spec = spec
        self.pools = [PagePool(kind) for kind in kinds]
        self.attention = list(attention)
        self._row_size = costs.size
        self._metadata = MetadataCache(costs.size)
        self._layers = _layers(kinds, attention, self._metadata)
        self.ragged = (True,) * spec.n_layers
        """`ragged[i]` is always True: every layer can be in our batch."""
        self.ours = tuple(i in self._layers for i in range(spec.n_layers))
        """`ours[i]` is True if layer i has pages."""
        whole = [i for kind in kinds if kind.ring is None for i in kind.layers]
        self.shared = tuple(i in whole for i in range(spec.n_layers))
        """`shared[i]` is True if sequences share the pages of layer i until they write to them."""
        self.takes_rows = states is None
        """True if a sequence's tokens can be rows of a batch."""

    def pad_batches(self, size: RowSize) -> None:
        """Let all batches from now on have `size(n)` rows, with padding rows if that exceeds n."""
        self._row_size = self._metadata.size = size

    @property
    def spare(self) -> int:
        """The number of drafts that a step may check and that a sequence may have read in advance.
        Windows still hold all tokens without them."""
        spares = [
            (kind.ring * BLOCK_TOKENS - kind.window) // 2 - 1
            for kind in (pool.kind for pool in self.pools)
            if kind.ring is not None and kind.window is not None
        ]
        return min(spares, default=_USUAL_LENGTH)

    def set_aside(self, n_bytes: int) -> None:
        """Set the sizes of the page pools. All pools together take `n_bytes`."""
        sizes = [
            len(range(0, _USUAL_LENGTH, BLOCK_TOKENS)) if pool.kind.ring is None else pool.kind.ring
            for pool in self.pools
        ]
        per_sequence = sum(
            n * pool.kind.page_bytes for n, pool in zip(sizes, self.pools, strict=True)
        )
        per_sequence += sum(layer.state_bytes for layer in self._spec.layers)
        for n, pool in zip(sizes, self.pools, strict=True):
            pages = max(1, n_bytes * n // per_sequence)
            pool.shrink(0)  # loading a model may have used more pages
            pool.expect(pages)
            if self._at_once:
                pool.grow(pages)

    @property
    def unused_bytes(self) -> int:
        return sum((one.n_pages - one.n_used) * one.kind.page_bytes for one in self.pools)

    def shrink(self, room: int) -> bool:
        """Free the memory of unused pages; see `PagePool.shrink`."""
        return sum(pool.shrink(room) for pool in self.pools) > 0

    def abandon(self) -> None:
        """Free all pools. Caches must not be created or used afterwards."""
        for pool in self.pools:
            pool.abandon()

    def empty(self, capacity: int) -> list[PagedCache]:
        """Return the caches of a new sequence, with pages for `capacity` tokens."""
        sequence = PagedSequence([PageTable(pool) for pool in self.pools])
        sequence.reserve(capacity)
        states = {} if self._states is None else self._states()
        return self._with_states(lambda _, layer: PagedCache(layer, sequence), states)

    def restored(
        self, blocks: AgentBlocks, length: int, capacity: int, *, exclusive: bool
    ) -> list[PagedCache]:
        """Return caches that begin with the first `length` tokens of `blocks`. Raises
        CacheReconstructionError if a layer does not hold them."""
        for pool in self.pools:
            self._check(pool, blocks, length)
        states = {
            i: cut_state(_state_of(blocks, i), length, exclusive=exclusive)
            for i in range(self._spec.n_layers)
            if i not in self._layers
        }
        tables: list[PageTable] = []
        replaced: list[list[tuple[PageRef, PageRef]]] = []
        for pool in self.pools:
            refs = _first_block(blocks, pool.kind.layers[0]).refs
            table = PageTable(pool, refs if exclusive else [pool.share(one) for one in refs])
            replaced.append(_unshare(table, length, capacity))
            tables.append(table)
        sequence = PagedSequence(tables)
        sequence.reserve(capacity)
        # Do this last: a pool that grows afterwards would lack these writes.
        copied = [
            attention.copy(pool, [old.index for old, _ in pairs], [new.index for _, new in pairs])
            for pool, pairs, attention in zip(self.pools, replaced, self.attention, strict=True)
            if pairs
        ]
        mx.eval(copied)

        def cache(number: int, layer: PagedLayer) -> PagedCache:
            return PagedCache(layer, sequence, length, _first_block(blocks, number).first)

        return self._with_states(cache, states)

    def _with_states(
        self, paged: Callable[[int, PagedLayer], PagedCache], states: Mapping[int, MlxLmCache]
    ) -> list[PagedCache]:
        return [
            cast(PagedCache, states[i]) if i in states else paged(i, self._layers[i])
            for i in range(self._spec.n_layers)
        ]

    def reserve(self, caches: Sequence[PagedCache], capacity: int) -> None:
        """Allocate pages for `capacity` tokens in every layer."""
        first_paged(caches).sequence.reserve(capacity)

    def reads_as_rows(self, caches: Sequence[PagedCache], n_tokens: int, n_bytes: int) -> bool:
        """Return whether the next `n_tokens` can be rows of a batch that reads only `n_bytes`."""
        paged = first_paged(caches)
        total = 0
        for table in paged.sequence.tables:
            kind = table.pool.kind
            seen = paged.offset + n_tokens // 2 + 1
            if kind.ring is not None and kind.window is not None:
                if n_tokens > kind.ring * BLOCK_TOKENS - kind.window + 1:
                    return False
                seen = min(seen, kind.window)
            total += n_tokens * seen * kind.page_bytes // BLOCK_TOKENS
        return total <= n_bytes

    def rows(self, chunks: Sequence[tuple[Sequence[PagedCache], int]]) -> list[PagedBatch]:
        """Return a batch's caches by layer. The batch's rows are all sequences' next tokens."""
        metadata = _rows_of(chunks, self._row_size)
        layers = self._layers.values()
        return [PagedBatch(layer, metadata, (), together=True) for layer in layers]

    def chunk_layers(self, chunks: Sequence[tuple[Sequence[PagedCache], int]]) -> ChunkLayers:
        """Return each layer's cache for one pass over all sequences' next tokens. Raises ValueError
        if the model cannot pad `chunks`."""
        counts = [n_tokens for _, n_tokens in chunks]
        width = max(counts) if self.beside == "even" else self.costs.size(max(counts))
        shape = n_sequences, _ = self.costs.size(len(chunks)), width
        even = all(count == width for count in counts)
        if self.beside == "even" and not even:
            raise ValueError(f"expected {width} tokens from each sequence, got {counts}")
        size = (lambda _: n_sequences * width) if even else self.costs.size
        metadata = _rows_of(chunks, size)
        firsts = [first_paged(caches).offset for caches, _ in chunks]
        layout = ChunkLayout(firsts, counts, shape, metadata.n_rows)
        layers: list[ChunkBatch | StateBatch] = []
        for i in range(self._spec.n_layers):
            if i in self._layers:
                layers.append(ChunkBatch(self._layers[i], metadata, layout))
                continue
            states = StateBatch([cast(ArraysCache, caches[i]) for caches, _ in chunks])
            states.pad_to(n_sequences)
            if not even:
                states.take(counts)
            layers.append(states)
        return ChunkLayers(shape, layers)

    def fill(
        self, caches: Sequence[PagedCache], blocks: Sequence[Sequence[KVBlock]], length: int
    ) -> list[KVBlock]:
        """Fill `blocks` with references to the caches' pages; return the unused blocks."""
        unused: list[KVBlock] = []
        for pool in self.pools:
            layers = [blocks[i] for i in pool.kind.layers]
            found = _pages_of(caches[pool.kind.layers[0]])
            # Go page by page, which is faster: one look-up of a page's values serves all its
            # blocks.
            for (start, n_tokens, block_data), page in zip(
                found, zip(*layers, strict=True), strict=False
            ):
                for block in page:
                    block.start = start
                    block.token_count = n_tokens
                    block.layer_data = block_data
            unused += [block for mine in layers for block in mine[len(found) :]]
        for i, layer in enumerate(self._spec.layers):
            if i not in self._layers:
                state = MlxLmState(cast(MlxLmCache, caches[i]), length)
                unused += blocks[i][fill_state(layer, state, blocks[i]) :]
        return unused

    def _check(self, pool: PagePool, blocks: AgentBlocks, length: int) -> None:
        found: list[BlockData] = []
        for i in pool.kind.layers:
            layer_blocks = blocks.blocks_for_layer(i)
            who = f"layer {i} of {blocks.agent_id!r}"
            if not layer_blocks:
                raise CacheReconstructionError(f"{who}: blocks are missing")
            mine = [block.layer_data for block in layer_blocks]
            if mine == found and found:
                continue  # shares pages with other layers
            held = blocks.token_range(i)
            require_cut(self._spec.layers[i], held, length, who)
            if found or not _fit(mine, layer_blocks, held, pool):
                raise CacheReconstructionError(f"{who} has no pages for its tokens")
            found = mine


def _pages_of(cache: PagedCache) -> list[tuple[int, int, PagedBlock]]:
    """For each page in use, return its first position, its number of tokens and its block data."""
    table, held = cache.table, cache.held
    kind = table.pool.kind
    needed = table.pages_for(cache.offset)
    refs = tuple(table.refs[:needed])
    n_bytes = kind.page_bytes // len(kind.layers)
    return [
        (tokens.start, len(tokens), PagedBlock(refs, at, held.start, held.stop, n_bytes))
        for at, tokens in enumerate(_divided(held, needed))
    ]


def _fit(
    found: Sequence[BlockData], blocks: Sequence[KVBlock], held: range, pool: PagePool
) -> bool:
    first = found[0]
    if not isinstance(first, PagedBlock) or (first.first, first.stop) != (held.start, held.stop):
        return False
    if any(a.stop != b.start for a, b in itertools.pairwise(blocks)):
        return False
    return all(ref.of(pool) for ref in first.refs) and all(
        isinstance(block_data, PagedBlock) and block_data.refs is first.refs and block_data.at == at
        for at, block_data in enumerate(found)
    )


def _rows_of(chunks: Sequence[tuple[Sequence[PagedCache], int]], size: RowSize) -> BatchMetadata:
    given = [(first_paged(caches), n_tokens) for caches, n_tokens in chunks]
    for paged, n_tokens in given:
        paged.sequence.reserve(paged.offset + n_tokens)
    sequences, positions = rows_of((one.sequence, one.offset, n_tokens) for one, n_tokens in given)
    return BatchMetadata(tuple(sequences), tuple(positions), size)


def _layers(
    kinds: Sequence[PageKind], attention: Sequence[PagedAttention], metadata_cache: MetadataCache
) -> dict[int, PagedLayer]:
    layers = {
        number: PagedLayer(i, kind.layers.index(number), attention[i], metadata_cache)
        for i, kind in enumerate(kinds)
        for number in kind.layers
    }
    return dict(sorted(layers.items()))


def first_paged(caches: Sequence[object]) -> PagedCache:
    """Return the first of a sequence's caches that has pages."""
    return next(cache for cache in caches if isinstance(cache, PagedCache))


def _state_of(blocks: AgentBlocks, layer: int) -> MlxLmState:
    found = {block.layer_data for block in blocks.blocks_for_layer(layer)}
    states = [one for one in found if isinstance(one, MlxLmState)]
    if len(states) != 1:
        raise CacheReconstructionError(f"layer {layer} of {blocks.agent_id!r} has no state")
    return states[0]


def _first_block(blocks: AgentBlocks, layer: int) -> PagedBlock:
    block_data = blocks.blocks_for_layer(layer)[0].layer_data
    if not isinstance(block_data, PagedBlock):
        raise TypeError("an unchecked block")
    return block_data


def _divided(held: range, n: int) -> list[range]:
    """Divide the positions `held` into `n` ranges of at most 256. Only the last may be empty."""
    edges = [
        max(held.start, min(held.start + i * BLOCK_TOKENS, held.stop - n + i)) for i in range(n)
    ]
    return [range(a, b) for a, b in itertools.pairwise([*edges, held.stop])]


def _unshare(table: PageTable, length: int, capacity: int) -> list[tuple[PageRef, PageRef]]:
    """Replace the shared pages that writes from position `length` on would change. Returns pairs of
    old and new references; the caller copies the pages. Leaves free pages for `capacity` tokens."""
    pool = table.pool
    needed = table.pages_for(length)
    table.refs[needed:] = [ref for ref in table.refs[needed:] if not ref.is_shared]
    missing = max(0, table.pages_for(capacity) - len(table.refs))
    first = length // BLOCK_TOKENS if pool.kind.ring is None else 0
    replaced: list[tuple[PageRef, PageRef]] = []
    for at in range(first, needed):
        old = table.refs[at]
        pool.await_loan(old, missing)
        if old.is_shared:
            table.refs[at] = pool.take()
            replaced.append((old, table.refs[at]))
    return replaced
