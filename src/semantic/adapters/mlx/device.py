"""MLX's default device: its kind, name and memory.

Knows no model: loaded weights show only as bytes in use.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx

DeviceKind = Literal["CPU", "Metal", "CUDA"]

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with a container's memory limit on Linux (cgroup v2, v1)."""


@dataclass(frozen=True, slots=True)
class Device:
    """MLX's default device. `memory_bytes` is its memory, `used_bytes` what MLX allocated."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    used_bytes: int


def on_cpu() -> bool:
    """Whether MLX computes on the CPU by default."""
    return mx.default_device() == mx.Device(mx.cpu)


def read_device() -> Device:
    """The current state of the default device."""
    info = mx.device_info(mx.default_device())
    if on_cpu():
        kind: DeviceKind = "CPU"
    else:
        kind = "Metal" if mx.metal.is_available() else "CUDA"
    own = info.get("total_memory", info.get("memory_size", 0))
    return Device(
        kind,
        name=str(info.get("device_name", "unknown")),
        memory_bytes=int(own) or physical_memory(),
        used_bytes=mx.get_active_memory(),
    )


def free_memory() -> None:
    """Free arrays in cycles of objects, and the buffers that MLX keeps of arrays that are gone."""
    gc.collect()
    mx.clear_cache()


def physical_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for path in _CGROUP_LIMITS if (limit := _read_limit(path)))])


def _read_limit(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # no such file, or "max"
