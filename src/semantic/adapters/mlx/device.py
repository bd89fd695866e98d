"""What MLX computes on, how much memory that has, and how much of it is taken.

Knows no model: what is loaded shows only as bytes in use.
"""

from __future__ import annotations

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
"""Where Linux says how much memory a container may use (cgroup v2, v1)."""


@dataclass(frozen=True, slots=True)
class Device:
    """MLX's default device. `memory_bytes` is all that it has, `used_bytes` what MLX holds."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    used_bytes: int


def read_device() -> Device:
    """The default device as it is now."""
    info = mx.device_info(mx.default_device())
    if mx.default_device() == mx.Device(mx.cpu):
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


def physical_memory() -> int:
    """Bytes of the machine's memory that this process may use: all, or its container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for path in _CGROUP_LIMITS if (limit := _read_limit(path)))])


def _read_limit(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # no such file, or "max"
