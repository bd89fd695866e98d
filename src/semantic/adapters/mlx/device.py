"""MLX's default device, and memory use as the operating system counts it.

Supports Linux and macOS.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx

_PROC = Path("/proc")
_COUNTED = re.compile(r"^(?:RssAnon|RssShmem):\s+(\d+) kB$", re.MULTILINE)
"""The lines of a process's status that count resident memory without pages of files."""
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)

# rusage_info_v2 and the offset of ri_phys_footprint in it, from macOS' <libproc.h> and
# <sys/resource.h>.
_RUSAGE, _RUSAGE_BYTES, _FOOTPRINT_AT = 2, 512, 72

# Levels of macOS' kern.memorystatus_vm_pressure_level above level 1, which is normal.
_WARNING, _CRITICAL = 2, 4
_WARNED_PART = 16


@dataclass(frozen=True, slots=True)
class _Files:
    """The files in which a cgroup version reports memory."""

    root: Path
    limit: str
    used: str
    droppable: tuple[str, str]


_V2 = _Files(
    Path("/sys/fs/cgroup"), "memory.max", "memory.current", ("inactive_file", "active_file")
)
_V1 = _Files(
    Path("/sys/fs/cgroup/memory"),
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def physical_memory() -> int:
    """Return the bytes of memory of the machine, or of the container if it may use less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for _, _, limit in _limited_groups())])


def own_memory() -> int:
    """Return the bytes of memory in use by the process and its children. May raise OSError."""
    if sys.platform == "darwin":
        return _footprint()
    return sum(map(anonymous_bytes, ("self", *_children())))


def spare_memory() -> int | None:
    """Return the bytes of memory still available to the process; None if unknown."""
    if sys.platform == "darwin":
        return spare_under_pressure(_pressure_level())
    spare = []
    with contextlib.suppress(OSError):
        found = _AVAILABLE.search((_PROC / "meminfo").read_text(encoding="ascii"))
        spare += [1024 * int(found[1])] if found else []
    spare += [limit - _held(files, folder) for files, folder, limit in _limited_groups()]
    return min(spare, default=None)


def spare_under_pressure(level: int) -> int | None:
    """Return the bytes available at a level of macOS' memory pressure; None for no limit."""
    if level >= _CRITICAL:
        return 0
    return physical_memory() // _WARNED_PART if level >= _WARNING else None


def _pressure_level() -> int:
    """Return macOS' memory pressure: 1 (normal or not reported), 2 (warning) or 4 (critical)."""
    level, size = ctypes.c_int(1), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    name = b"kern.memorystatus_vm_pressure_level"
    nothing = None, ctypes.c_size_t(0)
    ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), *nothing)
    return level.value


def _limited_groups() -> Iterator[tuple[_Files, Path, int]]:
    for files in (_V1, _V2):
        folder = files.root / _group(files).lstrip("/")
        for one in (folder, *folder.parents):
            if not one.is_relative_to(files.root):
                break
            limit = _read_number(one / files.limit)
            if limit is not None:
                yield files, one, limit


def _group(files: _Files) -> str:
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if "memory" in controllers.split(",") if files is _V1 else number == "0":
                return path
    return "/"


def _held(files: _Files, group: Path) -> int:
    droppable = 0
    with contextlib.suppress(OSError):
        for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, n_bytes = line.partition(" ")
            droppable += int(n_bytes) if name in files.droppable else 0
    return (_read_number(group / files.used) or 0) - droppable


def _children() -> list[str]:
    found: list[str] = []
    with contextlib.suppress(OSError):  # a thread has ended, or the kernel lacks the file
        for thread in (_PROC / "self" / "task").iterdir():
            found += (thread / "children").read_text(encoding="ascii").split()
    return found


def anonymous_bytes(process: str) -> int:
    """On Linux, return a process's resident bytes, except pages of files; 0 if it has ended."""
    try:
        status = (_PROC / process / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return 1024 * sum(map(int, _COUNTED.findall(status)))


def _footprint() -> int:
    usage = ctypes.create_string_buffer(_RUSAGE_BYTES)
    failed = ctypes.CDLL(None, use_errno=True).proc_pid_rusage(os.getpid(), _RUSAGE, usage)
    if failed:
        raise OSError(ctypes.get_errno(), "proc_pid_rusage failed")
    return int.from_bytes(usage.raw[_FOOTPRINT_AT : _FOOTPRINT_AT + 8], "little")


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # no such file, or "max"


DeviceKind = Literal["CPU", "Metal", "CUDA"]


@dataclass(frozen=True, slots=True)
class Device:
    """MLX's default device. `free_bytes` includes the memory that the process uses."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    used_bytes: int
    free_bytes: int
    architecture: str = ""
    """MLX's name for the GPU generation, such as "applegpu_g16s"."""

    @property
    def chip(self) -> str:
        """The chip's name and its GPU generation."""
        return f"{self.name} {self.architecture}".strip()


def on_cpu() -> bool:
    """Return whether MLX computes on the CPU by default."""
    return mx.default_device() == mx.Device(mx.cpu)


def on_cuda() -> bool:
    """Return whether MLX computes with CUDA by default."""
    return not on_cpu() and mx.cuda.is_available()


def read_device() -> Device:
    """Return the default device in its current state."""
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
    """Return the bytes of memory that the process uses. With CUDA, count only device memory."""
    if not on_cuda():
        return own_memory()
    return mx.get_active_memory() + mx.get_cache_memory()


def memory_to_spare() -> int | None:
    """Return how many more bytes the device can provide; None if unknown. May be negative."""
    if mx.cuda.is_available() and not on_cpu():
        free = mx.device_info(mx.default_device()).get("free_memory")
        return None if free is None else int(free)
    return spare_memory()


def memory_kept() -> int:
    """Return the bytes of freed buffers that MLX keeps for reuse."""
    return mx.get_cache_memory()


def give_memory_back() -> None:
    """Return to the system the freed buffers that MLX keeps."""
    mx.clear_cache()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # the C library is not glibc
            ctypes.CDLL(None).malloc_trim(0)


def free_memory() -> None:
    """Free arrays in reference cycles, and return their memory to the system."""
    gc.collect()
    give_memory_back()
