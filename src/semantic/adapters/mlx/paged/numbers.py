"""Numbers for kernels, in the device's own memory."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from semantic.adapters.mlx.under_way import begin


def on_device(numbers: Sequence[int]) -> mx.array:
    """(n,) int32.

    What MLX makes from Python's numbers lies in the host's memory, where each thread group would
    wait for it; a result of another size cannot take its place there.
    """
    return mx.array(list(numbers), dtype=mx.int64).astype(mx.int32)


def sent(numbers: Sequence[int]) -> mx.array:
    """The same, under way already.

    A step that has to bring numbers to the device is another CUDA graph than one that does not,
    and MLX would build it anew, which takes as long as a step.
    """
    array = on_device(numbers)
    begin(array)
    return array
