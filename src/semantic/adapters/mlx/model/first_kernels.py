"""MLX's kernels that every model of 16 bits uses, compiled while the rest of a program is imported.

MLX compiles some kernels when they are first used, for 3 to 5 s each, and keeps them in a folder:
`MLX_PTX_CACHE_DIR`, or one in the system's temporary folder. Where that has them, this takes
milliseconds. Imports nothing of mlx-lm, whose import takes as long. Knows no model.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import cast

import mlx.core as mx

from semantic.adapters.mlx.device import on_cuda

_TYPE = mx.bfloat16


def begin() -> None:
    """Begin, on a thread of its own, if there is a CUDA device."""
    if on_cuda() and _thread().ident is None:
        _thread().start()


def wait() -> None:
    """Return when no other thread evaluates arrays because of `begin`."""
    if _thread().ident is not None:
        _thread().join()


@functools.cache
def _thread() -> threading.Thread:
    return threading.Thread(target=_compile, name="first-kernels", daemon=True)


def _compile() -> None:
    """An embedding and a gated activation, as layers of mlx-lm write them."""
    from mlx.nn.layers.activations import silu

    def gated(gate: mx.array, x: mx.array) -> mx.array:
        return cast(mx.array, silu(gate)) * x

    compiled = cast(Callable[..., mx.array], mx.compile(gated, shapeless=True))
    with contextlib.suppress(RuntimeError):  # what does not compile fails where it is needed
        embedded = mx.zeros((2, 8), _TYPE)[mx.array([[1]], mx.uint32)]
        mx.eval(embedded, compiled(embedded, embedded))
