"""Rows in slots of shared arrays: each attends to its own tokens, over joins, leaves and growth."""

from __future__ import annotations

import math
import random
from typing import cast

import mlx.core as mx
import pytest

from semantic.adapters.mlx.kv_cache import attention_hook
from semantic.adapters.mlx.kv_cache.contiguous import slots
from semantic.adapters.mlx.kv_cache.contiguous.cache import (
    FullCache,
    KVBuffer,
    LentBuffer,
    RaggedKeys,
)
from semantic.adapters.mlx.kv_cache.contiguous.slots import SlottedArray, SlottedBatch
from semantic.adapters.mlx.kv_cache.merged import merge

KV_HEADS, HEADS, DIM = 2, 4, 8
Tokens = tuple[mx.array, mx.array]


def filled(n: int, *, value: float | None = None) -> tuple[FullCache, Tokens]:
    """A sequence of `n` tokens, and its keys and values."""
    cache = FullCache(KVBuffer(*(mx.zeros((1, KV_HEADS, 256, DIM)) for _ in range(2))), 0)
    k, v = (mx.random.normal((1, KV_HEADS, n, DIM)) for _ in range(2))
    if value is not None:
        k, v = mx.full(k.shape, value), mx.full(v.shape, value)
    cache.update_and_fetch(k, v)
    mx.eval(cache.state)
    return cache, (k, v)


def batch_of(*rows: FullCache) -> SlottedBatch:
    found = merge(rows)
    assert isinstance(found, SlottedBatch)
    return found


def step(batch: SlottedBatch, tokens: list[Tokens]) -> tuple[int, float]:
    """Append a token to each row, and to its `tokens`; the parts, and the difference to attention
    of each row alone."""
    n = len(batch.rows)
    q = mx.random.normal((n, HEADS, 1, DIM))
    k, v = (mx.random.normal((n, KV_HEADS, 1, DIM)) for _ in range(2))
    keys, values = batch.update_and_fetch(k, v)
    assert isinstance(keys, SlottedArray)
    assert keys.parts is not None
    n_parts = len(keys.parts.arrays)
    found = attention_hook.scaled_dot_product_attention(
        q, keys, cast(RaggedKeys, values), batch, 0.3, None
    )
    alone = []
    for i, (mine, more) in enumerate(zip(tokens, zip(k, v, strict=True), strict=True)):
        own = [
            mx.concatenate([old, new[None]], axis=2) for old, new in zip(mine, more, strict=True)
        ]
        tokens[i] = own[0], own[1]
        alone.append(mx.fast.scaled_dot_product_attention(q[i : i + 1], *own, scale=0.3))
    mx.eval(tokens)
    return n_parts, float(mx.abs(found - mx.concatenate(alone)).max())


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_attend_to_their_own_tokens_over_joins_leaves_and_growth(seed: int) -> None:
    draw = random.Random(seed)
    first, mine = filled(250)
    batch, tokens, alone = batch_of(first), [mine], 0
    for _ in range(60):
        if draw.random() < 0.4 and len(tokens) > 1:
            at = draw.randrange(len(tokens))
            cache = batch.extract(at)
            for own, held in zip(tokens.pop(at), cache.buffer.read(0, cache.offset), strict=True):
                assert mx.array_equal(own, held)
            batch.filter([i for i in range(len(batch.rows)) if i != at])
        if draw.random() < 0.5 and len(tokens) < 9:
            cache, mine = filled(draw.choice((1, 60, 200, 254, 255, 700, 3000)))
            batch.extend(batch_of(cache))
            tokens.append(mine)
        _, difference = step(batch, tokens)
        assert difference < 1e-5
        assert [row.offset for row in batch.rows] == [k.shape[2] for k, _ in tokens]
        alone += sum(not isinstance(row.buffer, LentBuffer) for row in batch.rows)
    assert alone


def test_many_rows_are_one_part() -> None:
    caches, tokens = zip(*(filled(n) for n in range(20, 180, 10)), strict=True)
    batch = batch_of(*caches)
    assert [step(batch, list(tokens))[0] for _ in range(3)] == [1, 1, 1]
    # Two more wait for slots of their own, unless others are freed.
    batch.extend(batch_of(filled(5)[0], filled(6)[0]))
    assert step(batch, [*tokens, *tokens[:2]])[0] == 3
    for _ in range(2):
        batch.extract(0)
        batch.filter(range(1, len(batch.rows)))
    assert step(batch, list(tokens))[0] == 1


def test_a_free_slot_keeps_nothing_of_the_row_that_left() -> None:
    (one, first), (bad, other), (new, third) = filled(300), filled(290, value=math.nan), filled(30)
    batch, tokens = batch_of(one, bad), [first, other]
    step(batch, tokens)
    batch.extract(1)
    batch.filter([0])
    batch.extend(batch_of(new))
    tokens[1] = third
    parts, difference = step(batch, tokens)
    assert parts == 1
    assert difference < 1e-5


def test_arrays_are_not_much_larger_than_what_their_rows_reserved() -> None:
    caches = [filled(n)[0] for n in (700, 700, 10, 20, 30, 40)]
    batch = batch_of(*caches)
    for left in range(6, 1, -1):
        step(batch, [filled(1)[1]] * left)
        reserved = sum(row.buffer.nbytes for row in batch.rows)
        held = sum(one.k.nbytes + one.v.nbytes for one in batch.shared)
        apart = sum(
            row.buffer.nbytes for row in batch.rows if not isinstance(row.buffer, LentBuffer)
        )
        assert held + apart <= slots.MOST_PADDING * reserved
        batch.extract(0)
        batch.filter(range(1, left))


def test_rows_with_many_bytes_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "LARGEST_ROW", 1)
    (one, first), (two, second) = filled(10), filled(10)
    assert step(batch_of(one, two), [first, second])[0] == 2


def test_a_model_that_computes_with_rows_gets_them_and_keeps_them_apart() -> None:
    (one, first), (two, second) = filled(10), filled(40)
    batch = batch_of(one, two)
    new = mx.random.normal((2, KV_HEADS, 1, DIM))
    keys, _ = batch.update_and_fetch(new, new)
    scores = mx.ones((2, HEADS // 2, 1, DIM)) @ keys.swapaxes(-1, -2)
    assert [one.shape[3] for one in scores.rows] == [11, 41]
    for row, mine, more in zip(keys.rows, (first, second), new, strict=True):
        assert mx.array_equal(row, mx.concatenate([mine[0], more[None]], axis=2))
    keys, _ = batch.update_and_fetch(new, new)
    assert not isinstance(keys, SlottedArray)
    assert [row.shape[2] for row in keys.rows] == [12, 42]
