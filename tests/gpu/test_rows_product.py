"""Rows of a decode step times weights: right, and the same beside any number of rows."""

from __future__ import annotations

import itertools
from typing import cast

import mlx.core as mx
import pytest

from semantic.adapters.mlx.cuda.rows_product import MOST_ROWS, Product, Weights

ON_CUDA = mx.default_device() != mx.Device(mx.cpu) and mx.cuda.is_available()
pytestmark = pytest.mark.skipif(not ON_CUDA, reason="without CUDA mlx-lm's own way is used")

ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64)
TOLERANCE = {mx.bfloat16: 4e-3, mx.float16: 6e-4}
"""Of the largest result: rounding it costs half of this."""
PLAIN = 16
SHAPES = [(512, 96), (2560, 1000), (4096, 4096), (6400, 12288)]
"""Features and outputs. A thread group's last outputs and a warp's last features may be missing."""


def weights_of(shape: tuple[int, int], bits: int, group: int, dtype: mx.Dtype) -> Weights:
    features, outputs = shape
    plain = 0.02 * mx.random.normal((outputs, features), key=mx.random.key(outputs))
    if bits == PLAIN:
        return Weights(plain.astype(dtype))
    return Weights(*mx.quantize(plain.astype(dtype), group, bits), bits, group)


def rows_of(n_features: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((MOST_ROWS, 1, n_features), key=mx.random.key(7)).astype(dtype)


def expected(x: mx.array, weights: Weights) -> mx.array:
    if weights.scales is None or weights.biases is None:
        return x.astype(mx.float32) @ weights.weight.astype(mx.float32).T
    scales, biases = weights.scales.astype(mx.float32), weights.biases.astype(mx.float32)
    plain = mx.dequantize(weights.weight, scales, biases, weights.group, weights.bits)
    return x.astype(mx.float32) @ plain.T


def error(found: mx.array, right: mx.array) -> float:
    apart = mx.abs(found.astype(mx.float32) - right).max()
    return cast(float, (apart / mx.abs(right).max()).item())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("bits", "group"), [*itertools.product([4, 8], [32, 64, 128]), (PLAIN, 0)])
def test_a_row_is_right_and_has_the_same_bits_beside_any_number_of_rows(
    bits: int, group: int, dtype: mx.Dtype
) -> None:
    for shape in SHAPES:
        weights = weights_of(shape, bits, group, dtype)
        product, x = Product(weights), rows_of(shape[0], dtype)
        whole, h = product(x), rows_of(shape[1], dtype)
        assert error(whole, expected(x, weights)) < TOLERANCE[dtype]
        sums = product(x, h)
        assert error(sums, h + expected(x, weights)) < TOLERANCE[dtype]
        for n_rows in ROWS:
            assert mx.array_equal(product(x[:n_rows]), whole[:n_rows])
            assert mx.array_equal(product(x[-n_rows:]), whole[-n_rows:])
            assert mx.array_equal(product(x[:n_rows], h[:n_rows]), sums[:n_rows])


@pytest.mark.parametrize("bits", [4, PLAIN])
def test_a_row_does_not_depend_on_what_its_companions_hold(bits: int) -> None:
    product, x = Product(weights_of((512, 96), bits, 64, mx.bfloat16)), rows_of(512, mx.bfloat16)
    among = mx.concatenate([mx.full((5, 1, 512), float("nan"), x.dtype), x[:1], x[1:3] * 1e30])
    assert mx.array_equal(product(among)[5], product(x[:1])[0])


@pytest.mark.parametrize("bits", [4, PLAIN])
def test_rows_may_begin_anywhere_in_memory(bits: int) -> None:
    product, x = Product(weights_of((512, 96), bits, 64, mx.bfloat16)), rows_of(512, mx.bfloat16)
    for shift in (1, 2, 3, 4, 8):
        moved = mx.concatenate([mx.zeros((shift,), x.dtype), x[:9].reshape(-1)])[shift:]
        mx.eval(moved)
        assert mx.array_equal(product(moved.reshape(9, 1, 512)), product(x[:9]))
