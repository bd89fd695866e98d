"""Quantized layers of a decode step on CUDA: a row has the same bits beside any number of rows."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from semantic.adapters.mlx.cuda.rows_product import Product, Weights, can_multiply

_PRODUCT = "_semantic_rows_product"


def use_rows(layer: Module) -> None:
    """Make a quantized layer multiply with our kernel, if the kernel knows its weights."""
    kind = _KINDS.get(type(layer))
    if kind is not None and (weights := _weights_of(layer)) is not None:
        layer.__class__ = kind
        vars(layer)[_PRODUCT] = Product(weights)


class RowsLinear(QuantizedLinear):
    """A quantized linear layer that multiplies the rows of a decode step with our kernel."""

    def __call__(self, x: mx.array) -> mx.array:
        found = _multiplied(self, x)
        if found is not None:
            return found
        return cast(mx.array, super().__call__(x))  # type: ignore[no-untyped-call]


class RowsEmbedding(QuantizedEmbedding):
    """A quantized embedding that is also the output layer, and multiplies as `RowsLinear` does."""

    def as_linear(self, x: mx.array) -> mx.array:
        found = _multiplied(self, x)
        if found is not None:
            return found
        return cast(mx.array, super().as_linear(x))  # type: ignore[no-untyped-call]


def _multiplied(layer: Module, x: mx.array) -> mx.array | None:
    product = cast(Product, vars(layer)[_PRODUCT])
    if not product.accepts(x):
        return None
    return product(x) + cast(mx.array, layer["bias"]) if "bias" in layer else product(x)


def _weights_of(layer: Module) -> Weights | None:
    if layer.mode != "affine":
        return None
    weight, scales, biases = (cast(mx.array, layer[one]) for one in ("weight", "scales", "biases"))
    weights = Weights(weight, scales, biases, layer.bits, layer.group_size)
    return weights if can_multiply(weights) else None


_KINDS: dict[type[Module], type[Module]] = {
    QuantizedLinear: RowsLinear,
    QuantizedEmbedding: RowsEmbedding,
}
