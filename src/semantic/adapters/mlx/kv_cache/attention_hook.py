"""Hook into mlx-lm's attention, and attention over a ragged batch.

The only module that touches mlx-lm's internals: its models import the function
`scaled_dot_product_attention` from `mlx_lm.models.base` by name, and `install` replaces that name
in their modules. Calls whose keys are not our handle go to mlx-lm's own function.
`tests/integration/test_mlx_lm_contract.py` fails when mlx-lm changes what this relies on.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import base

from semantic.adapters.mlx.kv_cache.contiguous.cache import Mask, RaggedKeys
from semantic.adapters.mlx.kv_cache.paged.cache import PagedKeys

HOOKED_NAME = "scaled_dot_product_attention"

# mlx-lm's annotation of `mask` lacks the strings that it accepts.
_mlx_lm_attention = cast(Callable[..., mx.array], base.scaled_dot_product_attention)


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array | RaggedKeys | PagedKeys,
    values: mx.array | RaggedKeys | PagedKeys,
    cache: object,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's attention, also for our handles; see `mx.fast.scaled_dot_product_attention`."""
    if isinstance(keys, PagedKeys):
        return keys.batch.attend(queries, keys, scale, sinks)
    if not isinstance(keys, RaggedKeys):
        return _mlx_lm_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )
    if queries.shape[2] == 1 and sinks is None and mx.default_device() == mx.Device(mx.cpu):
        return _decode_on_cpu(queries, keys, scale)
    return _row_by_row(queries, keys, scale, sinks)


def install(model: Module) -> None:
    """Make every module class of `model` use our attention. Idempotent."""
    modules = cast(Callable[[], list[Module]], model.modules)
    for name in {type(module).__module__ for module in modules()}:
        python_module = sys.modules[name]
        if getattr(python_module, HOOKED_NAME, None) is _mlx_lm_attention:
            setattr(python_module, HOOKED_NAME, scaled_dot_product_attention)


def _row_by_row(
    queries: mx.array, batch: RaggedKeys, scale: float, sinks: mx.array | None
) -> mx.array:
    """One fused attention per sequence."""
    n_queries = queries.shape[2]
    nothing = (1, queries.shape[1], n_queries, batch.v_head_dim)
    rows = []
    for i, (length, (k, v, mask)) in enumerate(zip(batch.lengths, batch.rows, strict=True)):
        if k is None or v is None:
            rows.append(mx.zeros(nothing, queries.dtype))
            continue
        row = mx.fast.scaled_dot_product_attention(
            queries[i : i + 1, :, :length], k, v, scale=scale, mask=mask, sinks=sinks
        )
        if length < n_queries:
            row = mx.pad(row, [(0, 0), (0, 0), (0, n_queries - length), (0, 0)])
        rows.append(row)
    return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=0)


def _decode_on_cpu(queries: mx.array, batch: RaggedKeys, scale: float) -> mx.array:
    """One query per sequence, with all query heads of a KV head in one matrix product.

    MLX's CPU attention computes each query head separately and reads the keys once per head;
    grouped, they are read once. Keys are the left operand: a product with few columns reads its
    left side in order, while a transposed right side would be packed first.
    """
    n_rows, n_heads, _, head_dim = queries.shape
    kv = [(row.k, row.v) for row in batch.rows if row.k is not None and row.v is not None]
    kv_heads = kv[0][0].shape[1]
    grouped = (queries * scale).reshape(n_rows, kv_heads, n_heads // kv_heads, head_dim)
    columns = mx.contiguous(grouped.swapaxes(-1, -2))  # (rows, kv_heads, head_dim, group)
    streams = _two_streams([k.shape[2] for k, _ in kv])
    rows = []
    for query, (k, v), stream in zip(
        mx.split(columns, n_rows) if n_rows > 1 else [columns], kv, streams, strict=True
    ):
        with mx.stream(stream):
            scores = (k @ query).swapaxes(-1, -2)  # (1, kv_heads, group, tokens)
            rows.append(mx.softmax(scores, axis=-1, precise=True) @ v)
    out = rows[0] if n_rows == 1 else mx.concatenate(rows, axis=0)
    return out.reshape(n_rows, n_heads, 1, out.shape[-1])


def _two_streams(lengths: Sequence[int]) -> list[mx.Stream]:
    """A stream per row, so that two threads get about the same number of tokens.

    MLX runs a CPU stream on one thread; one row's attention is too little work to divide.
    """
    here = mx.default_stream(mx.Device(mx.cpu))
    load = [0, 0]
    chosen = [here] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        other = load[1] < load[0]
        load[other] += lengths[i]
        if other:
            chosen[i] = _streams.second
    return chosen


class _Streams(threading.local):
    """Per thread: MLX lets no other thread use a stream."""

    @functools.cached_property
    def second(self) -> mx.Stream:
        return mx.new_stream(mx.Device(mx.cpu))


_streams = _Streams()
