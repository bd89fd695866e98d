"""MLX's default device: its kind, name and memory.

Knows no model: loaded weights show only as bytes in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from semantic.adapters.mlx.system_memory import own_memory, physical_memory, spare_memory

DeviceKind = Literal["CPU", "Metal", "CUDA"]


@dataclass(frozen=True, slots=True)
class Device:
    """MLX's default device. `memory_bytes` is its memory, `used_bytes` what MLX allocated.

    `free_bytes` is what the process may have as the system says now, what it has included: free
    memory, on Metal what the system recommends.
    """

    kind: DeviceKind
    name: str
    memory_bytes: int
    used_bytes: int
    free_bytes: int
    architecture: str = ""
    """MLX's name of the generation, as "applegpu_g16s", by which it chooses kernels."""

    @property
    def chip(self) -> str:
        """Its name and generation: chips that differ in either may round differently."""
        return f"{self.name} {self.architecture}".strip()


def on_cpu() -> bool:
    """Whether MLX computes on the CPU by default."""
    return mx.default_device() == mx.Device(mx.cpu)


def on_cuda() -> bool:
    """Whether MLX computes with CUDA by default."""
    return not on_cpu() and mx.cuda.is_available()


def read_device() -> Device:
    """The current state of the default device."""
    info = mx.device_info(mx.default_device())
    if on_cpu():
        kind: DeviceKind = "CPU"
    else:
        kind = "Metal" if mx.metal.is_available() else "CUDA"
    total = int(info.get("total_memory", info.get("memory_size", 0))) or physical_memory()
    free = total
    if kind == "CUDA" and "free_memory" in info:
        free = int(info["free_memory"]) + memory_in_use()
    elif kind == "Metal":
        free = int(info.get("max_recommended_working_set_size", 0)) or total
    elif (spare := spare_memory()) is not None:
        free = spare + own_memory()
    return Device(
        kind,
        name=str(info.get("device_name", "unknown")),
        memory_bytes=total,
        used_bytes=mx.get_active_memory(),
        free_bytes=min(total, free),
        architecture=str(info.get("architecture", "")),
    )


def memory_in_use() -> int:
    """Bytes of memory that the process has, as the system counts them; with CUDA those that MLX has
    on the device.

    Pages of files, which the system may drop at any time, do not count.
    """
    if not on_cuda():
        return own_memory()
    return mx.get_active_memory() + mx.get_cache_memory()


def memory_to_spare() -> int | None:
    """Bytes that the system has left to give, below 0 if it wants some back; None if it does not
    say. With CUDA those of the device."""
    if mx.cuda.is_available() and not on_cpu():
        free = mx.device_info(mx.default_device()).get("free_memory")
        return None if free is None else int(free)
    return spare_memory()


def memory_kept() -> int:
    """Bytes of buffers of arrays that are gone, which MLX keeps for new ones."""
    return mx.get_cache_memory()


def give_memory_back() -> None:
    """Return to the system what was freed and is only kept to be used again."""
    mx.clear_cache()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


def free_memory() -> None:
    """Free arrays in cycles of objects, and the buffers that MLX keeps of arrays that are gone."""
    gc.collect()
    mx.clear_cache()
