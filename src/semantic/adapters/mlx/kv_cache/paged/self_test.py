"""Whether what computes over pages gives what attention is, on this device and for this shape.

Random tokens of several lengths, in scattered columns; the result is compared with attention
written out. Whole columns are moved as well. A kernel that was never seen on a device is used
there only after this.
"""

from __future__ import annotations

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention, Place
from semantic.adapters.mlx.kv_cache.paged.batch_metadata import Lineup
from semantic.adapters.mlx.kv_cache.paged.kinds import PageKind
from semantic.adapters.mlx.kv_cache.paged.page_pool import Pages
from semantic.adapters.mlx.kv_cache.paged.page_table import Chain, PagedSequence
from semantic.domain.value_objects import BLOCK_TOKENS

_LENGTHS = (1, 255, 256, 257, 900)
"""Tokens of each sequence with the new one: around a block's edge, and of several blocks."""

_TOLERANCE = 1e-2
"""Of the result's norm: half precision is right to 2e-3, and so is fp32 as a GPU multiplies it."""

# What MLX raises when a kernel does not compile or a launch is refused.
_REFUSED = (RuntimeError, ValueError)


def computes_attention(kind: PageKind, attention: PagedAttention, n_heads: int) -> bool:
    """Whether `attention` does all it should, for `n_heads` query heads over pages of this kind."""
    if not n_heads or n_heads % kind.shape.kv_heads:
        return False
    try:
        return _moves_columns(kind, attention) and all(
            _is_right(kind, attention, n_heads, sinks=sinks) for sinks in (False, True)
        )
    except _REFUSED:
        return False
    finally:
        mx.clear_cache()  # columns are large, and these are not needed again


def _moves_columns(kind: PageKind, attention: PagedAttention) -> bool:
    """Whether whole columns are stored and copied where they should be, and nowhere else."""
    pages = Pages(kind)
    pages.grow(4)
    data = mx.random.normal((2, *kind.column_shape), key=mx.random.key(1)).astype(kind.shape.dtype)
    mx.eval(attention.store(pages, [2, 0], data))
    mx.eval(attention.copy(pages, [2], [3]))
    expected = (data[1], mx.zeros_like(data[0]), data[0], data[0])
    return all(
        bool(mx.array_equal(*pair).item()) for pair in zip(pages.data, expected, strict=True)
    )


def _is_right(kind: PageKind, attention: PagedAttention, n_heads: int, *, sinks: bool) -> bool:
    shape = kind.shape
    layer = len(kind.layers) - 1
    key = mx.random.key(0)
    pages = Pages(kind)
    pages.grow(sum(-(-length // BLOCK_TOKENS) for length in _LENGTHS))
    pages.data = mx.full(pages.data.shape, float("nan"), shape.dtype)
    chains = [Chain(pages) for _ in _LENGTHS]
    for length in range(1, max(_LENGTHS) + 1, BLOCK_TOKENS):  # in turns: nobody's are neighbours
        for chain, most in zip(chains, _LENGTHS, strict=True):
            chain.reserve(min(length, most))
    tokens = []
    for i, (chain, length) in enumerate(zip(chains, _LENGTHS, strict=True)):
        keys = mx.random.split(mx.random.split(key, len(_LENGTHS))[i])
        k, v = (
            mx.random.normal((1, shape.kv_heads, length, shape.k_head_dim), key=one).astype(
                shape.dtype
            )
            for one in keys
        )
        tokens.append((k, v))
        if length > 1 and not _appends(attention, chain, layer, k[:, :, :-1], v[:, :, :-1]):
            return False
    q = mx.random.normal((len(_LENGTHS), n_heads, 1, shape.k_head_dim), key=key).astype(shape.dtype)
    sink = mx.random.normal((n_heads,), key=key).astype(shape.dtype) if sinks else None
    lineup = Lineup(
        tuple(PagedSequence([chain]) for chain in chains),
        tuple(length - 1 for length in _LENGTHS),
    )
    new_k, new_v = (mx.concatenate([one[which][:, :, -1:] for one in tokens]) for which in (0, 1))
    scale = shape.k_head_dim**-0.5
    found = attention.attend(q, new_k, new_v, Place(lineup, 0, 0, layer), scale, sink, None)
    return all(
        _close(found[i], _attention(q[i] * scale, k[0], v[0], kind.window, sink))
        for i, (k, v) in enumerate(tokens)
    )


def _appends(attention: PagedAttention, chain: Chain, layer: int, k: mx.array, v: mx.array) -> bool:
    """Put tokens into an empty chain in two chunks; whether the second sees those before it."""
    n, window = k.shape[2], chain.pages.kind.window
    half = n // 2
    seen = 0 if window is None else max(0, half - window + 1)
    after = None
    if half:
        first = k[:, :, :half], v[:, :, :half]
        after = attention.append(*first, chain, 0, 0, layer, None).done
    added = attention.append(k[:, :, half:], v[:, :, half:], chain, half, seen, layer, after)
    mx.eval(added)
    return all(
        bool(mx.array_equal(found, right[:, :, seen:]).item())
        for found, right in ((added.k, k), (added.v, v))
    )


def _attention(
    q: mx.array, k: mx.array, v: mx.array, window: int | None, sinks: mx.array | None
) -> mx.array:
    """Of one token, (heads, 1, head_dim), to those of its window, (kv_heads, n, head_dim)."""
    first = 0 if window is None else max(0, k.shape[1] - window)
    group = q.shape[0] // k.shape[0]
    k, v = (mx.repeat(one[:, first:].astype(mx.float32), group, axis=0) for one in (k, v))
    scores = q.astype(mx.float32) @ k.swapaxes(-1, -2)
    if sinks is not None:
        scores = mx.concatenate([scores, sinks.astype(mx.float32)[:, None, None]], axis=-1)
    shares = mx.softmax(scores, axis=-1)
    return shares[..., : k.shape[1]] @ v


def _close(found: mx.array, expected: mx.array) -> bool:
    """NaN is close to nothing."""
    difference = mx.linalg.norm(found.astype(mx.float32) - expected)
    return bool((difference <= _TOLERANCE * mx.linalg.norm(expected)).item())
