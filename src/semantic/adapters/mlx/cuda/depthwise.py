"""Depthwise convolutions over a few tokens as one CUDA kernel.

cuDNN takes 0.2 to 0.7 s on an H200 to plan each new shape. This kernel needs no plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.convolution import Conv1d

from semantic.adapters.mlx.cuda.nvrtc import C_TYPES, NUMBERS, CudaKernel, Parameter

_MOST_TAPS = 8
_THREADS = 256


def replace_depthwise(model: Module) -> None:
    """Make the model's short depthwise convolutions use our kernel."""
    for module in cast("Callable[[], list[Module]]", model.modules)():
        if type(module) is Conv1d and _is_short(module):
            module.__class__ = ShortConv1d


class ShortConv1d(Conv1d):
    """A `Conv1d` over arrays (rows, tokens, channels). It sums in fp32 and rounds once."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = cast(mx.array, self["weight"])
        if x.dtype != weight.dtype or x.dtype not in C_TYPES:
            return cast(mx.array, super().__call__(x))  # type: ignore[no-untyped-call]
        found = convolved(x, weight)
        return found + cast(mx.array, self["bias"]) if "bias" in self else found


def convolved(x: mx.array, weight: mx.array) -> mx.array:
    """Convolve `x`, (rows, tokens, channels), with `weight`, (channels, taps, 1). The result is
    (rows, tokens - taps + 1, channels)."""
    rows, n_tokens, channels = x.shape
    taps = weight.shape[1]
    shape = rows, n_tokens - taps + 1, channels
    n_groups = -(-shape[0] * shape[1] * channels // _THREADS)
    return build(x.dtype, taps)(
        inputs=[x, weight],
        grid=(n_groups * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[x.dtype],
    )[0]


@functools.cache
def build(dtype: mx.Dtype, taps: int) -> CudaKernel:
    """Start compiling the kernel for numbers of type `dtype` and weights of `taps` taps."""
    number = C_TYPES[dtype]
    return CudaKernel(
        f"semantic_short_convolution_{number}_{taps}",
        [Parameter("x", number, n_strides=2, has_size=True), Parameter("weight", number)],
        [Parameter("y", number)],
        f"{NUMBERS}typedef {number} T;\n#define TAPS {taps}\n",
        BODY,
    )


def _is_short(convolution: Conv1d) -> bool:
    channels, taps, per_group = convolution.weight.shape
    plain = (convolution.stride, convolution.padding, convolution.dilation) == (1, 0, 1)
    return plain and per_group == 1 and convolution.groups == channels and taps <= _MOST_TAPS


BODY = """
  const size_t channels = x_strides[1], at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  const size_t size = x_strides[0] - (TAPS - 1) * channels;  // of a row's results
  if (at >= size * x_shape[0]) return;
  const T* from = x + at / size * x_strides[0] + at % size;
  const T* weights = weight + at % channels * TAPS;
  float sum = 0.0f;
#pragma unroll
  for (int tap = 0; tap < TAPS; ++tap) sum += (float)from[tap * channels] * (float)weights[tap];
  y[at] = T(sum);
"""
