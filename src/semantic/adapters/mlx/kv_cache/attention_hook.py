"""Replaces mlx-lm's attention with one that also accepts a ragged batch.

Calls with plain arrays still go to mlx-lm's own function.
`tests/integration/test_mlx_lm_contract.py` fails if mlx-lm changes what this module relies on.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import base

from semantic.adapters.mlx.device import on_cpu
from semantic.adapters.mlx.kv_cache.contiguous.cache import FullCache, Mask, RaggedBatch, RaggedKeys
from semantic.adapters.mlx.kv_cache.contiguous.ragged_array import ROW_BY_ROW, RaggedArray, rows_of
from semantic.adapters.mlx.kv_cache.contiguous.slots import Parts, SlottedArray
from semantic.adapters.mlx.kv_cache.paged.cache import PagedKeys, RopeScores
from semantic.domain.value_objects import BLOCK_TOKENS

_Call = Callable[..., object]


def choose_row_by_row(model: Module) -> None:
    """Make the functions of `model` that are in `PARTS` compute a batch row by row. Idempotent."""
    for kind, name in _parts(model):
        call = cast(_Call, getattr(kind, name))
        if not hasattr(call, "__wrapped__"):
            wrapped = functools.wraps(call)(PARTS[kind.__module__, kind.__name__, name](call))
            setattr(kind, name, wrapped)


def is_row_by_row(model: Module) -> bool:
    """Return whether `model` has a function in `PARTS`."""
    return bool(_parts(model))


def _parts(model: Module) -> list[tuple[type, str]]:
    modules = cast(Callable[[], list[Module]], model.modules)
    kinds = {type(module) for module in modules()}
    return [
        (kind, name)
        for kind in kinds
        for module, class_name, name in PARTS
        if (kind.__module__, kind.__name__) == (module, class_name)
    ]


_Ragged = RaggedBatch[FullCache]


def _latent_attention(call: _Call) -> _Call:
    """Wrap DeepSeek's sparse attention (DSA) so that its indexer gets the cache of latents."""

    def attend(
        self: Module,
        x: mx.array,
        mask: mx.array | None = None,
        cache: Sequence[object] | None = None,
    ) -> object:
        if cache is not None and isinstance(cache[1], RaggedBatch):
            if not isinstance(cache[0], RaggedBatch):
                raise RuntimeError("index keys and latents must have batches of the same kind")
            cache[1].chosen_from = cache[0]
        return call(self, x, mask, cache)

    return attend


def _indexer(call: _Call) -> _Call:
    """Wrap DSA's indexer to keep only the latents that the indexer chooses."""

    def choose(
        self: Module, x: mx.array, qr: mx.array, mask: mx.array | None, cache: object = None
    ) -> object:
        if not isinstance(cache, RaggedBatch) or cache.chosen_from is None:
            return call(self, x, qr, mask, cache=cache)
        latents = cast(_Ragged, cache.chosen_from).keys_and_values()
        rows = cast(_Ragged, cache).rows
        chosen = []
        for row, its_x, its_qr in zip(rows, rows_of(x), rows_of(qr), strict=True):
            row.reserve(row.offset + 1)
            values = row.values
            chosen.append(cast("mx.array | None", call(self, its_x, its_qr, None, cache=row)))
            row.values = values  # drop mlx-lm's: zeros for the whole capacity
        for part in latents:
            part.rows = tuple(map(_taken, part.rows, chosen))
        return None

    return choose


def _taken(tokens: mx.array, chosen: mx.array | None) -> mx.array:
    """Return the tokens at indices `chosen`, (1, 1, 1, k), or all tokens if `chosen` is None."""
    if chosen is None:
        return tokens
    return mx.take_along_axis(tokens, chosen.swapaxes(-1, -2), axis=2)


def _block_mask(call: _Call) -> _Call:
    """Wrap MiniMax M3's choice of blocks to return one mask per row."""

    def choose(
        self: Module, x: mx.array, mask: mx.array | None, offset: object, cache: object
    ) -> object:
        if not isinstance(cache, RaggedBatch):
            return call(self, x, mask, offset, cache)
        rows = [
            cast("mx.array | None", call(self, mine, None, row.offset, row))
            for mine, row in zip(rows_of(x), cast(_Ragged, cache).rows, strict=True)
        ]
        return RaggedArray(cast("list[mx.array]", rows), mx.bool_)  # only attention reads them

    return choose


def _position(call: _Call) -> _Call:
    """Wrap a rotary embedding that depends on the sequence's length, so that it runs row by row."""

    def turn(self: Module, x: mx.array, offset: int | mx.array = 0) -> object:
        if not isinstance(offset, mx.array) or not offset.ndim:
            return call(self, x, offset)
        positions = cast(list[int], offset.tolist())  # made here: nothing to wait for
        rows = [call(self, row, at) for row, at in zip(rows_of(x), positions, strict=True)]
        return mx.concatenate(cast(list[mx.array], rows))

    return turn


PARTS: Final[Mapping[tuple[str, str, str], Callable[[_Call], _Call]]] = {
    ("mlx_lm.models.deepseek_v32", "DeepseekV32Attention", "__call__"): _latent_attention,
    ("mlx_lm.models.deepseek_v32", "Indexer", "__call__"): _indexer,
    ("mlx_lm.models.minimax_m3_vl", "Attention", "_block_mask"): _block_mask,
    ("mlx_lm.models.rope_utils", "DynamicNTKScalingRoPE", "__call__"): _position,
}
"""Maps the module, class and name of a function to the wrapper that replaces it."""


HOOKED_NAME = "scaled_dot_product_attention"

# In mlx-lm, the annotation of `mask` lacks the strings that the function accepts.
_mlx_lm_attention = cast(Callable[..., mx.array], base.scaled_dot_product_attention)


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array | PagedKeys,
    values: mx.array | PagedKeys,
    cache: object,
    scale: float,
    mask: Mask | RopeScores,
    sinks: mx.array | None = None,
) -> mx.array:
    """Like mlx-lm's attention, but accept our batches too."""
    if _watchers.note is not None:
        _watchers.note(cache, mask)
    if isinstance(keys, PagedKeys):
        rope = mask.queries if isinstance(mask, RopeScores) else None
        return keys.batch.attend(queries, keys, scale, sinks, rope)
    if not isinstance(keys, RaggedKeys) or not isinstance(values, RaggedArray):
        return _mlx_lm_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )
    if isinstance(keys, SlottedArray) and isinstance(values, SlottedArray):
        k, v, own = keys.parts, values.parts, mask.parts if isinstance(mask, SlottedArray) else None
        if k is not None and v is not None and (own is not None) == (mask is not None):
            return _decode_in_slots(queries, k, v, scale, sinks, own)
    # A model that masks its scores itself passes the mask; other models pass none, because a batch
    # asks for none. In such a mask, a row that needs no mask has None.
    added = cast("Sequence[mx.array | None]", mask.rows) if isinstance(mask, RaggedArray) else None
    if queries.shape[2] == 1 and sinks is None and on_cpu():
        return _decode_on_cpu(queries, keys, values, scale, added)
    return _row_by_row(queries, keys, values, scale, sinks, added)


@contextlib.contextmanager
def watching(note: Callable[[object, object], None]) -> Iterator[None]:
    """In the `with` block, call `note(cache, mask)` at each call of attention on this thread."""
    before, _watchers.note = _watchers.note, note
    try:
        yield
    finally:
        _watchers.note = before


def install(model: Module) -> None:
    """Make every module class of `model` use our attention. Idempotent."""
    choose_row_by_row(model)
    modules = cast(Callable[[], list[Module]], model.modules)
    for name in {type(module).__module__ for module in modules()}:
        python_module = sys.modules[name]
        if getattr(python_module, HOOKED_NAME, None) is _mlx_lm_attention:
            setattr(python_module, HOOKED_NAME, scaled_dot_product_attention)
        # MLX's own layers do not use keys.
        if getattr(python_module, "mx", None) is mx and not name.startswith("mlx."):
            setattr(python_module, "mx", _ragged_mx)  # noqa: B010


def _fast_attention(
    queries: mx.array, keys: mx.array, values: mx.array, **named: object
) -> mx.array:
    if isinstance(keys, RaggedKeys | PagedKeys):
        return scaled_dot_product_attention(queries, keys, values, None, **named)  # type: ignore[arg-type]
    return _mlx_attention(queries, keys, values, **named)


_mlx_attention = cast(Callable[..., mx.array], mx.fast.scaled_dot_product_attention)


def _with(module: types.ModuleType, names: Mapping[str, object]) -> types.ModuleType:
    other = types.ModuleType(module.__name__, module.__doc__)
    vars(other).update({**vars(module), **names})
    return other


_ragged_mx = _with(mx, {**ROW_BY_ROW, "fast": _with(mx.fast, {HOOKED_NAME: _fast_attention})})


def _row_by_row(
    queries: mx.array,
    keys: RaggedKeys,
    values: RaggedArray,
    scale: float,
    sinks: mx.array | None,
    added: Sequence[mx.array | None] | None,
) -> mx.array:
    masks = keys.masks if added is None else added
    parts = zip(rows_of(queries), keys.rows, values.rows, masks, strict=True)
    rows = [
        mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
        for q, k, v, mask in parts
    ]
    return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=0)


def _decode_on_cpu(
    queries: mx.array,
    keys: RaggedKeys,
    values: RaggedArray,
    scale: float,
    added: Sequence[mx.array | None] | None,
) -> mx.array:
    """Compute attention for one query per sequence. One product has all query heads of a KV head.

    MLX's CPU attention reads the keys once per query head. The keys are the left operand, because
    MLX would transpose and pack a right operand.
    """
    n_rows, n_heads, _, head_dim = queries.shape
    kv = list(zip(keys.rows, values.rows, strict=True))
    kv_heads = kv[0][0].shape[1]
    group = n_heads // kv_heads
    grouped = (queries * scale).reshape(n_rows, kv_heads, group, head_dim)
    columns = mx.contiguous(grouped.swapaxes(-1, -2))  # (rows, kv_heads, head_dim, group)
    streams = _two_streams([k.shape[2] for k, _ in kv])
    rows = []
    for query, (k, v), more, stream in zip(
        rows_of(columns), kv, added or [None] * n_rows, streams, strict=True
    ):
        with mx.stream(stream):
            scores = (k @ query).swapaxes(-1, -2)  # (1, kv_heads, group, tokens)
            if more is not None:
                scores = _masked(scores, more.reshape(scores.shape))
            rows.append(mx.softmax(scores, axis=-1, precise=True) @ v)
    out = rows[0] if n_rows == 1 else mx.concatenate(rows, axis=0)
    return out.reshape(n_rows, n_heads, 1, out.shape[-1])


def _masked(scores: mx.array, mask: mx.array) -> mx.array:
    if mask.dtype != mx.bool_:
        return scores + mask
    return mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))


def _decode_in_slots(
    queries: mx.array,
    keys: Parts,
    values: Parts,
    scale: float,
    sinks: mx.array | None,
    added: Parts | None,
) -> mx.array:
    """Like `_decode_on_cpu`, but compute all rows that share an array in one operation."""
    n_rows, n_heads, _, head_dim = queries.shape
    kv_heads = keys.arrays[0].shape[1]
    if sinks is None:
        queries = queries.reshape(n_rows, kv_heads, n_heads // kv_heads, head_dim)
    more = [None] * len(keys.arrays) if added is None else added.arrays
    streams = _two_streams([k.shape[0] * k.shape[2] for k in keys.arrays])
    found = []
    for query, k, v, *masks, stream in zip(
        keys.division.split(queries),
        keys.arrays,
        values.arrays,
        keys.masks,
        more,
        streams,
        strict=True,
    ):
        with mx.stream(stream):
            given = [mask for mask in masks if mask is not None]
            mask = functools.reduce(mx.add, given) if given else None
            if sinks is not None:
                part = mx.fast.scaled_dot_product_attention(
                    query, k, v, scale=scale, mask=mask, sinks=sinks
                )
            else:
                part = mx.softmax(_scores(query, k, scale, mask), axis=-1, precise=True) @ v
            found.append(part)
    out = keys.division.join(found)
    return out.reshape(n_rows, n_heads, 1, out.shape[-1])


def _scores(query: mx.array, k: mx.array, scale: float, more: mx.array | None) -> mx.array:
    """Return the query's scores, (rows, kv_heads, group, tokens). `query` is (rows, kv_heads,
    group, dim)."""
    rows, kv_heads, group, _ = query.shape
    n_tokens = k.shape[2]
    if more is not None and more.shape[1] > 1:
        more = more.reshape(rows, kv_heads, group, n_tokens)
    if n_tokens > BLOCK_TOKENS:  # many keys are the left operand, which MLX does not pack
        columns = mx.contiguous((query * scale).swapaxes(-1, -2))
        scores = (k @ columns).swapaxes(-1, -2)
        return scores if more is None else scores + more
    if more is None:
        return (query * scale) @ k.swapaxes(-1, -2)
    return mx.addmm(more, query, k.swapaxes(-1, -2), alpha=scale)


def _two_streams(lengths: Sequence[int]) -> list[mx.Stream]:
    here = mx.default_stream(mx.Device(mx.cpu))  # one thread, so each row has one of two streams
    if len(lengths) == 1:
        return [here]
    load = [0, 0]
    chosen = [here] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        other = load[1] < load[0]
        load[other] += lengths[i]
        if other:
            chosen[i] = _streams.second
    return chosen


class _Streams(threading.local):
    """One additional stream per thread, because MLX lets only one thread use a stream."""

    @functools.cached_property
    def second(self) -> mx.Stream:
        return mx.new_stream(mx.Device(mx.cpu))


_streams = _Streams()


class _Watchers(threading.local):
    note: Callable[[object, object], None] | None = None


_watchers = _Watchers()
