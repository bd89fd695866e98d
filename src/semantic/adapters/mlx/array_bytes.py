"""The bytes behind MLX arrays: read and written in place, without a copy.

MLX computes nothing here but a change of type that shares the memory. Call it from the thread
that computes; what it returns may be used by any. Knows neither layers nor blocks.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from semantic.domain.errors import BackendError

Bytes = bytes | memoryview


def bytes_of(array: mx.array) -> memoryview:
    """All bytes of `array`, writable, in its memory. Raises BackendError if it is not contiguous.

    As long as the view or a part of it lives, MLX does not write to the array in place.
    """
    if not array.size:
        return memoryview(bytearray())
    raw = (array.reshape(1) if array.ndim == 0 else array).view(mx.uint8)
    mx.eval(raw)
    view = _as_buffer(raw)
    # Of an array in pieces MLX views a copy: what is written there would be lost.
    if not _in_one_piece(array) or _address(_as_buffer(array)) != _address(view):
        raise BackendError(f"an array of shape {array.shape} does not lie in one piece")
    return view.cast("B")


def ordered_bytes_of(array: mx.array) -> memoryview:
    """All bytes of `array` in order, to be read: its own, or a copy's if it lies in pieces."""
    return bytes_of(array if _in_one_piece(array) else mx.contiguous(array))


def array_from(data: Bytes, dtype: mx.Dtype, shape: Sequence[int]) -> mx.array:
    """A new array with a copy of `data`, which must be as long as its shape says."""
    if len(data) != math.prod(shape) * dtype.size:
        raise ValueError(f"{len(data)} bytes for {dtype} of shape {tuple(shape)}")
    if not data:
        return mx.zeros(tuple(shape), dtype)
    raw = mx.zeros((len(data),), mx.uint8)
    bytes_of(raw)[:] = data
    return raw.view(dtype).reshape(tuple(shape))


def _in_one_piece(array: mx.array) -> bool:
    mx.eval(array)
    return _as_buffer(array).c_contiguous


def _as_buffer(array: mx.array) -> memoryview:
    return memoryview(cast(bytes, array))  # MLX's types do not say that arrays are buffers


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
