"""Sequences in pages without a model: tokens whose keys and values tell what they are and where.

So a test can check the content of any page.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention, PortableAttention
from semantic.adapters.mlx.kv_cache.paged.cache import PagedBatch, PagedCache
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.page_pool import PageKind, page_kinds
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.entities import AgentBlocks, BlockId, KVBlock
from semantic.domain.value_objects import (
    BLOCK_TOKENS,
    LayerKind,
    LayerSpec,
    ModelCacheSpec,
    whole_blocks,
)

HEADS, DIM = 2, 4
SHAPE = LayerShape(HEADS, DIM, DIM, mx.float32)


def spec_of(*windows: int | None) -> ModelCacheSpec:
    """A layer for each window; None is full attention."""
    return ModelCacheSpec(
        tuple(
            LayerSpec(
                LayerKind.FULL if window is None else LayerKind.SLIDING_WINDOW,
                *(HEADS, DIM, DIM, 4),
                window=window,
            )
            for window in windows
        )
    )


def attention_for(kinds: Sequence[PageKind]) -> list[PagedAttention]:
    """The portable one for each kind."""
    return [PortableAttention() for _ in kinds]


def layers_of(
    *windows: int | None, attention: PagedAttention | None = None
) -> tuple[ModelCacheSpec, PagedLayers]:
    """The spec of `spec_of` and its pages."""
    spec = spec_of(*windows)
    kinds = page_kinds(spec, [SHAPE] * spec.n_layers)
    assert kinds is not None
    found = attention_for(kinds) if attention is None else [attention] * len(kinds)
    return spec, PagedLayers(spec, kinds, found)


def values_of(tokens: Sequence[int], first: int, layer: int) -> tuple[mx.array, mx.array]:
    """Keys and values, (1, HEADS, n, DIM), of tokens at positions from `first` on."""
    n = len(tokens)
    where = mx.array([t * 1009 + (first + i) * 31 for i, t in enumerate(tokens)])
    inner = mx.arange(HEADS * DIM).reshape(HEADS, 1, DIM)
    keys = (where.reshape(1, n, 1) + inner * 7 + layer * 131).astype(mx.float32)
    return keys[None], -keys[None] - 0.5


@dataclass
class Running:
    """A running sequence: its caches, the tokens it should hold, its room."""

    caches: list[PagedCache]
    tokens: list[int] = field(default_factory=list)
    capacity: int = BLOCK_TOKENS

    def reserve(self, layers: PagedLayers, n_tokens: int) -> None:
        """Have room as the core gives it: for whole blocks."""
        self.capacity = max(self.capacity, whole_blocks(n_tokens))
        layers.reserve(self.caches, self.capacity)

    def append(self, layers: PagedLayers, tokens: Sequence[int]) -> None:
        """Prefill these tokens."""
        self.reserve(layers, len(self.tokens) + len(tokens))
        for i, cache in enumerate(self.caches):
            seen_from = cache._seen_from()
            k, v = cache.update_and_fetch(*values_of(tokens, len(self.tokens), i))
            whole = [*self.tokens, *tokens]
            expected = values_of(whole[seen_from:], seen_from, i)
            assert mx.array_equal(k, expected[0])
            assert mx.array_equal(v, expected[1])
        mx.eval([cache.state for cache in self.caches])
        self.tokens += tokens

    def pages(self) -> list[list[int]]:
        """Where each kind's columns are."""
        return [table.pages for table in self.caches[0].sequence.tables]

    def check(self) -> None:
        """Every token that is held is what it should be."""
        for i, cache in enumerate(self.caches):
            assert cache.held.stop == len(self.tokens), (i, cache.held)
            check_columns(cache, i, self.tokens)


def check_columns(cache: PagedCache, layer: int, tokens: Sequence[int]) -> None:
    """The held tokens lie where a kernel looks for them."""
    kind, pages = cache.table.pool.kind, cache.table.pages
    window = kind.window
    least = len(tokens) if window is None else min(len(tokens), window - 1)
    assert len(cache.held) >= least, (layer, cache.held)
    data = cache.table.pool.data
    for block in range(cache.held.start // BLOCK_TOKENS, -(-cache.held.stop // BLOCK_TOKENS)):
        first = max(cache.held.start, block * BLOCK_TOKENS)
        stop = min(cache.held.stop, (block + 1) * BLOCK_TOKENS)
        page = pages[block if kind.ring is None else block % kind.ring]
        slots = slice(first - block * BLOCK_TOKENS, stop - block * BLOCK_TOKENS)
        expected = values_of(tokens[first:stop], first, layer)
        found = kind.keys_and_values(data[page, cache.layer.number])
        for heads, right in zip(found, expected, strict=True):
            assert mx.array_equal(heads[:, slots], right[0]), (layer, first, stop)


_ids = itertools.count()


def blocks_of(
    spec: ModelCacheSpec, layers: PagedLayers, running: Running, agent: str = "a"
) -> AgentBlocks:
    """An ended sequence as blocks, as the core keeps it."""
    mine: list[list[KVBlock]] = [
        [KVBlock(BlockId(next(_ids)), layer) for _ in range(n)]
        for layer, n in enumerate(spec.blocks_for(running.capacity))
    ]
    unused = {block.block_id for block in layers.fill(running.caches, mine, len(running.tokens))}
    blocks = AgentBlocks(agent, token_ids=tuple(running.tokens))
    for block in itertools.chain(*mine):
        if block.block_id not in unused:
            assert 1 <= block.token_count <= BLOCK_TOKENS
            blocks.add_block(block)
    return blocks


def restored(
    layers: PagedLayers, blocks: AgentBlocks, *, exclusive: bool, length: int | None = None
) -> Running:
    """A sequence that begins with the first `length` tokens of `blocks`, or with all of them.

    One that takes them over has the room they had.
    """
    length = blocks.total_tokens if length is None else length
    capacity = whole_blocks((blocks.total_tokens if exclusive else length) + 1)
    caches = layers.restored(blocks, length, capacity, exclusive=exclusive)
    if exclusive:
        for block in blocks.all_blocks():
            block.layer_data = None
    return Running(caches, list(blocks.token_ids[:length]), capacity)


def opened(layers: PagedLayers, tokens: Sequence[int]) -> Running:
    """A new sequence of `tokens`."""
    running = Running(layers.empty(BLOCK_TOKENS))
    running.append(layers, tokens)
    return running


def decode(layers: PagedLayers, rows: Sequence[Running], steps: Sequence[Sequence[int]]) -> None:
    """Decode all rows together; `steps[s][row]` is the token of a step."""
    for row in rows:
        row.reserve(layers, len(row.tokens) + len(steps))
    batches: list[PagedBatch] = [
        PagedCache.merge([row.caches[i] for row in rows]) for i in range(len(rows[0].caches))
    ]
    q = mx.zeros((len(rows), HEADS, 1, DIM))
    for tokens in steps:
        for i, batch in enumerate(batches):
            assert batch.offset[: len(rows)].tolist() == [len(row.tokens) for row in rows]
            pairs = [
                values_of([token], len(row.tokens), i)
                for row, token in zip(rows, tokens, strict=True)
            ]
            k, v = (mx.concatenate(list(each)) for each in zip(*pairs, strict=True))
            handle, _ = batch.update_and_fetch(k, v)
            mx.eval(batch.attend(q, handle, 1.0, None))
        for row, token in zip(rows, tokens, strict=True):
            row.tokens.append(token)
    for number, row in enumerate(rows):
        row.caches = [batch.extract(number) for batch in batches]
