"""MLX's default device: its kind, name and memory.

Knows no model: loaded weights show only as bytes in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
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


_STATUS = Path("/proc/self/status")
_COUNTED = re.compile(r"^(RssAnon|RssShmem):\s+(\d+) kB$", re.MULTILINE)
"""Lines of `_STATUS` with resident memory that is no file's."""

# Of macOS' <libproc.h> and <sys/resource.h>: rusage_info_v2, and where ri_phys_footprint is in it.
_RUSAGE, _RUSAGE_BYTES, _FOOTPRINT_AT = 2, 512, 72


@dataclass(frozen=True, slots=True)
class Device:
    """MLX's default device. `memory_bytes` is its memory, `used_bytes` what MLX allocated."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    used_bytes: int
    architecture: str = ""
    """MLX's name of the generation, as "applegpu_g16s", by which it chooses kernels."""

    @property
    def chip(self) -> str:
        """Its name and generation: chips that differ in either may round differently."""
        return f"{self.name} {self.architecture}".strip()


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
        architecture=str(info.get("architecture", "")),
    )


def memory_in_use() -> int:
    """Bytes of memory that the process has, as the system counts them; with CUDA those that MLX has
    on the device besides.

    Pages of files, which the system may drop at any time, do not count.
    """
    own = _footprint() if sys.platform == "darwin" else _anonymous_bytes()
    if not mx.cuda.is_available() or on_cpu():
        return own
    return own + mx.get_active_memory() + mx.get_cache_memory()


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


def physical_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for path in _CGROUP_LIMITS if (limit := _read_limit(path)))])


def _anonymous_bytes() -> int:
    """Resident memory of this process on Linux that is no file's."""
    found = dict(_COUNTED.findall(_STATUS.read_text(encoding="ascii")))
    return 1024 * sum(map(int, found.values()))


def _footprint() -> int:
    """The physical footprint of this process on macOS, by which the system judges its memory.

    Raises OSError when the system does not say it.
    """
    usage = ctypes.create_string_buffer(_RUSAGE_BYTES)
    failed = ctypes.CDLL(None, use_errno=True).proc_pid_rusage(os.getpid(), _RUSAGE, usage)
    if failed:
        raise OSError(ctypes.get_errno(), "proc_pid_rusage failed")
    return int.from_bytes(usage.raw[_FOOTPRINT_AT : _FOOTPRINT_AT + 8], "little")


def _read_limit(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # no such file, or "max"
