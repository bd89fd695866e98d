"""Quantized layers multiply a decode step's rows with the kernel, and all else as mlx-lm does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.cache import make_prompt_cache

from semantic.adapters.mlx.cuda import nvrtc, rows_product
from semantic.adapters.mlx.model.joined import join
from semantic.adapters.mlx.model.lanes import plain_part
from semantic.adapters.mlx.model.row_layers import (
    add_to,
    adds,
    compute_only,
    divide,
    let_add,
    limits_rows,
    parts_of,
    use_rows,
    use_rows_up_to,
)
from tests.support.tiny_models import build

FEATURES, OUTPUTS = 128, 96


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of rows of the kernel's launches. MLX computes their products."""
    found: list[int] = []

    def launch(*, inputs: list[mx.array], **given: object) -> list[mx.array]:
        x, weight, *more = inputs
        n_rows, one, n_features = x.shape
        found.append(n_rows)
        assert given["output_shapes"] == [(n_rows, one, weight.shape[0])]
        assert given["scalars"] == [0, n_features, n_rows, weight.shape[0]]
        added = more.pop() if len(more) % 2 else None
        if not more:
            return [x @ weight.T if added is None else mx.addmm(added, x, weight.T)]
        scales, biases = more
        product = mx.quantized_matmul(x, weight, scales, biases, group_size=64, bits=4)
        return [product if added is None else added + product]

    monkeypatch.setattr(nvrtc, "compile_cuda", lambda _text, _target: b"")
    for module in (nvrtc, rows_product):
        monkeypatch.setattr(module, "capability", lambda: 80)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch)
    rows_product.build.cache_clear()
    yield found
    rows_product.build.cache_clear()


PLAIN = 16


def layer(*, bias: bool = False, dtype: mx.Dtype = mx.bfloat16, bits: int = 4) -> Module:
    made: Module = Linear(FEATURES, OUTPUTS, bias=bias)
    if bits != PLAIN:
        made = cast(Module, QuantizedLinear.from_linear(made, 64, bits))
    made.set_dtype(dtype)
    return made


def called(module: Module, x: mx.array) -> mx.array:
    return cast("Callable[[mx.array], mx.array]", module)(x)


def given(n_rows: int, n_tokens: int = 1, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal((n_rows, n_tokens, FEATURES), key=mx.random.key(1)).astype(dtype)


@pytest.mark.parametrize("bits", [4, PLAIN])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_rows_of_a_decode_step_are_one_launch(rows: list[int], *, bias: bool, bits: int) -> None:
    ours = layer(bias=bias, bits=bits)
    expected = called(ours, given(3))
    use_rows(ours)
    assert mx.allclose(called(ours, given(3)), expected, atol=0.02)
    assert rows == [3]


@pytest.mark.parametrize("bits", [4, PLAIN])
def test_an_embedding_is_the_output_layer_as_well(rows: list[int], bits: int) -> None:
    ours: Module = Embedding(OUTPUTS, FEATURES)
    if bits != PLAIN:
        ours = cast(Module, QuantizedEmbedding(OUTPUTS, FEATURES, 64, bits))
    ours.set_dtype(mx.bfloat16)
    expected, looked_up = ours.as_linear(given(5)), called(ours, mx.array([[1], [2]]))
    use_rows(ours)
    assert mx.array_equal(ours.as_linear(given(5)), expected)
    assert mx.array_equal(called(ours, mx.array([[1], [2]])), looked_up)
    assert rows == [5]


@pytest.mark.parametrize(
    "x", [given(1, 2), given(2, 3), given(65), given(2, dtype=mx.float32), given(1)[0]],
    ids=["tokens", "rows of tokens", "65 rows", "fp32", "no rows"],
)  # fmt: skip
def test_other_inputs_are_multiplied_by_mlx(rows: list[int], x: mx.array) -> None:
    for bits in (4, PLAIN):
        ours = layer(bits=bits)
        expected = called(ours, x)
        use_rows(ours)
        assert mx.array_equal(called(ours, x), expected)
    assert not rows


def test_many_rows_of_plain_weights_are_multiplied_by_mlx_outside_a_lane(rows: list[int]) -> None:
    for bits in (4, PLAIN):
        ours = layer(bits=bits)
        use_rows(ours)
        for most in (16, 64):
            use_rows_up_to(ours, most)
            for n_rows in (16, 17):
                called(ours, given(n_rows))
        assert limits_rows(ours) is (bits == PLAIN)
    assert rows == [16, 17, 16, 17, 16, 16, 17]


def test_a_model_launches_each_joined_product_once_a_step(rows: list[int]) -> None:
    model = build("quantized")
    model.set_dtype(mx.bfloat16)
    plain, ours = join(model), join(model, change=use_rows)
    expected, found = (
        [one(mx.array([[3]] * 4), cache=make_prompt_cache(one))] for one in (plain, ours)
    )
    assert mx.array_equal(found[0], expected[0])
    n_layers = len(model.layers)
    assert rows == [4] * (4 * n_layers + 1)


@pytest.mark.parametrize("other", ["fp32", "plain fp32", "2 bits", "an old GPU", "40 features"])
def test_other_layers_stay_as_they_are(
    rows: list[int], other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if other == "an old GPU":
        monkeypatch.setattr(rows_product, "capability", lambda: 75)
    dtype = mx.float32 if "fp32" in other else mx.bfloat16
    bits = {"2 bits": 2, "plain fp32": PLAIN}.get(other, 4)
    ours = layer(dtype=dtype, bits=bits)
    if other == "40 features":
        ours = Linear(40, OUTPUTS)
        ours.set_dtype(dtype)
    kind = type(ours)
    use_rows(ours)
    assert type(ours) is kind
    assert not rows


@pytest.mark.parametrize(
    ("n_rows", "sizes", "parts"),
    [
        (1, (2, 4), [2]),
        (3, (1, 2, 4), [4]),
        (2, (8, 16), [8]),
        (9, (1, 8, 32), [8, 1]),
        (24, (2, 4, 8, 16), [16, 8]),
        (5, (1,), [1, 1, 1, 1, 1]),
        (16, (2, 8, 24), [24]),
    ],
)
def test_divide(n_rows: int, sizes: Sequence[int], parts: Sequence[int]) -> None:
    assert divide(n_rows, sizes) == parts


def test_a_layer_computes_only_some_numbers_of_rows() -> None:
    seen: list[int] = []

    class Seen(Linear):
        def __call__(self, x: mx.array) -> mx.array:
            seen.append(len(x))
            return super().__call__(x)

    layer = Seen(8, 4)
    x = mx.random.normal((5, 1, 8))
    compute_only(layer, (2, 4))
    for _ in range(2):  # setting it again changes nothing
        assert mx.allclose(layer(x), x @ layer.weight.T + layer.bias)
        compute_only(layer, (2, 4))
    assert seen == [4, 2, 4, 2]
    assert parts_of(layer) == (2, 4)
    prompt = mx.random.normal((1, 5, 8))
    assert layer(prompt).shape == (1, 5, 4)
    assert layer(mx.random.normal((65, 1, 8))).shape == (65, 1, 4)
    compute_only(layer, ())
    layer(x)
    assert seen[4:] == [1, 65, 5]
    compute_only(layer, (2, 4), most=4)
    layer(x)
    assert seen[7:] == [5]


@pytest.mark.parametrize("bias", [False, True])
def test_adding_in_a_product(bias: bool) -> None:
    layer = Linear(8, 4, bias=bias)
    use_rows(layer)
    let_add(layer)
    assert adds(layer) is not bias
    h, x = mx.random.normal((3, 1, 4)), mx.random.normal((3, 1, 8))
    expected = h + layer(x)
    for sizes in ((), (2,), (1, 8)):
        compute_only(layer, sizes)
        assert mx.allclose(add_to(h, layer, x), expected, atol=1e-5)


@pytest.mark.parametrize("bits", [4, PLAIN])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_adding_in_our_kernel(rows: list[int], *, bits: int, bias: bool) -> None:
    ours = layer(bits=bits, bias=bias)
    use_rows(ours)
    let_add(ours)
    assert adds(ours) is not bias
    for n_rows in (1, 3, 65):
        h = mx.random.normal((n_rows, 1, OUTPUTS)).astype(mx.bfloat16)
        expected = h + called(ours, given(n_rows))
        assert mx.allclose(add_to(h, ours, given(n_rows)), expected, atol=0.05)
    assert rows == [1, 1, 3, 3]


@pytest.mark.usefixtures("rows")
def test_the_part_of_plain_weights_bounds_a_lane_of_auto() -> None:
    parts = {}
    for kind in ("llama", "quantized"):
        model = build(kind)
        model.set_dtype(mx.bfloat16)
        parts[kind] = plain_part(join(model, change=use_rows))
    assert parts["quantized"] == 0.0
    assert parts["llama"] > 0.9
