"""Layers of a decode step that give a row the same bits beside any number of rows.

On CUDA, linear layers multiply with our kernel. Other layers compute parts or padding rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from semantic.adapters.mlx.cuda.rows_product import MOST_ROWS, Product, Weights, can_multiply

_PRODUCT = "_semantic_rows_product"
_SIZES, _MOST = "_semantic_row_sizes", "_semantic_most_rows"
_ADDS = "_semantic_adds"

_MOST_PADDING = 2
"""A part has at most this many times its rows, with padding, unless a layer has no smaller size."""


def use_rows(layer: Module) -> None:
    """Make a linear layer multiply with our kernel, if the kernel knows its weights."""
    kind = _KINDS.get(type(layer))
    if kind is not None and (weights := _weights_of(layer)) is not None:
        layer.__class__ = kind
        vars(layer)[_PRODUCT] = Product(weights)


def let_add(layer: Module) -> None:
    """Let `add_to` add in the product of `layer`, if `layer` has no bias and is a `Linear`, or
    multiplies with our kernel."""
    product = _product_of(layer)
    if "bias" in layer or not (product or isinstance(layer, Linear)):
        return
    vars(layer)[_ADDS] = True
    if product is not None:
        product.will_add()


def limits_rows(layer: Module) -> bool:
    """Return whether `use_rows_up_to` changes `layer`: whether our kernel multiplies its plain
    weights."""
    product = _product_of(layer)
    return product is not None and product.is_plain


def use_rows_up_to(layer: Module, most: int) -> None:
    """Limit the rows for which our kernel multiplies plain weights: MLX's kernels are faster with
    many rows."""
    if limits_rows(layer):
        cast(Product, _product_of(layer)).most = most


def adds(layer: Module) -> bool:
    """Return whether `add_to` adds in the product."""
    return _ADDS in vars(layer)


def add_to(h: mx.array, layer: Module, x: mx.array) -> mx.array:
    """Return `h + layer(x)`, in one product if possible. `h` and `x` are (rows, 1, features)."""
    if not adds(layer):
        return h + cast("Callable[[mx.array], mx.array]", layer)(x)
    return cast(mx.array, _in_parts(layer, partial(_added, layer), h, x))


def compute_only(layer: Module, sizes: Sequence[int], most: int = MOST_ROWS) -> None:
    """Make `layer` compute steps of at most `most` rows only in the numbers of rows in `sizes`,
    ascending; in any number if `sizes` is empty."""
    if sizes and not isinstance(layer, _Parts):
        layer.__class__ = _in_parts_of(type(layer))
    vars(layer).update({_SIZES: sizes, _MOST: most})


def parts_of(layer: Module) -> Sequence[int]:
    """Return the numbers of rows to which `compute_only` limits `layer`."""
    return cast("Sequence[int]", vars(layer).get(_SIZES, ()))


def divide(n_rows: int, sizes: Sequence[int]) -> list[int]:
    """Divide `n_rows` rows into parts with a number of rows in `sizes`. Return these numbers; the
    last part may have padding."""
    parts: list[int] = []
    while n_rows:
        above = next((size for size in sizes if size >= n_rows), 0)
        below = max((size for size in sizes if size <= n_rows), default=0)
        if above and (not below or above <= _MOST_PADDING * n_rows):
            return [*parts, above]
        parts.append(below)
        n_rows -= below
    return parts


_Found = mx.array | tuple[mx.array, ...]


class _Parts(Module):
    """A layer that computes a step in parts. Must come before the layer's class among the bases."""

    def __call__(self, x: mx.array, *more: mx.array) -> _Found:
        compute = cast("Callable[..., mx.array]", super().__call__)
        return _in_parts(self, compute, x, *more)

    def as_linear(self, x: mx.array) -> mx.array:
        product = cast("Callable[[mx.array], mx.array]", super().as_linear)  # type: ignore[misc]
        return cast(mx.array, _in_parts(self, product, x))


@cache
def _in_parts_of(kind: type[Module]) -> type[Module]:
    return type(kind.__name__, (_Parts, kind), {})


def _added(layer: Module, h: mx.array, x: mx.array) -> mx.array:
    product = _product_of(layer)
    if product is not None and product.accepts(x):
        return product(x, h)
    if isinstance(layer, Linear) and h.shape[0] > 1:
        return mx.addmm(h, x, cast(mx.array, layer["weight"]).T)
    return h + cast("Callable[[mx.array], mx.array]", layer)(x)


def _in_parts(layer: Module, compute: Callable[..., _Found], *arrays: mx.array) -> _Found:
    """Call `compute` with `arrays`, (rows, 1, ...), once for each of the layer's parts."""
    n_rows, sizes = arrays[0].shape[0], parts_of(layer)
    is_step = arrays[0].shape[1:-1] == (1,)
    if not sizes or n_rows in sizes or not is_step or n_rows > cast(int, vars(layer)[_MOST]):
        return compute(*arrays)
    edges = list(itertools.accumulate(divide(n_rows, sizes)))
    if edges[-1] > n_rows:
        missing = edges[-1] - n_rows
        arrays = tuple(mx.pad(one, [(0, missing), *[(0, 0)] * (one.ndim - 1)]) for one in arrays)
    found = [
        compute(*part) for part in zip(*(mx.split(x, edges[:-1]) for x in arrays), strict=True)
    ]
    if isinstance(found[0], tuple):
        return tuple(_together(one, n_rows) for one in zip(*found, strict=True))
    return _together(cast("list[mx.array]", found), n_rows)


def _together(parts: Sequence[mx.array], n_rows: int) -> mx.array:
    return (parts[0] if len(parts) == 1 else mx.concatenate(list(parts)))[:n_rows]


class _Rows(Module):
    """A linear layer that multiplies the rows of a decode step with our kernel. Must come before
    MLX's class among the bases."""

    def __call__(self, x: mx.array) -> mx.array:
        found = _multiplied(self, x)
        if found is not None:
            return found
        return cast("Callable[[mx.array], mx.array]", super().__call__)(x)


class _RowsOut(Module):
    """An embedding that is also the output layer, and multiplies as `_Rows` does."""

    def as_linear(self, x: mx.array) -> mx.array:
        found = _multiplied(self, x)
        if found is not None:
            return found
        return cast("Callable[[mx.array], mx.array]", super().as_linear)(x)  # type: ignore[misc]


_KINDS: dict[type[Module], type[Module]] = {
    Linear: type("RowsLinear", (_Rows, Linear), {}),
    Embedding: type("RowsEmbedding", (_RowsOut, Embedding), {}),
    QuantizedLinear: type("RowsQuantized", (_Rows, QuantizedLinear), {}),
    QuantizedEmbedding: type("RowsQuantizedEmbedding", (_RowsOut, QuantizedEmbedding), {}),
}


def _product_of(layer: Module) -> Product | None:
    return cast("Product | None", vars(layer).get(_PRODUCT))


def _multiplied(layer: Module, x: mx.array) -> mx.array | None:
    product = _product_of(layer)
    if product is None or not product.accepts(x):
        return None
    return product(x) + cast(mx.array, layer["bias"]) if "bias" in layer else product(x)


def _weights_of(layer: Module) -> Weights | None:
    weights = Weights(cast(mx.array, layer["weight"]))
    if "scales" in layer:
        if layer.mode != "affine":
            return None
        scales, biases = (cast(mx.array, layer[one]) for one in ("scales", "biases"))
        weights = Weights(weights.weight, scales, biases, layer.bits, layer.group_size)
    return weights if can_multiply(weights) else None
