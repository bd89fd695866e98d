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

_STEP = 4 << 20
"""Pieces above this are multiples of it; smaller ones are powers of two."""


class HostMemory:
    """Pieces of host memory by size. Thread-safe."""

    def __init__(self, driver: CopyDriver, most_free_bytes: int = _MOST_FREE_BYTES) -> None:
        self._driver = driver
        self._most_free = most_free_bytes
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._free_bytes = 0
        self._lock = threading.RLock()  # garbage collection may return memory at any point

    def take(self, n_bytes: int) -> memoryview:
        """Memory of `n_bytes` with any content; it returns when no view of it is left.

        Slower memory where the system has no more of this kind. Raises MemoryError.
        """
        size = _size_for(n_bytes)
        with self._lock:
            free = self._free[size]
            address = free.pop() if free else None
            if address is not None:
                self._free_bytes -= size
        if address is None:
            try:
                address = self._driver.allocate(size)
            except MemoryError:
                return memoryview(bytearray(n_bytes))
        piece = _piece_type(size).from_address(address)
        weakref.finalize(piece, self._give_back, address, size).atexit = False
        return memoryview(piece).cast("B")[:n_bytes]

    def _give_back(self, address: int, n_bytes: int) -> None:
        with self._lock:
            if self._free_bytes + n_bytes <= self._most_free:
                self._free[n_bytes].append(address)
                self._free_bytes += n_bytes
                return
        self._driver.free(address)


def _size_for(n_bytes: int) -> int:
    """The size of piece to use: few sizes, so that pieces fit again."""
    if n_bytes > _STEP:
        return -(-n_bytes // _STEP) * _STEP
    return 1 << max(0, n_bytes - 1).bit_length()


class _Piece(ctypes.Array[ctypes.c_ubyte]):
    """Bytes at an address that the memory owns; views of it keep it alive."""

    _type_ = ctypes.c_ubyte
    _length_ = 0


@functools.cache
def _piece_type(n_bytes: int) -> type[_Piece]:
    return type(f"Piece{n_bytes}", (_Piece,), {"_length_": n_bytes})
