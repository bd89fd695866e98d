"""The least time of a decode step: its bytes over the rate at which this device copies.

A step reads every weight but the embeddings, of which it reads a row per sequence, and the keys and
values of all tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple, cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from semantic.domain.value_objects import BLOCK_TOKENS, ModelCacheSpec

_BYTES = 1 << 30
_TIMES = 20


class CopyRate(NamedTuple):
    """Bytes per second, read and written both counted, and what copied: "torch" or "MLX"."""

    bytes_per_s: float
    by: str


def copy_rate(n_bytes: int = _BYTES) -> CopyRate:
    """The rate of a copy inside device memory: by torch if it is installed and sees the device."""
    found = _by_torch(n_bytes) if find_spec("torch") is not None else None
    if found is not None:
        return CopyRate(found, "torch")
    source = mx.zeros((n_bytes // 4,), mx.float32)
    mx.eval(source)
    rate = 2 * n_bytes / _seconds(lambda: mx.eval(source + 1))
    mx.clear_cache()
    return CopyRate(rate, "MLX")


def floor_ms(model: Module, spec: ModelCacheSpec, lengths: Sequence[float], rate: float) -> float:
    """Milliseconds of a step of sequences of these lengths at `rate` bytes per second."""
    n_bytes = weight_bytes(model) + sum(kv_bytes(spec, length) for length in lengths)
    return n_bytes / rate * 1e3


def weight_bytes(model: Module) -> int:
    """Bytes of the weights that a step reads: all but an embedding table that is no output too."""
    parameters = cast("Callable[[], dict[str, object]]", model.parameters)()
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(parameters))
    untied = any("lm_head" in name for name, _ in weights)
    return sum(weight.nbytes for name, weight in weights if not (untied and "embed_tokens" in name))


def kv_bytes(spec: ModelCacheSpec, length: float) -> float:
    """Bytes of the keys and values that a sequence's next token attends to."""
    return sum(
        layer.bytes_per_block / BLOCK_TOKENS * min(length, layer.window or length)
        for layer in spec.layers
    )


def _by_torch(n_bytes: int) -> float | None:
    import torch

    if not torch.cuda.is_available():
        return None
    rate = 2 * n_bytes / _seconds(_torch_copy(n_bytes))
    torch.cuda.empty_cache()
    return rate


def _torch_copy(n_bytes: int) -> Callable[[], None]:
    import torch

    source = torch.zeros(n_bytes // 4, device="cuda")
    target = torch.zeros(n_bytes // 4, device="cuda")

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return copy


def _seconds(copy: Callable[[], None]) -> float:
    """Median of some copies, after two that are not counted."""
    taken: list[float] = []
    for _ in range(2 + _TIMES):
        begin = time.perf_counter()
        copy()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[2:])
