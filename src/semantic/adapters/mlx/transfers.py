"""Copies of block bodies between device and host, in the background.

The copies reuse pinned host memory. Using new memory costs several times as much as a copy.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np


@dataclass(frozen=True, slots=True)
class Rows:
    """`n` rows of `width` bytes: adjacent on the host, and `pitch` bytes apart on the device. The
    first row is `at` bytes into a `Place`."""

    n: int
    width: int
    pitch: int
    at: int = 0

    @property
    def nbytes(self) -> int:
        return self.n * self.width


class HostAllocator(Protocol):
    """An allocator of host memory."""

    def allocate(self, n_bytes: int) -> int:
        """Return the address of new host memory that the device can read and write directly."""

    def free(self, address: int) -> None:
        """Free memory returned by `allocate`."""


class CopyDriver(HostAllocator, Protocol):
    """Copies to and from a device. Thread-safe, except `address`.

    A call returns after its copy. It raises MemoryError if host memory is short, and RuntimeError
    if the device fails.
    """

    def address(self, array: mx.array) -> int:
        """Return the device address of an evaluated, contiguous array. The address is valid until
        the host reads the array. Only MLX's thread may call this."""

    def pin(self, address: int, n_bytes: int) -> None:
        """Let the device access host memory until `unpin`."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def to_host(self, host: int, device: int, rows: Rows) -> None:
        """Copy rows from a device address to a host address."""

    def to_device(self, device: int, host: int, rows: Rows) -> None:
        """Copy rows from a host address to a device address."""


def address_of(data: bytes | memoryview) -> int:
    """Return the host address of `data`, which the caller keeps alive. Raises BufferError if the
    view is not contiguous."""
    return np.frombuffer(data, np.uint8).ctypes.data


_MOST_FREE_BYTES = 1 << 30
"""The maximum number of bytes of unused memory to keep."""

_STEP = 4 << 20
"""The size of a larger piece is a multiple of this many bytes."""


class HostMemory:
    """Reusable pieces of host memory. Thread-safe."""

    def __init__(self, driver: HostAllocator, most_free_bytes: int = _MOST_FREE_BYTES) -> None:
        self._driver = driver
        self._most_free = most_free_bytes
        self._free: dict[int, list[int]] = {}  # by size; the last taken size is the last
        self._free_bytes = 0
        self._lock = threading.RLock()  # garbage collection may return memory at any point

    def take(self, n_bytes: int) -> memoryview:
        """Return memory of `n_bytes` with arbitrary content, reused once its last view is gone.
        Raises MemoryError."""
        size = _size_for(n_bytes)
        with self._lock:
            free = self._free[size] = self._free.pop(size, [])
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
            unneeded = self._make_room(n_bytes)
            if self._free_bytes + n_bytes <= self._most_free:
                self._free[n_bytes].append(address)
                self._free_bytes += n_bytes
            else:
                unneeded.append(address)
        for one in unneeded:
            self._driver.free(one)

    def _make_room(self, n_bytes: int) -> list[int]:
        """Remove pieces of other sizes, which another model left, until `n_bytes` fit."""
        removed = []
        for size in [one for one in self._free if one != n_bytes]:
            while self._free[size] and self._free_bytes + n_bytes > self._most_free:
                removed.append(self._free[size].pop())
                self._free_bytes -= size
        return removed


def _size_for(n_bytes: int) -> int:
    """Return the size of a piece for `n_bytes`. There are few sizes, so pieces can be reused."""
    if n_bytes > _STEP:
        return -(-n_bytes // _STEP) * _STEP
    return 1 << max(0, n_bytes - 1).bit_length()


class _Piece(ctypes.Array[ctypes.c_ubyte]):
    """Bytes at an address that `HostMemory` owns. Views keep the piece alive."""

    _type_ = ctypes.c_ubyte
    _length_ = 0


@functools.cache
def _piece_type(n_bytes: int) -> type[_Piece]:
    return type(f"Piece{n_bytes}", (_Piece,), {"_length_": n_bytes})


_THREADS = 2
"""The number of threads that copy from the device."""


Room = Callable[[int], memoryview | None]
"""Takes a body's size in bytes. Returns memory for the body, or None."""


class Place(Protocol):
    """Device memory that stays allocated and unchanged until `end`."""

    def address(self) -> AbstractContextManager[int | None]:
        """Return the address, valid until the `with` block ends; None if the memory is gone."""

    def end(self) -> None:
        """Release the place. Idempotent."""


class ArrivingBody:
    """A `DeferredBody` that a copy from the device fills."""

    def __init__(self, n_bytes: int, copied: Future[memoryview]) -> None:
        self._n_bytes = n_bytes
        self._copied = copied

    def __len__(self) -> int:
        return self._n_bytes

    def wait(self) -> memoryview:
        try:
            return self._copied.result()
        except (RuntimeError, MemoryError) as error:
            raise OSError(errno.EIO, f"a body did not arrive: {error}") from error


class Transfers:
    """Background copies to and from one device. Thread-safe."""

    def __init__(self, driver: CopyDriver) -> None:
        self.driver = driver
        self.memory = HostMemory(driver)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="copy")

    def prepare(self, n_bytes: int, n: int) -> None:
        """Start allocating `n` pieces of host memory, so that the first copies need not wait."""
        self._threads.submit(self._prepare, n_bytes, n)

    def fetch(self, place: Place, rows: Sequence[Rows], room: Room | None = None) -> ArrivingBody:
        """Start copying rows from the device into memory from `room`, or else into new memory. Ends
        `place` after the copy."""
        n_bytes = sum(one.nbytes for one in rows)
        return ArrivingBody(n_bytes, self._threads.submit(self._fetch, place, rows, n_bytes, room))

    def send(self, data: bytes | memoryview, place: Place, rows: Sequence[Rows]) -> None:
        """Copy rows to the device and wait. Copies nothing if `place` has lost its memory."""
        with place.address() as device:
            if device is not None:
                host = address_of(data)
                for one in rows:
                    self.driver.to_device(device, host, one)
                    host += one.nbytes

    def _prepare(self, n_bytes: int, n: int) -> None:
        held = [self.memory.take(n_bytes) for _ in range(n)]
        held.clear()

    def _fetch(
        self, place: Place, rows: Sequence[Rows], n_bytes: int, room: Room | None
    ) -> memoryview:
        try:
            body = room(n_bytes) if room is not None else None
            if body is None:
                body = self.memory.take(n_bytes)
            with place.address() as device:
                if device is None:
                    raise RuntimeError("the device memory of this body is free already")
                host = address_of(body)
                for one in rows:
                    self.driver.to_host(host, device, one)
                    host += one.nbytes
        finally:
            place.end()
        return body
