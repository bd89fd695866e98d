"""Views and copies of MLX arrays' bytes, and small arrays for kernels.

Call these functions from the thread that runs MLX. Any thread may use the views that they return.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from semantic.domain.errors import BackendError

Bytes = bytes | memoryview

async_eval = cast(Callable[..., None], mx.async_eval)
"""Start evaluating arrays and return at once: `mx.async_eval` with a type."""


def depends(array: mx.array, other: mx.array) -> mx.array:
    """Return a copy of `array` whose evaluation also evaluates `other`."""
    return cast(list[mx.array], mx.depends([array], [other]))[0]


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads `first` to `first + n` of an array, (rows, all heads, tokens, head_dim)."""

    array: mx.array
    first: int
    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that an array of only these heads would have."""
        rows, _, *rest = self.array.shape
        return (rows, self.n, *rest)

    @property
    def dtype(self) -> mx.Dtype:
        return self.array.dtype

    def view(self) -> mx.array:
        return self.array[:, self.first : self.first + self.n]


def plain(one: mx.array | Heads) -> mx.array:
    """Return `one` as an array without copying it."""
    return one.view() if isinstance(one, Heads) else one


def bytes_of(array: mx.array) -> memoryview:
    """Return a writable view of `array`'s bytes. Raises BackendError if it is not contiguous."""
    if not array.size:
        return memoryview(bytearray())
    raw = (array.reshape(1) if array.ndim == 0 else array).view(mx.uint8)
    mx.eval(raw)
    view = _as_buffer(raw)
    # For an array that is not contiguous, MLX would return a view of a copy, and writing to the
    # copy would change nothing.
    if not _is_contiguous(array) or _address(_as_buffer(array)) != _address(view):
        raise BackendError(f"the array of shape {array.shape} must be contiguous")
    return view.cast("B")


def ordered_bytes_of(array: mx.array) -> memoryview:
    """Return the bytes of `array` in row-major order. Copies `array` if it is not contiguous."""
    return bytes_of(array if _is_contiguous(array) else mx.contiguous(array))


def array_from(data: Bytes, dtype: mx.Dtype, shape: Sequence[int]) -> mx.array:
    """Return a new array with a copy of `data`. Raises ValueError if the length is wrong."""
    if len(data) != math.prod(shape) * dtype.size:
        raise ValueError(f"{dtype} of shape {tuple(shape)} cannot have {len(data)} bytes")
    if not data:
        return mx.zeros(tuple(shape), dtype)
    raw = mx.zeros((len(data),), mx.uint8)
    bytes_of(raw)[:] = data
    return raw.view(dtype).reshape(tuple(shape))


def on_device(numbers: Sequence[int]) -> mx.array:
    """Return `numbers`, (n,), as int32 in device memory."""
    # MLX keeps an array of Python numbers in host memory; the cast to another size moves it.
    return mx.array(list(numbers), dtype=mx.int64).astype(mx.int32)


def on_device_async(numbers: Sequence[int]) -> mx.array:
    """Like `on_device`, but start the evaluation at once."""
    array = on_device(numbers)
    async_eval(array)
    return array


class Late:
    """Numbers, (n,), for arrays that depend on them before `write` gives their values."""

    __slots__ = ("_given", "array")

    def __init__(self, n: int, dtype: mx.Dtype = mx.int32) -> None:
        self._given = mx.array([0] * n, dtype=mx.int64)  # in host memory; see `on_device`
        self.array = self._given.astype(dtype)
        """The numbers in device memory, 0 by default. Evaluate it after `write`."""

    def write(self, numbers: Sequence[int]) -> None:
        """Write the first numbers."""
        data = struct.pack(f"{len(numbers)}q", *numbers)
        bytes_of(self._given)[: len(data)] = data


def token_ids(tokens: Sequence[Sequence[int]]) -> mx.array:
    """Return `tokens` as uint32, the type of sampled tokens."""
    return mx.array([list(one) for one in tokens], mx.uint32)


def _is_contiguous(array: mx.array) -> bool:
    mx.eval(array)
    return _as_buffer(array).c_contiguous


def _as_buffer(array: mx.array) -> memoryview:
    return memoryview(cast(bytes, array))  # the buffer protocol is missing in MLX's type stubs


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
