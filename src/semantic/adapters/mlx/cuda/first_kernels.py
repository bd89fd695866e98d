"""As a program starts, other processes compile the kernels that most 16-bit models need.

MLX would compile each kernel at its first use, which takes 3 to 5 s.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import cast

import mlx.core as mx
from mlx.nn.layers.activations import silu, softplus

_FOLDER = "MLX_PTX_CACHE_DIR"
_TYPE, _EXACT = mx.bfloat16, mx.float32
_running: list[Popen[bytes]] = []


def begin() -> None:
    """Start compiling each kernel that is missing in the folder MLX_PTX_CACHE_DIR."""
    from semantic.adapters.mlx.device import on_cuda  # the processes do not need it

    folder = os.environ.get(_FOLDER)
    if folder is None or not on_cuda():
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for number in range(len(KERNELS)):
        if not _mark(folder, number).exists():
            command = [sys.executable, "-P", __file__, str(number)]
            _running.append(Popen(command, stdin=DEVNULL, stderr=DEVNULL, env=environment))  # noqa: S603  a file of ours


def wait() -> None:
    """Wait until all processes that `begin` started have ended."""
    while _running:
        _running.pop().wait()


def _mark(folder: str, number: int) -> Path:
    return Path(folder, f"first-{version('mlx')}-{number}")


def _row(kind: mx.Dtype = _TYPE) -> mx.array:
    return mx.zeros((2, 8), kind)


def _looked_up(kind: mx.Dtype, index: mx.Dtype) -> mx.array:
    return _row(kind)[mx.array([[1]], index)]


def _taken(index: mx.Dtype) -> mx.array:
    return mx.take_along_axis(_row(), mx.zeros((2, 1), index), axis=-1)


def _fused(function: Callable[..., mx.array], *inputs: mx.array) -> mx.array:
    return cast(Callable[..., mx.array], mx.compile(function, shapeless=True))(*inputs)


def _gated(gate: mx.array, x: mx.array) -> mx.array:
    return cast(mx.array, silu(gate)) * x


def _gated_exactly(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    return _gated(gate.astype(_EXACT), x.astype(_EXACT)).astype(h.dtype)


def _decay(rate: mx.array, x: mx.array, bias: mx.array) -> mx.array:
    return mx.exp(-mx.exp(rate.astype(_EXACT)) * cast(mx.array, softplus(x + bias)))


KERNELS: Sequence[Callable[[], mx.array]] = (
    lambda: _looked_up(_TYPE, mx.uint32),
    lambda: _looked_up(_TYPE, mx.int32),
    lambda: _looked_up(_EXACT, mx.int32),
    lambda: _looked_up(mx.uint32, mx.uint32),
    lambda: _taken(mx.uint32),
    lambda: _taken(mx.int32),
    lambda: _fused(_gated, _row(), _row()),
    lambda: cast(mx.array, silu(_row())),
    lambda: _fused(_gated_exactly, _row(), _row(), _row()),
    lambda: _fused(_decay, _row(), _row(), _row()),
)
"""Functions that each make MLX compile one kernel. Each runs in a separate process."""

if __name__ == "__main__":
    chosen = int(sys.argv[1])
    mx.eval(KERNELS[chosen]())
    _mark(os.environ[_FOLDER], chosen).touch()
