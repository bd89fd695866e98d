"""Sequences in pages that decode together: joins, leaves and pauses in any order."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import ClassVar, cast

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from semantic.adapters.mlx.kv_cache.paged.batch_metadata import (
    BatchMetadata,
    LateMetadata,
    MetadataCache,
    StepPlan,
    row_size,
    rows_of,
)
from semantic.adapters.mlx.kv_cache.paged.cache import PagedCache
from semantic.adapters.mlx.kv_cache.paged.kernel_source import ITEM_INTS
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.page_pool import PagePool
from semantic.adapters.mlx.model.provider import warming_up
from semantic.domain.value_objects import SamplingParams, SequenceId
from tests.support.in_pages import SUFFIX, tiny_backend
from tests.support.lanes import examples, more
from tests.support.one_batch import said_by
from tests.support.paged_sequences import DIM, HEADS, Running, decode, layers_of, opened, values_of
from tests.support.reference import generate, same_answer
from tests.support.rig import cache_bytes
from tests.support.tiny_models import VOCAB, tiny_model

_MOST_NEW = 40


@functools.cache
def solo(architecture: str, prompt: tuple[int, ...]) -> list[int]:
    """What mlx-lm alone answers."""
    return generate(tiny_model(architecture), prompt, _MOST_NEW)


@functools.cache
def text(seed: int, n: int) -> tuple[int, ...]:
    return tuple((seed * 31 + i * i * 7 + i * 3) % VOCAB for i in range(n))


class Together(RuleBasedStateMachine):
    """Sequences join, leave and are paused while others decode."""

    architecture: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.backend = tiny_backend(self.architecture + SUFFIX)
        self.prompts: dict[SequenceId, tuple[int, ...]] = {}
        self.said: dict[SequenceId, list[int]] = {}
        self.paused: set[SequenceId] = set()

    @precondition(lambda self: len(self.prompts) < 5)
    @rule(n=st.sampled_from([1, 2, 40, 255, 256, 257, 300, 511]), seed=st.integers(0, 2))
    def join(self, n: int, seed: int) -> None:
        prompt = text(seed, n)
        sequence = self.backend.open(256 * (n // 256 + 1))
        if n > 1:
            self.backend.prefill(sequence, prompt[:-1])
        self.backend.start(sequence, prompt[-1], prompt[:-1], SamplingParams(), 0)
        self.prompts[sequence], self.said[sequence] = prompt, []

    @precondition(lambda self: len(self.prompts) > len(self.paused))
    @rule(n=st.integers(1, 8))
    def step(self, n: int) -> None:
        for _ in range(n):
            for one in self.backend.decode():
                self.said[one.sequence].append(one.token)
        self._check()
        for sequence in [one for one, said in self.said.items() if len(said) > _MOST_NEW - 12]:
            self._end(sequence)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.prompts))))

    @precondition(lambda self: len(self.prompts) > len(self.paused))
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.prompts.keys() - self.paused)))
        self.backend.pause(sequence)
        self.paused.add(sequence)

    @precondition(lambda self: self.paused)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """With the token that comes next anyway, so that the answer stays the same."""
        sequence = data.draw(st.sampled_from(sorted(self.paused)))
        self.paused.remove(sequence)
        prompt, held = self.prompts[sequence], self.backend.length(sequence)
        whole = [*prompt, *solo(self.architecture, prompt)]
        self.said[sequence] = whole[len(prompt) : held + 1]
        self.backend.start(sequence, whole[held], whole[:held], SamplingParams(), 0)

    def _end(self, sequence: SequenceId) -> None:
        self.backend.close(sequence)
        self.paused.discard(sequence)
        del self.prompts[sequence], self.said[sequence]

    def _check(self) -> None:
        for sequence, said in self.said.items():
            prompt = self.prompts[sequence]
            expected = solo(self.architecture, prompt)[: len(said)]
            assert same_answer(tiny_model(self.architecture), prompt, said, expected)

    def teardown(self) -> None:
        self._check()
        for sequence in list(self.prompts):
            self._end(sequence)
        assert cache_bytes(self.backend) == 0
        gc.collect()
        layers: object = self.backend._layers
        assert isinstance(layers, PagedLayers)
        assert [pages.n_used for pages in layers.pools] == [0] * len(layers.pools)


@pytest.mark.parametrize("architecture", ["windows", *more("llama")])
def test_whoever_comes_and_goes_everybody_says_what_they_say_alone(architecture: str) -> None:
    machine = type(f"Together_{architecture}", (Together,), {"architecture": architecture})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(2, thorough=20), stateful_step_count=15)
    )


# Without a model


def test_rows_are_taken_out_in_any_order_with_their_own_tokens() -> None:
    _, layers = layers_of(None, 40, None)
    rows = [opened(layers, list(text(seed, 200 + 30 * seed))) for seed in range(5)]
    decode(layers, rows, [[1, 2, 3, 4, 5]] * 2)
    decode(layers, [rows[4], rows[0], rows[2]], [[6, 7, 8]] * 70)
    decode(layers, [rows[1], rows[4]], [[9, 10]] * 5)
    for row in rows:
        row.check()


def test_a_batch_is_filtered_and_extended_without_moving_anything() -> None:
    _, layers = layers_of(None)
    rows = [opened(layers, list(text(seed, 100 * seed + 50))) for seed in range(4)]
    before = [row.pages() for row in rows]
    batch = PagedCache.merge([row.caches[0] for row in rows[:3]])
    batch.filter([2, 0])
    assert batch.offset.tolist() == [250, 50]
    batch.extend(PagedCache.merge([rows[3].caches[0]]))
    assert batch.offset[:3].tolist() == [250, 50, 350]
    for number, row in enumerate((rows[2], rows[0], rows[3])):
        cache = batch.extract(number)
        assert cache.sequence is row.caches[0].sequence
        assert cache.held == row.caches[0].held
    assert [row.pages() for row in rows] == before


def test_a_batch_takes_one_token_of_each_sequence_at_a_time() -> None:
    _, layers = layers_of(None)
    batch = PagedCache.merge([opened(layers, [1, 2, 3]).caches[0]])
    with pytest.raises(ValueError, match="one token per sequence"):
        batch.update_and_fetch(*values_of([1, 2], 3, 0))
    assert batch.offset.tolist() == [3]


# Lineups


def row_of(length: int, *windows: int | None) -> Running:
    _, layers = layers_of(*windows)
    return opened(layers, list(text(1, length)))


def test_all_layers_share_a_lineup_and_nobody_keeps_it() -> None:
    metadata_cache = MetadataCache()
    sequence = row_of(300, None).caches[0].sequence
    metadata = metadata_cache.get([sequence], [300])
    assert metadata_cache.get([sequence], [300]) is metadata
    assert metadata_cache.get([sequence], [301]) is not metadata
    metadata = metadata_cache.get([sequence], [300])
    gone = weakref.ref(metadata)
    del metadata
    assert gone() is None


def test_positions_go_on_step_by_step_and_may_begin_anywhere() -> None:
    sequence = row_of(10, None).caches[0].sequence
    metadata = BatchMetadata((sequence, sequence), (10, 700))
    for step in (0, 0, 1, 2, 2, 7, 3, 4, 0):
        assert metadata.positions(step).tolist() == [10 + step, 700 + step], step
        assert metadata.positions(step).dtype == mx.int32


@pytest.mark.parametrize("window", [None, 40, 300])
def test_a_plan_is_kept_as_long_as_it_is_good_and_knows_columns_that_came_later(
    window: int | None,
) -> None:
    row = row_of(250, window)
    table = row.caches[0].table
    metadata = BatchMetadata((row.caches[0].sequence,), (250,))
    plans: list[StepPlan] = []
    for step in range(400):
        plan = metadata.plan(0, step, 8)
        assert step < plan.until
        if not plans or plans[-1] is not plan:
            assert not plans or step == plans[-1].until
            plans.append(plan)
        assert table.has_capacity(250 + step + 1)
        numbers = cast("list[int]", plan.plan.tolist())
        for item in range(plan.n_items):
            _, start, stop, at, *_ = numbers[ITEM_INTS * item : ITEM_INTS * item + ITEM_INTS]
            position = 250 + step
            if start <= position < stop:
                found = numbers[at + position // 256 - start // 256]
                block = position // 256
                ring = table.pool.kind.ring
                assert found == table.pages[block if ring is None else block % ring]
    assert 2 <= len(plans) <= 12


@pytest.mark.parametrize("window", [None, 300])
def test_metadata_that_come_late_are_those_of_rows_known_before(window: int | None) -> None:
    row, other = row_of(700, window), row_of(30, window)
    sequences = [one.caches[0].sequence for one in (row, other)]

    def rows(*counts: int, more: int = 0) -> BatchMetadata:
        given = zip(sequences, (700, 30), counts, strict=True)
        chunks = [(sequence, length + more, n) for sequence, length, n in given]
        found, positions = rows_of(chunks)
        return BatchMetadata(tuple(found), tuple(positions), row_size)

    late = LateMetadata(rows(3, 4))
    plan, positions = late.plan(0, 0, 8, 4), late.positions(0) + 0
    assert late.plan(0, 0, 8, 4) is plan
    real = rows(6, 1, more=2)
    assert not late.fill(rows(6, 3)), "9 rows, with padding 16"
    assert not late.fill(rows(1, 1)), "few rows would cost more than they should"
    assert late.fill(real)
    assert positions.tolist() == [*range(702, 708), 32, 1]
    expected = real.split(0, 0, 8, 4, plan.n_items)
    numbers = cast("list[int]", plan.plan.tolist())
    assert numbers[: len(expected.numbers)] == expected.numbers
    assert not any(numbers[len(expected.numbers) :])
    assert cast("list[int]", plan.spans.tolist())[: 2 * 7] == expected.spans
    assert plan.n_results >= expected.n_results
    few = real.split(0, 0, 8, 4)
    for item in range(plan.n_items):
        mine = expected.numbers[item * ITEM_INTS : (item + 1) * ITEM_INTS]
        if item < few.n_items:
            theirs = few.numbers[item * ITEM_INTS : (item + 1) * ITEM_INTS]
            moved = (plan.n_items - few.n_items) * ITEM_INTS
            assert mine == [*theirs[:3], theirs[3] + moved, *theirs[4:]]
        else:
            assert mine[1] == mine[2], "an item without keys"
            assert mine[5] == 1, "no thread group waits for others"


def test_metadata_that_come_late_have_no_room_for_another_pool() -> None:
    row = row_of(100, None)
    sequence = row.caches[0].sequence
    late = LateMetadata(BatchMetadata((sequence,) * 2, (100, 101)))
    late.plan(0, 0, 8, 4)
    assert late.fill(BatchMetadata((sequence,) * 2, (102, 103)))
    pool = sequence.tables[0].pool
    pool.grow(pool.n_pages + 1)
    assert not late.fill(BatchMetadata((sequence,) * 2, (102, 103)))


def test_the_handle_of_a_batch_has_a_token_of_each_row() -> None:
    _, layers = layers_of(None)
    rows = [opened(layers, [1]), opened(layers, [2, 3])]
    batch = PagedCache.merge([row.caches[0] for row in rows])
    k = mx.zeros((2, HEADS, 1, DIM))
    keys, values = batch.update_and_fetch(k, k)
    assert keys is values
    assert keys.step == 0
    assert batch.offset.tolist() == [2, 3]


def test_batches_have_few_sizes_and_at_most_twice_the_rows() -> None:
    sizes = [row_size(n) for n in range(1, 257)]
    assert len(set(sizes)) == 13
    assert all(n <= size < max(2 * n, 2) for n, size in enumerate(sizes, 1))
    assert [row_size(n) for n in (1, 2, 3, 8, 16, 17, 24, 25, 33, 49)] == [
        1, 2, 4, 8, 16, 24, 24, 32, 48, 64,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["gemma3 in pages", "llama"])
def test_after_a_warm_up_nothing_is_open_and_answers_are_the_same(name: str) -> None:
    backend = tiny_backend(name)
    assert list(warming_up(backend))
    assert (backend.sequences(), cache_bytes(backend), backend.decode()) == ([], 0, [])
    prompt = text(1, 40)
    (said,) = said_by(backend, [prompt], 6, top=1)
    (other,) = said_by(tiny_backend(name), [prompt], 6, top=1)
    assert [one.token for one in said] == [one.token for one in other]


def test_pages_move_and_change_hands_only_when_what_was_launched_has_been_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels write to pages behind MLX's back: a copy of the pool could lose what a step in
    flight writes, and a page that is given up while it is in flight has another's token later."""
    backend = tiny_backend("llama" + SUFFIX)

    def here() -> mx.Stream:
        return mx.default_stream(mx.default_device())

    with mx.stream(backend.stream):
        own = here()
    waited: list[mx.Stream] = []

    def synchronize(_: object = None) -> None:
        waited.append(here())

    grown: list[list[mx.Stream]] = []
    grow = PagePool.grow

    def noted(pool: PagePool, n_pages: int) -> None:
        before = len(waited)
        grow(pool, n_pages)
        grown.append(waited[before:])

    monkeypatch.setattr(mx, "synchronize", synchronize)
    monkeypatch.setattr(PagePool, "grow", noted)

    def start(sequence: SequenceId, number: int) -> SequenceId:
        *before, last = text(number, 40)
        backend.prefill(sequence, before)
        backend.start(sequence, last, before, SamplingParams(), 0)
        return sequence

    first = start(backend.open(300), 1)
    for _ in range(3):
        backend.decode()
    others: list[SequenceId] = []
    for _ in range(7):
        waited.clear()
        others.append(backend.open(1024))
        assert own in waited, "a sequence takes pages while a step is in flight"
        backend.decode()
    assert len(grown) >= 2, "the pool did not grow"
    assert all(own in one for one in grown), "a pool was copied while a step was in flight"
    waited.clear()
    backend.reserve(others[0], 1100)
    assert own in waited
    grown.clear()
    waited.clear()
    backend.reserve(first, 512)
    assert waited == [own] * len(grown), "a row's page is for the next step, which is ordered"
    for sequence in (first, *others):
        backend.close(sequence)
