"""Bodies copied from the device in the background, and bodies copied to it.

Fresh host memory costs several times its copy, because its pages are cleared and pinned at the
first touch; so the memory that a device reaches directly is used again and again. Threads of their
own wait for the copies; the thread that runs MLX only says what lies where. `cuda/copies.py` has
the one `CopyDriver`: on a CPU and with Metal's unified memory bodies take the way through MLX's
arrays. Knows addresses and rows of bytes; neither pages nor blocks.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
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


_MOST_FREE_BYTES = 1 << 30
"""Unused memory that is retained; what would exceed it is freed."""

_STEP = 4 << 20
"""Pieces above this are multiples of it; smaller ones are powers of two."""


class HostMemory:
    """Pieces of host memory by size. Thread-safe."""

    def __init__(self, driver: HostAllocator, most_free_bytes: int = _MOST_FREE_BYTES) -> None:
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


_THREADS = 2
"""Copies from the device at a time: one allocates while the other copies."""


Room = Callable[[int], memoryview | None]
"""Takes memory for a body of a number of bytes; None if there is none for it."""


class Place(Protocol):
    """Memory of the device that is neither freed nor written to until `end`."""

    def address(self) -> AbstractContextManager[int | None]:
        """Its address, which does not change meanwhile; None if the memory was given up."""
        ...

    def end(self) -> None:
        """Give the place up. May be called again."""
        ...


class ArrivingBody:
    """A body that is on its way from the device; implements `DeferredBody`."""

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
    """Copies of one device. Thread-safe."""

    def __init__(self, driver: CopyDriver) -> None:
        self.driver = driver
        self.memory = HostMemory(driver)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="copy")

    def prepare(self, n_bytes: int, n: int) -> None:
        """Begin to allocate `n` pieces of host memory, so that the first copies need not."""
        self._threads.submit(self._prepare, n_bytes, n)

    def fetch(self, place: Place, rows: Sequence[Rows], room: Room | None = None) -> ArrivingBody:
        """Begin to copy rows from the device, to `room` or where memory is free; ends `place` when
        they are here."""
        n_bytes = sum(one.nbytes for one in rows)
        return ArrivingBody(n_bytes, self._threads.submit(self._fetch, place, rows, n_bytes, room))

    def send(self, data: bytes | memoryview, place: Place, rows: Sequence[Rows]) -> None:
        """Copy rows to the device, or nothing if the place is lost; returns when they are there."""
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
                    raise RuntimeError("the device's memory was given up")
                host = address_of(body)
                for one in rows:
                    self.driver.to_host(host, device, one)
                    host += one.nbytes
        finally:
            place.end()
        return body
