"""A sequence's paged caches of all layers: made empty, made from blocks, turned into blocks.

Restoring an agent's own blocks moves nothing; another's are shared, but for the one that is
written to. Knows shapes and block sizes; not requests, budgets or batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import Lineups
from semantic.adapters.mlx.kv_cache.paged.cache import PagedCache, PagedLayer
from semantic.adapters.mlx.kv_cache.paged.kinds import PageKind
from semantic.adapters.mlx.kv_cache.paged.page_pool import Lease, Pages
from semantic.adapters.mlx.kv_cache.paged.page_table import Chain, Page, PagedSequence
from semantic.domain.entities import AgentBlocks, BlockData, KVBlock
from semantic.domain.errors import CacheReconstructionError
from semantic.domain.prefix import earliest_cut
from semantic.domain.value_objects import BLOCK_TOKENS, ModelCacheSpec

_USUAL_LENGTH = 8192
"""Tokens of a sequence for which a model's kinds of pages are used up together."""


class PagedLayers:
    """Makes the caches of a model's sequences, in pages of `kinds`."""

    def __init__(
        self,
        spec: ModelCacheSpec,
        kinds: Sequence[PageKind],
        attention: Sequence[PagedAttention],
        *,
        at_once: bool = True,
    ) -> None:
        """`attention[i]` computes over pages of `kinds[i]`.

        `at_once` says that memory that is set aside may be taken before it is needed.
        """
        self._at_once = at_once
        self._spec = spec
        self.pages = [Pages(kind) for kind in kinds]
        self.attention = list(attention)
        self._layers = _layers(spec, kinds, attention)

    @property
    def ragged(self) -> tuple[bool, ...]:
        """Which layers use our caches: all."""
        return (True,) * self._spec.n_layers

    def set_aside(self, n_bytes: int) -> None:
        """Have columns for blocks of `n_bytes` altogether.

        Where a model has several kinds they are divided as sequences of usual length need them;
        a kind that is used more gets more when it needs them.
        """
        sizes = [
            len(range(0, _USUAL_LENGTH, BLOCK_TOKENS))
            if pages.kind.ring is None
            else pages.kind.ring
            for pages in self.pages
        ]
        per_sequence = sum(
            n * pages.kind.column_bytes for n, pages in zip(sizes, self.pages, strict=True)
        )
        for n, pages in zip(sizes, self.pages, strict=True):
            columns = max(1, n_bytes * n // per_sequence)
            pages.expect(columns)
            if self._at_once:
                pages.grow(columns)

    def abandon(self) -> None:
        """Let go of all pages: no cache will be made or used again."""
        for pages in self.pages:
            pages.abandon()

    def empty(self, capacity: int) -> list[PagedCache]:
        """Caches of a new sequence, with room for `capacity` tokens."""
        sequence = PagedSequence([Chain(pages) for pages in self.pages])
        sequence.reserve(capacity)
        return [PagedCache(layer, sequence) for layer in self._layers]

    def restored(
        self, blocks: AgentBlocks, length: int, capacity: int, *, exclusive: bool
    ) -> list[PagedCache]:
        """Caches that begin with the first `length` tokens of `blocks`.

        Exclusive ones are taken over as they lie. Otherwise whole blocks are shared; a block that
        will be written to is copied. Raises CacheReconstructionError when a layer cannot give
        those tokens.
        """
        for pages in self.pages:
            self._check(pages, blocks, length)
        chains: list[Chain] = []
        replaced: list[list[tuple[Lease, Lease]]] = []
        for pages in self.pages:
            leases = _first_page(blocks, pages.kind.layers[0]).leases
            chain = Chain(pages, leases if exclusive else [pages.share(one) for one in leases])
            replaced.append(_own(chain, length))
            chains.append(chain)
        sequence = PagedSequence(chains)
        sequence.reserve(capacity)
        # Last: what is put into pages before they grow is not in the larger ones.
        copied = [
            _copy(pages, pairs, attention)
            for pages, pairs, attention in zip(self.pages, replaced, self.attention, strict=True)
            if pairs
        ]
        mx.eval(copied)
        return [
            PagedCache(layer, sequence, length, _first_page(blocks, i).first)
            for i, layer in enumerate(self._layers)
        ]

    def reserve(self, caches: Sequence[PagedCache], capacity: int) -> None:
        """Make room for `capacity` tokens in every layer."""
        caches[0].sequence.reserve(capacity)

    def fill(
        self,
        caches: Sequence[PagedCache],
        blocks: Sequence[Sequence[KVBlock]],
        length: int,  # noqa: ARG002
    ) -> list[KVBlock]:
        """Put `caches` into `blocks`; returns the blocks not needed. Copies nothing."""
        unused: list[KVBlock] = []
        for pages in self.pages:
            layers = [blocks[i] for i in pages.kind.layers]
            found = _pages_of(caches[pages.kind.layers[0]])
            # Column by column, which is quicker: what a page's blocks are told is looked up once.
            for (start, n_tokens, page), column in zip(
                found, zip(*layers, strict=True), strict=False
            ):
                for block in column:
                    block.start = start
                    block.token_count = n_tokens
                    block.layer_data = page
            unused += [block for mine in layers for block in mine[len(found) :]]
        return unused

    def _check(self, pages: Pages, blocks: AgentBlocks, length: int) -> None:
        """Raise CacheReconstructionError unless the layers of a kind can be cut to `length`."""
        found: list[BlockData] = []
        for i in pages.kind.layers:
            chain = blocks.blocks_for_layer(i)
            who = f"layer {i} of {blocks.agent_id!r}"
            if not chain:
                raise CacheReconstructionError(f"{who}: blocks are missing")
            mine = [block.layer_data for block in chain]
            if mine == found and found:
                continue  # the very same pages as the layer before
            held = blocks.token_range(i)
            earliest = earliest_cut(self._spec.layers[i], held, held.stop)
            if not earliest <= length <= held.stop:
                raise CacheReconstructionError(
                    f"{who} holds tokens {held.start} to {held.stop}; "
                    f"it cannot give the first {length}"
                )
            if found or not _fit(mine, chain, held, pages):
                raise CacheReconstructionError(f"{who} has no pages for its tokens")
            found = mine


def _pages_of(cache: PagedCache) -> list[tuple[int, int, Page]]:
    """The pages of a cache's kind; of each the first token and how many tokens it counts.

    As many as columns, though a window's tokens might do with fewer: what is in a column that no
    block counts would be memory that nobody knows of.
    """
    chain, held = cache.chain, cache.held
    kind = chain.pages.kind
    needed = chain.columns_for(cache.offset)
    leases = tuple(chain.leases[:needed])
    n_bytes = kind.column_bytes // len(kind.layers)
    return [
        (tokens.start, len(tokens), Page(leases, at, held.start, held.stop, n_bytes))
        for at, tokens in enumerate(_divided(held, needed))
    ]


def _fit(found: Sequence[BlockData], chain: Sequence[KVBlock], held: range, pages: Pages) -> bool:
    """Whether these are all the pages of a chain of blocks that holds these positions."""
    first = found[0]
    if not isinstance(first, Page) or (first.first, first.stop) != (held.start, held.stop):
        return False
    if any(a.stop != b.start for a, b in itertools.pairwise(chain)):
        return False
    return all(lease.of(pages) for lease in first.leases) and all(
        isinstance(page, Page) and page.leases is first.leases and page.at == at
        for at, page in enumerate(found)
    )


def _layers(
    spec: ModelCacheSpec, kinds: Sequence[PageKind], attention: Sequence[PagedAttention]
) -> list[PagedLayer]:
    lineups = Lineups()
    layers = {
        number: PagedLayer(i, kind.layers.index(number), attention[i], lineups)
        for i, kind in enumerate(kinds)
        for number in kind.layers
    }
    return [layers[number] for number in range(spec.n_layers)]


def _first_page(blocks: AgentBlocks, layer: int) -> Page:
    page = blocks.blocks_for_layer(layer)[0].layer_data
    if not isinstance(page, Page):
        raise TypeError("an unchecked block")
    return page


def _divided(held: range, n: int) -> list[range]:
    """`held` in `n` ranges of 256 tokens at most, each but perhaps the last with one at least."""
    edges = [
        max(held.start, min(held.start + i * BLOCK_TOKENS, held.stop - n + i)) for i in range(n)
    ]
    return [range(a, b) for a, b in itertools.pairwise([*edges, held.stop])]


def _own(chain: Chain, length: int) -> list[tuple[Lease, Lease]]:
    """Let no column be shared that tokens from `length` on go to; which are replaced, and by which.

    In a ring that is any of them; else only the one that `length` lies in, if it does not begin
    there. Columns behind that hold nothing more: they stay as room unless somebody else reads them.
    """
    pages = chain.pages
    needed = chain.columns_for(length)
    chain.leases[needed:] = [lease for lease in chain.leases[needed:] if not lease.is_shared]
    first = length // BLOCK_TOKENS if pages.kind.ring is None else 0
    replaced: list[tuple[Lease, Lease]] = []
    for at in range(first, needed):
        old = chain.leases[at]
        if old.is_shared:
            chain.leases[at] = pages.take()
            replaced.append((old, chain.leases[at]))
    return replaced


def _copy(
    pages: Pages, pairs: Sequence[tuple[Lease, Lease]], attention: PagedAttention
) -> mx.array:
    """Copy columns into others; what to evaluate."""
    return attention.copy(pages, [old.index for old, _ in pairs], [new.index for _, new in pairs])
