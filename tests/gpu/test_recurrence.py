"""The kernels of recurrent layers give what MLX's operations give, on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.convolution import Conv1d

from semantic.adapters.mlx.cuda import depthwise, gated_delta
from semantic.adapters.mlx.cuda.gated_delta import Recurrence, Rule, by_token, random_inputs

ON_CUDA = mx.default_device() != mx.Device(mx.cpu) and mx.cuda.is_available()
pytestmark = pytest.mark.skipif(not ON_CUDA, reason="without CUDA mlx-lm's own way is used")

compute = cast(Recurrence, gated_delta.compute)

RULES = (
    Rule(16, 32, 128, 128, mx.bfloat16, mx.bfloat16, vector=False),
    Rule(8, 8, 128, 128, mx.bfloat16, mx.float32, vector=True),
    Rule(2, 4, 32, 32, mx.float32, mx.float32, vector=False),
    Rule(2, 4, 96, 192, mx.float16, mx.float16, vector=False),
    Rule(1, 2, 256, 256, mx.float16, mx.float16, vector=True),
)
TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 5e-3}


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_gated_delta_rule_is_computed_as_written_out(rule: Rule) -> None:
    given = random_inputs(rule, rows=3, tokens=100)
    for found, expected in zip(compute(*given), by_token(*given), strict=True):
        assert gap(found, expected) < TOLERANCE[rule.dtype]
    assert gated_delta.right_kernel(rule) is not None, "MLX's operations were used"


@pytest.mark.parametrize("rule", RULES[:2], ids=str)
def test_tokens_computed_in_parts_or_alone_have_the_same_bits(rule: Rule) -> None:
    *tokens, state = random_inputs(rule, rows=3, tokens=100)
    results, states = compute(*tokens, state)
    after, parts = state, []
    for start, stop in ((0, 1), (1, 33), (33, 34), (34, 100)):
        part, after = compute(*(one[:, start:stop] for one in tokens), after)
        parts.append(part)
    assert mx.array_equal(mx.concatenate(parts, axis=1), results)
    assert mx.array_equal(after, states)
    alone = compute(*(one[1:2] for one in (*tokens, state)))
    assert mx.array_equal(alone[0], results[1:2])
    assert mx.array_equal(alone[1], states[1:2])


@pytest.mark.parametrize("rule", RULES[:2], ids=str)
def test_padding_leaves_a_state_as_it_was(rule: Rule) -> None:
    *tokens, state = random_inputs(rule, rows=3, tokens=40)
    counts = (40, 7, 0)
    mask = mx.arange(40) < mx.array(counts)[:, None]
    _, states = compute(*tokens, state, mask=mask)
    for row, count in enumerate(counts):
        only = slice(row, row + 1)
        expected = state[only]
        if count:
            _, expected = compute(*(one[only, :count] for one in tokens), expected)
        assert mx.array_equal(states[only], expected)


def test_what_has_no_kernel_is_computed_by_operations() -> None:
    given = random_inputs(Rule(1, 1, 24, 24, mx.float32, mx.float32, vector=False), 2, 5)
    for found, expected in zip(compute(*given), by_token(*given), strict=True):
        assert gap(found, expected) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(1, 4, 64), (3, 40, 96), (2, 260, 8192)], ids=str)
def test_a_short_convolution_is_mlxs(
    dtype: mx.Dtype, bias: bool, shape: tuple[int, int, int]
) -> None:
    channels = shape[2]
    theirs = Conv1d(channels, channels, 4, groups=channels, bias=bias)
    ours = Conv1d(channels, channels, 4, groups=channels, bias=bias)
    theirs.set_dtype(dtype)
    ours.update(cast("Callable[[], dict[str, object]]", theirs.parameters)())
    depthwise.replace_depthwise(ours)
    assert type(ours) is depthwise.ShortConv1d
    x = mx.random.normal(shape, key=mx.random.key(1)).astype(dtype)
    expected = cast("Callable[[mx.array], mx.array]", theirs)(x)
    assert gap(ours(x), expected) < TOLERANCE[dtype]


def gap(found: mx.array, expected: mx.array) -> float:
    """The difference, relative to the norm of `expected`."""
    right = expected.astype(mx.float32)
    apart = mx.linalg.norm(found.astype(mx.float32) - right)
    return cast(float, (apart / mx.linalg.norm(right)).item())
