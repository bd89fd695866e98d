"""Parts of models that depend on one sequence's length or tokens, computed row by row in a batch.

Sparse attention chooses among a sequence's own tokens, and some positions depend on its length: of
rows with different lengths neither is one computation. Everything else of a step, with nearly all
weights, stays one. Knows these parts by their names in mlx-lm, whose own functions compute each
row; `tests/integration/test_mlx_lm_contract.py` fails when they change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from semantic.adapters.mlx.kv_cache.contiguous.cache import FullCache, RaggedBatch
from semantic.adapters.mlx.kv_cache.contiguous.ragged_array import RaggedArray, rows_of

_Call = Callable[..., object]


def choose_row_by_row(model: Module) -> None:
    """Make such parts of `model` compute batches of our caches row by row. Idempotent."""
    for kind, name in _parts(model):
        call = cast(_Call, getattr(kind, name))
        if not hasattr(call, "__wrapped__"):
            wrapped = functools.wraps(call)(PARTS[kind.__module__, kind.__name__, name](call))
            setattr(kind, name, wrapped)


def is_row_by_row(model: Module) -> bool:
    """Whether a model has such parts."""
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
    """DSA's attention, whose indexer chooses from the latents that were fetched before."""

    def attend(
        self: Module,
        x: mx.array,
        mask: mx.array | None = None,
        cache: Sequence[object] | None = None,
    ) -> object:
        if cache is not None and isinstance(cache[1], RaggedBatch):
            if not isinstance(cache[0], RaggedBatch):
                raise RuntimeError("index keys are in rows and the latents they choose are not")
            cache[1].chosen_from = cache[0]
        return call(self, x, mask, cache)

    return attend


def _indexer(call: _Call) -> _Call:
    """DSA's indexer: leaves of each row's latents those that it chooses; no choice is left."""

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
            row.values = values  # none are needed: mlx-lm writes zeros of the whole capacity
        for part in latents:
            part.rows = tuple(map(_taken, part.rows, chosen))
        return None

    return choose


def _taken(tokens: mx.array | None, chosen: mx.array | None) -> mx.array:
    """The tokens, (1, 1, n, dim), with the indices `chosen`, (1, 1, 1, k); None for all."""
    if tokens is None:
        raise ValueError("a batch takes one token of each sequence at a time")
    if chosen is None:
        return tokens
    return mx.take_along_axis(tokens, chosen.swapaxes(-1, -2), axis=2)


def _block_mask(call: _Call) -> _Call:
    """MiniMax M3's choice of blocks, as a mask for each row."""

    def choose(
        self: Module, x: mx.array, mask: mx.array | None, offset: object, cache: object
    ) -> object:
        if not isinstance(cache, RaggedBatch):
            return call(self, x, mask, offset, cache)
        rows = [
            cast("mx.array | None", call(self, mine, None, row.offset, row))
            for mine, row in zip(rows_of(x), cast(_Ragged, cache).rows, strict=True)
        ]
        return RaggedArray(rows, mx.bool_)

    return choose


def _position(call: _Call) -> _Call:
    """A rotary embedding whose frequencies depend on the length."""

    def turn(self: Module, x: mx.array, offset: int | mx.array = 0) -> object:
        if not isinstance(offset, mx.array) or not offset.ndim:
            return call(self, x, offset)
        positions = cast(list[int], offset.tolist())  # ours are made of numbers: nothing waits
        rows = [call(self, row, at) for row, at in zip(rows_of(x), positions, strict=True)]
        return mx.concatenate(cast(list[mx.array], rows))

    return turn


PARTS: Final[Mapping[tuple[str, str, str], Callable[[_Call], _Call]]] = {
    ("mlx_lm.models.deepseek_v32", "DeepseekV32Attention", "__call__"): _latent_attention,
    ("mlx_lm.models.deepseek_v32", "Indexer", "__call__"): _indexer,
    ("mlx_lm.models.minimax_m3_vl", "Attention", "_block_mask"): _block_mask,
    ("mlx_lm.models.rope_utils", "DynamicNTKScalingRoPE", "__call__"): _position,
}
"""Module, class and function of each part, and what takes its place."""
