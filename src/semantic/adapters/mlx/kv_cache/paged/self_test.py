"""Self-test of paged attention on this device, for one kind of layers.

Compares paged attention with MLX's own operations. A device uses only kernels that have passed.
"""

from __future__ import annotations

from collections.abc import Collection

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.eight_bits import held_in, numbers_of, seen_as
from semantic.adapters.mlx.kv_cache.paged.attention import DecodeStep, PagedAttention, PrefillChunk
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import BatchMetadata
from semantic.adapters.mlx.kv_cache.paged.page_pool import (
    PagedSequence,
    PageKind,
    PagePool,
    PageTable,
)
from semantic.domain.value_objects import BLOCK_TOKENS

_LENGTHS = (1, 255, 256, 257, 900)
"""Lengths of sequences, in tokens: near a block's edge, and longer."""

_ROWS = 40
"""The number of tokens to test as rows of a batch."""

_TOLERANCE = 1e-2
"""The largest accepted error, relative to the result's norm. Half precision errs by 2e-3."""

# Errors that MLX raises if a kernel does not compile or a launch fails.
_REFUSED = (RuntimeError, ValueError)


def computes_attention(
    kind: PageKind,
    attention: PagedAttention,
    n_heads: int,
    sinks: Collection[bool] = (False, True),
    *,
    latent: bool = False,
) -> bool:
    """Return whether `attention` is right for `n_heads` query heads over pages of this kind."""
    if not n_heads or n_heads % kind.shape.kv_heads:
        return False
    try:
        return _moves_pages(kind, attention) and all(
            _is_right(kind, attention, n_heads, sinks=with_sinks, latent=latent)
            for with_sinks in sinks
        )
    except _REFUSED:
        return False
    finally:
        mx.clear_cache()  # pages are large, and these are no longer needed


def _moves_pages(kind: PageKind, attention: PagedAttention) -> bool:
    pool = PagePool(kind)
    pool.grow(4)
    data = mx.random.normal((2, *kind.page_shape), key=mx.random.key(1)).astype(kind.shape.dtype)
    mx.eval(attention.store(pool, [2, 0], data))
    mx.eval(attention.copy(pool, [2], [3]))
    one, other = mx.split(data, 2)
    expected = (other, mx.zeros_like(one), one, one)
    found = mx.split(pool.data, len(expected))
    return all(bool(mx.array_equal(*pair).item()) for pair in zip(found, expected, strict=True))


def _is_right(
    kind: PageKind, attention: PagedAttention, n_heads: int, *, sinks: bool, latent: bool
) -> bool:
    shape = numbers_of(kind.shape)
    layer = len(kind.layers) - 1
    key = mx.random.key(0)
    pool = PagePool(kind)
    pool.grow(sum(-(-length // BLOCK_TOKENS) for length in _LENGTHS))
    nan = 255 if kind.shape.packs else float("nan")  # these bytes are NaN as bfloat16
    pool.data = mx.full(pool.data.shape, nan, kind.shape.dtype)
    tables = [PageTable(pool) for _ in _LENGTHS]
    # Let sequences allocate in turns, so that none has adjacent pages.
    for length in range(1, max(_LENGTHS) + 1, BLOCK_TOKENS):
        for table, most in zip(tables, _LENGTHS, strict=True):
            table.reserve(min(length, most))
    tokens = []
    for i, (table, length) in enumerate(zip(tables, _LENGTHS, strict=True)):
        k, v = (
            mx.random.normal(
                (1, shape.kv_heads, length, width), key=mx.random.key(3 + 2 * i + which)
            ).astype(shape.dtype)
            for which, width in enumerate((shape.k_head_dim, shape.v_head_dim))
        )
        tokens.append((k, v))
        if length > 1 and not _appends(attention, table, layer, k[:, :, :-1], v[:, :, :-1]):
            return False
    q, rope = _queries(kind, len(_LENGTHS), n_heads, latent=latent)
    sink = mx.random.normal((n_heads,), key=key).astype(shape.dtype) if sinks else None
    metadata = BatchMetadata(
        tuple(PagedSequence([table]) for table in tables), tuple(length - 1 for length in _LENGTHS)
    )
    new_k, new_v = (mx.concatenate([one[which][:, :, -1:] for one in tokens]) for which in (0, 1))
    scale = shape.k_head_dim**-0.5
    step = DecodeStep(q, new_k, new_v, metadata, 0, 0, layer, scale, sink, None, rope=rope)
    found = attention.attend(step)
    right = all(
        _close(
            _row(found, i),
            _attention(
                _row(q, i) * scale,
                _seen(kind, k).squeeze(0),
                _seen(kind, v).squeeze(0),
                kind.window,
                sink,
                None if rope is None else _row(rope, i),
            ),
        )
        for i, (k, v) in enumerate(tokens)
    )
    return right and _rows_see_each_other(
        attention, tables[-1], layer, *tokens[-1], sink, n_heads, latent=latent
    )


def _queries(
    kind: PageKind, rows: int, n_heads: int, *, latent: bool
) -> tuple[mx.array, mx.array | None]:
    """Return random queries, (rows, heads, 1, k_head_dim), and rope queries if keys are latents."""
    shape = numbers_of(kind.shape)
    q, rope = (
        mx.random.normal((rows, n_heads, 1, width), key=mx.random.key(seed)).astype(shape.dtype)
        for seed, width in ((0, shape.k_head_dim), (2, shape.v_head_dim))
    )
    return q, rope * shape.v_head_dim**-0.5 if latent else None


def _rows_see_each_other(
    attention: PagedAttention,
    table: PageTable,
    layer: int,
    k: mx.array,
    v: mx.array,
    sinks: mx.array | None,
    n_heads: int,
    *,
    latent: bool,
) -> bool:
    kind, length = table.pool.kind, k.shape[2]
    n = _ROWS
    if kind.ring is not None and kind.window is not None:
        n = min(n, kind.ring * BLOCK_TOKENS - kind.window + 1)
    metadata = BatchMetadata((PagedSequence([table]),) * n, tuple(range(length - n, length)))
    new_k, new_v = (mx.contiguous(one[0, :, -n:].swapaxes(0, 1))[:, :, None] for one in (k, v))
    q, rope = _queries(kind, n, n_heads, latent=latent)
    scale = k.shape[3] ** -0.5
    right: list[bool] = []
    for together in (True, False):
        step = DecodeStep(
            q, new_k, new_v, metadata, 0, 0, layer, scale, sinks, None, rope=rope,
            together=together,
        )  # fmt: skip
        found = attention.attend(step)
        for i in {0, n // 2, n - 1}:
            keys, values = (_seen(kind, one[0, :, : length - n + 1 + i]) for one in (k, v))
            its_rope = None if rope is None else _row(rope, i)
            expected = _attention(_row(q, i) * scale, keys, values, kind.window, sinks, its_rope)
            right.append(_close(_row(found, i), expected))
    return all(right)


def _row(array: mx.array, i: int) -> mx.array:
    """Return `array[i]` by slicing, because a GPU would spend seconds compiling a gather."""
    return array[i : i + 1].squeeze(0)


def _appends(
    attention: PagedAttention, table: PageTable, layer: int, k: mx.array, v: mx.array
) -> bool:
    n, kind = k.shape[2], table.pool.kind
    half, window = n // 2, kind.window
    seen = 0 if window is None else max(0, half - window + 1)
    after = None
    if half:
        first = k[:, :, :half], v[:, :, :half]
        after = attention.append(PrefillChunk(*first, table, 0, 0, layer, None)).done
    second = PrefillChunk(k[:, :, half:], v[:, :, half:], table, half, seen, layer, after)
    added = attention.append(second)
    mx.eval(added)
    return all(
        bool(mx.array_equal(found, _seen(kind, right)[:, :, seen:]).item())
        for found, right in ((added.k, k), (added.v, v))
    )


def _seen(kind: PageKind, numbers: mx.array) -> mx.array:
    """Return keys or values as attention sees them."""
    return seen_as(numbers.dtype, held_in(kind.shape.dtype, numbers))


def _attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    window: int | None,
    sinks: mx.array | None,
    rope: mx.array | None,
) -> mx.array:
    """Return one token's attention, (heads, 1, head_dim). Keys are (kv_heads, n, head_dim)."""
    if rope is not None:
        q, k, v = mx.concatenate([q, rope], axis=-1), mx.concatenate([k, v], axis=-1), k
    first = 0 if window is None else max(0, k.shape[1] - window)
    group = q.shape[0] // k.shape[0]
    k, v = (mx.repeat(one[:, first:].astype(mx.float32), group, axis=0) for one in (k, v))
    scores = q.astype(mx.float32) @ k.swapaxes(-1, -2)
    if sinks is not None:
        scores = mx.concatenate([scores, sinks.astype(mx.float32)[:, None, None]], axis=-1)
    shares = mx.softmax(scores, axis=-1)
    return shares[..., : k.shape[1]] @ v


def _close(found: mx.array, expected: mx.array) -> bool:
    difference = mx.linalg.norm(found.astype(mx.float32) - expected)
    return bool((difference <= _TOLERANCE * mx.linalg.norm(expected)).item())
