"""What copies need of a device: host memory that it can reach, addresses, and rows of bytes moved.

`cuda.py` implements it. Knows neither pages nor blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np


@dataclass(frozen=True, slots=True)
class Rows:
    """`n` rows of `width` bytes: adjacent on the host, `pitch` bytes apart on the device.

    On the device the first is `at` bytes behind the place's beginning.
    """

    n: int
    width: int
    pitch: int
    at: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are moved."""
        return self.n * self.width


class HostAllocator(Protocol):
    """Makes host memory."""

    def allocate(self, n_bytes: int) -> int:
        """The address of new host memory that the device reads and writes directly."""
        ...

    def free(self, address: int) -> None:
        """Give memory of `allocate` back."""
        ...


class CopyDriver(HostAllocator, Protocol):
    """One device. Any thread may call everything but `address`; copies return when they are done.

    Raises MemoryError when there is no host memory, and RuntimeError when the device fails.
    """

    def address(self, array: mx.array) -> int:
        """Where the bytes of an evaluated, contiguous array begin on the device.

        Called by the thread that runs MLX. Valid as long as the array exists and is not read from
        the host: MLX would move it.
        """
        ...

    def pin(self, address: int, n_bytes: int) -> None:
        """Have the device reach other host memory directly, until `unpin`."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        ...

    def to_host(self, host: int, device: int, rows: Rows) -> None:
        """Copy rows of a place on the device to host memory, of `allocate` or any other."""
        ...

    def to_device(self, device: int, host: int, rows: Rows) -> None:
        """Copy rows from host memory, of `allocate` or any other, to a place on the device."""
        ...


def address_of(data: bytes | memoryview) -> int:
    """Where `data`, which may be read-only, lies in host memory; the caller keeps it alive.

    Raises BufferError for a view that is not contiguous.
    """
    return np.frombuffer(data, np.uint8).ctypes.data
