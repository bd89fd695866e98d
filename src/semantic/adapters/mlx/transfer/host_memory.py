"""Host memory that a device reaches directly, used again and again.

Fresh host memory costs several times its copy: its pages are cleared and pinned at the first
touch. What is no longer referenced returns here. Knows no device but the driver that allocates.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections import defaultdict

from semantic.adapters.mlx.transfer.driver import CopyDriver

_MOST_FREE_BYTES = 1 << 30
"""Unused memory that is retained; what would exceed it is freed."""


class HostMemory:
    """Pieces of host memory by size. Thread-safe."""

    def __init__(self, driver: CopyDriver, most_free_bytes: int = _MOST_FREE_BYTES) -> None:
        self._driver = driver
        self._most_free = most_free_bytes
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._free_bytes = 0
        self._lock = threading.RLock()  # garbage collection may return memory at any point
        self.allocated = 0  # pieces, since the start

    def take(self, n_bytes: int) -> memoryview:
        """Memory of `n_bytes` with any content; it returns when no view of it is left.

        Raises MemoryError.
        """
        with self._lock:
            free = self._free[n_bytes]
            address = free.pop() if free else None
            if address is not None:
                self._free_bytes -= n_bytes
        if address is None:
            address = self._driver.allocate(n_bytes)
            with self._lock:
                self.allocated += 1
        piece = _piece_type(n_bytes).from_address(address)
        weakref.finalize(piece, self._give_back, address, n_bytes).atexit = False
        return memoryview(piece).cast("B")

    def _give_back(self, address: int, n_bytes: int) -> None:
        with self._lock:
            if self._free_bytes + n_bytes <= self._most_free:
                self._free[n_bytes].append(address)
                self._free_bytes += n_bytes
                return
        self._driver.free(address)


class _Piece(ctypes.Array[ctypes.c_ubyte]):
    """Bytes at an address that the memory owns; views of it keep it alive."""

    _type_ = ctypes.c_ubyte
    _length_ = 0


@functools.cache
def _piece_type(n_bytes: int) -> type[_Piece]:
    return type(f"Piece{n_bytes}", (_Piece,), {"_length_": n_bytes})
