"""Sequences in pages, made from blocks and turned into blocks: what moves, what is shared.

No model is computed: keys and values tell which token they are of, so any column can be checked.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.page_pool import PagedBlock, PageKind, PagePool
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.entities import AgentBlocks
from semantic.domain.errors import CacheReconstructionError
from semantic.domain.prefix import earliest_cut
from semantic.domain.value_objects import BLOCK_TOKENS, ModelCacheSpec
from tests.support.lanes import examples, more_rows
from tests.support.paged_sequences import Running, blocks_of, decode, layers_of, opened, restored

SEVERAL: tuple[int | None, ...] = (None, 300, None, 40, 300, 200)
"""Windows whose rings have two columns, one and two, and full attention."""

LENGTHS = [1, 40, 255, 256, 257, 300, 511, 512, 513, 700, 1100]


def text(n: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(90) for _ in range(n)]


def n_used(layers: PagedLayers) -> list[int]:
    return [pages.n_used for pages in layers.pools]


# What moves


@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_taken_over_lies_where_it_was(length: int) -> None:
    spec, layers = layers_of(*SEVERAL)
    running = opened(layers, text(length))
    before, held = running.pages(), [cache.held for cache in running.caches]
    blocks = blocks_of(spec, layers, running)
    del running
    again = restored(layers, blocks, exclusive=True)
    for now, then in zip(again.pages(), before, strict=True):
        assert now[: len(then)] == then
    assert [cache.held for cache in again.caches] == held
    again.check()
    again.append(layers, text(300, seed=2))
    again.check()


class Counted(PortableAttention):
    """Counts the columns that are copied."""

    def __init__(self) -> None:
        self.copied = 0

    def store(self, pool: PagePool, pages: list[int], data: mx.array) -> mx.array:
        self.copied += len(pages)
        return super().store(pool, pages, data)


@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_shared_is_copied_only_where_it_is_written_to(length: int) -> None:
    attention = Counted()
    spec, layers = layers_of(None, 300, attention=attention)
    blocks = blocks_of(spec, layers, opened(layers, text(length)))
    (full, ring) = n_used(layers)
    fork = restored(layers, blocks, exclusive=False)
    partial = 1 if length % BLOCK_TOKENS else 0
    assert attention.copied == partial + ring
    mine, theirs = fork.pages(), _columns(blocks)
    shared = full - partial
    assert mine[0][:shared] == theirs[0][:shared]
    assert not set(mine[0][shared:]) & set(theirs[0])
    assert not set(mine[1]) & set(theirs[1])
    fork.check()
    del fork
    assert n_used(layers) == [full, ring]


def _columns(blocks: AgentBlocks) -> list[list[int]]:
    """The columns of layers 0 and 1."""
    pages = [blocks.blocks_for_layer(layer)[0].layer_data for layer in (0, 1)]
    return [[ref.index for ref in page.refs] for page in pages if isinstance(page, PagedBlock)]


_CUTS = [(length, cut) for length in LENGTHS for cut in (0, 1, 44, 256, 300) if cut < length]


@pytest.mark.parametrize(("length", "cut"), [*_CUTS[::2], *more_rows(*_CUTS[1::2])])
def test_forks_go_on_without_changing_each_other(length: int, cut: int) -> None:
    spec, layers = layers_of(*SEVERAL)
    first = opened(layers, text(length))
    blocks = blocks_of(spec, layers, first)
    at = length - cut
    if at < max(_earliest(spec, blocks)):
        with pytest.raises(CacheReconstructionError):
            restored(layers, blocks, exclusive=False, length=at)
        return
    forks = [restored(layers, blocks, exclusive=False, length=at) for _ in range(2)]
    forks.append(restored(layers, blocks, exclusive=True, length=at))
    for seed, fork in enumerate(forks):
        fork.append(layers, text(70, seed=seed + 5))
        for other in forks:
            other.check()
    decode(layers, forks, [[7, 8, 9]] * 3)
    for fork in forks:
        fork.append(layers, text(400, seed=30))
        for other in forks:
            other.check()
    first.caches = []
    while forks:
        forks.pop(0)
        for other in forks:
            other.check()
    del fork, other
    assert n_used(layers) == [0] * len(layers.pools)


def _earliest(spec: ModelCacheSpec, blocks: AgentBlocks) -> list[int]:
    return [
        earliest_cut(layer, blocks.token_range(i), blocks.total_tokens)
        for i, layer in enumerate(spec.layers)
    ]


def test_a_source_that_goes_on_does_not_change_its_forks() -> None:
    """The fork shares the column that the source would write to; that one has to move, then."""
    spec, layers = layers_of(None, None)
    blocks = blocks_of(spec, layers, opened(layers, text(700)))
    fork = restored(layers, blocks, exclusive=False, length=600)
    source = restored(layers, blocks, exclusive=True, length=300)
    source.append(layers, text(500, seed=2))
    fork.check()
    source.check()
    assert fork.pages()[0][0] == source.pages()[0][0]
    assert fork.pages()[0][1] != source.pages()[0][1]
    del fork, source
    assert n_used(layers) == [0]


# What is counted


@pytest.mark.parametrize("windows", [(None,), (300,), (40, None), (200, 700, None)])
@pytest.mark.parametrize("length", LENGTHS)
def test_there_are_as_many_columns_as_blocks(windows: tuple[int | None, ...], length: int) -> None:
    """Also when there was room for more, as the core gives it, and when a cache was cut."""
    spec, layers = layers_of(*windows)
    running = opened(layers, text(length))
    running.reserve(layers, length + 300)
    for cut in (0, 30):
        tokens = running.tokens
        blocks = blocks_of(spec, layers, running)
        running.caches = []
        assert n_used(layers) == [
            len(blocks.blocks_for_layer(pages.kind.layers[0])) for pages in layers.pools
        ]
        if length - cut < max(1, *_earliest(spec, blocks)):
            return
        running = restored(layers, blocks, exclusive=True, length=length - cut)
        assert running.tokens == tokens[: length - cut]
        running.check()


@pytest.mark.parametrize("windows", [(None,), (300,), (200,), (700,)])
def test_a_copy_of_a_beginning_has_no_more_columns_than_it_needs(
    windows: tuple[int | None, ...],
) -> None:
    spec, layers = layers_of(*windows)
    blocks = blocks_of(spec, layers, opened(layers, text(511)))
    (before,) = n_used(layers)
    fork = restored(layers, blocks, exclusive=False, length=200)
    (columns,) = fork.pages()
    assert len(columns) == 1
    assert n_used(layers) == [before + 1]
    fork.check()


def test_taking_over_less_than_all_needs_no_column_more() -> None:
    """Blocks are given back only after their sequence runs again: it has to do with its own."""
    spec, layers = layers_of(None)
    (pages,) = layers.pools
    pages.grow(4)
    blocks = blocks_of(spec, layers, opened(layers, text(1000)))
    assert pages.n_used == pages.n_pages == 4
    caches = layers.restored(blocks, 300, 1024, exclusive=True)
    assert pages.n_pages == 4
    again = Running(caches, list(blocks.token_ids[:300]), 1024)
    again.append(layers, text(700, seed=2))
    again.check()
    assert pages.n_pages == 4


class Late(PortableAttention):
    """Stores as the kernels do: into the array that there is when the test says so."""

    def __init__(self) -> None:
        self.told: list[tuple[PagePool, int]] = []

    def store(self, pool: PagePool, pages: list[int], data: mx.array) -> mx.array:
        self.told.append((pool, pool.n_pages))
        return super().store(pool, pages, data)


@pytest.mark.parametrize("windows", [(None,), (300,)])
def test_pages_do_not_grow_between_a_copy_and_its_computation(
    windows: tuple[int | None, ...],
) -> None:
    """What a kernel has to store in an array is lost when a larger one takes its place."""
    attention = Late()
    spec, layers = layers_of(*windows, attention=attention)
    (pages,) = layers.pools
    blocks = blocks_of(spec, layers, opened(layers, text(500)))
    pages.grow(4)
    taken = [pages.take() for _ in range(1)]  # one is left
    fork = Running(
        layers.restored(blocks, 500, 2048, exclusive=False), list(blocks.token_ids), 2048
    )
    assert pages.n_pages > 4
    assert attention.told
    assert all(told == pages.n_pages for _, told in attention.told)
    fork.check()
    del taken


# What is refused


def test_blocks_of_other_pages_are_refused() -> None:
    spec, layers = layers_of(None, 300)
    _, others = layers_of(None, 300)
    blocks = blocks_of(spec, others, opened(others, text(400)))
    with pytest.raises(CacheReconstructionError, match="no pages"):
        layers.restored(blocks, 400, 512, exclusive=False)
    assert n_used(layers) == [0, 0]


def test_blocks_of_two_sequences_are_refused() -> None:
    spec, layers = layers_of(None, None)
    one, other = (blocks_of(spec, layers, opened(layers, text(400, seed=seed))) for seed in (1, 2))
    mixed = AgentBlocks("a", token_ids=one.token_ids)
    for block in (*one.blocks_for_layer(0), *other.blocks_for_layer(1)):
        mixed.add_block(block)
    with pytest.raises(CacheReconstructionError, match="no pages"):
        layers.restored(mixed, 400, 512, exclusive=False)


def test_memory_is_set_aside_as_sequences_of_usual_length_need_it() -> None:
    _, layers = layers_of(None, 300, 300)
    n_bytes = 340 * layers.pools[0].kind.page_bytes
    layers.set_aside(n_bytes)
    assert sum(pages.nbytes for pages in layers.pools) <= n_bytes
    assert sum(pages.nbytes for pages in layers.pools) > 0.95 * n_bytes
    full, ring = sorted(layers.pools, key=lambda pages: pages.kind.ring or 0)
    assert abs(full.n_pages / ring.n_pages - 32 / 2) < 1


# Anything in any order


class Sequences(RuleBasedStateMachine):
    """Sequences that are prefilled, decoded together, preempted, resumed, forked and dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.spec, self.layers = layers_of(None, 300, 40, None, 200)
        self.running: dict[int, Running] = {}
        self.idle: dict[int, AgentBlocks] = {}
        self.numbers = itertools.count()

    @precondition(lambda self: len(self.running) < 4)
    @rule(n=st.sampled_from(LENGTHS), seed=st.integers(0, 3))
    def open(self, n: int, seed: int) -> None:
        self.running[next(self.numbers)] = opened(self.layers, text(n, seed=seed))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), n=st.sampled_from([1, 2, 60, 255, 256, 257, 600]))
    def append(self, data: st.DataObject, n: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        self.running[number].append(self.layers, text(n, seed=number + 50))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), n=st.sampled_from([1, 2, 5, 20]))
    def decode(self, data: st.DataObject, n: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.running)), min_size=1, unique=True))
        steps = [[(step * 7 + number) % 90 for number in chosen] for step in range(n)]
        decode(self.layers, [self.running[number] for number in chosen], steps)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        self.idle[number] = blocks_of(self.spec, self.layers, self.running.pop(number))

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), cut=st.sampled_from([0, 0, 1, 30, 100, 300]))
    def resume(self, data: st.DataObject, cut: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.idle)))
        blocks = self.idle[number]
        length = blocks.total_tokens - cut
        if length >= max(1, *_earliest(self.spec, blocks)):
            del self.idle[number]
            self.running[number] = restored(self.layers, blocks, exclusive=True, length=length)

    @precondition(lambda self: self.idle and len(self.running) < 5)
    @rule(data=st.data(), cut=st.sampled_from([0, 0, 1, 30, 100, 300]))
    def fork(self, data: st.DataObject, cut: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.idle)))
        blocks = self.idle[number]
        length = blocks.total_tokens - cut
        if length >= max(1, *_earliest(self.spec, blocks)):
            self.running[next(self.numbers)] = restored(
                self.layers, blocks, exclusive=False, length=length
            )

    @precondition(lambda self: self.running or self.idle)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted([*self.running, *self.idle])))
        self.running.pop(number, None)
        self.idle.pop(number, None)

    @invariant()
    def everybody_has_their_own_tokens(self) -> None:
        for running in self.running.values():
            running.check()

    @invariant()
    def no_column_is_unknown_to_the_core(self) -> None:
        for pages in self.layers.pools:
            layer = pages.kind.layers[0]
            counted = sum(
                self.spec.blocks_for(running.capacity)[layer] for running in self.running.values()
            ) + sum(len(blocks.blocks_for_layer(layer)) for blocks in self.idle.values())
            assert pages.n_used <= counted, (pages.kind.window, pages.n_used, counted)

    @invariant()
    def nobody_shares_what_they_write_to(self) -> None:
        for number in range(len(self.layers.pools)):
            users = Counter(
                column for running in self.running.values() for column in running.pages()[number]
            )
            for running in self.running.values():
                at = len(running.tokens) // BLOCK_TOKENS
                if self.layers.pools[number].kind.ring is not None:
                    at = 0
                assert all(users[column] == 1 for column in running.pages()[number][at:])

    def teardown(self) -> None:
        for number in sorted(self.idle):
            running = restored(self.layers, self.idle.pop(number), exclusive=True)
            running.check()
            del running
        self.running.clear()
        assert n_used(self.layers) == [0] * len(self.layers.pools)


def test_whatever_happens_everybody_keeps_their_own_tokens() -> None:
    run_state_machine_as_test(
        Sequences, settings=settings(max_examples=examples(5, thorough=100), stateful_step_count=20)
    )


def test_a_pool_without_used_pages_drops_the_old_array_before_it_grows() -> None:
    kind = PageKind((0, 1), LayerShape(2, 16, 16, mx.float32))
    pool = PagePool(kind)
    pool.grow(4)
    used = pool.take()
    pool.data[used.index] = mx.ones(kind.page_shape)
    pool.grow(6)
    assert (pool.n_pages, pool.n_used, used.index) == (6, 1, 0)
    assert bool(mx.all(pool.data[0] == 1).item()), "a page in use is copied"
    del used
    pool.grow(9)
    assert (pool.n_pages, pool.n_used) == (9, 0)
    assert not bool(mx.any(pool.data).item()), "nothing else is"
    assert sorted(ref.index for ref in [pool.take() for _ in range(9)]) == list(range(9))
