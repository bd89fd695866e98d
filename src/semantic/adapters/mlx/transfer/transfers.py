"""Bodies copied from the device in the background, and bodies copied to it.

Knows addresses and rows of bytes; neither pages nor blocks.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

from semantic.adapters.mlx.device import on_cuda
from semantic.adapters.mlx.transfer.cuda import CudaDriver, copies_rightly
from semantic.adapters.mlx.transfer.driver import CopyDriver, Rows, address_of
from semantic.adapters.mlx.transfer.host_memory import HostMemory

_THREADS = 2
"""Copies from the device at a time: one allocates while the other copies."""


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
        """See `DeferredBody.wait`."""
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

    def fetch(self, place: Place, rows: Sequence[Rows]) -> ArrivingBody:
        """Begin to copy rows from the device; ends `place` when they are here."""
        n_bytes = sum(one.nbytes for one in rows)
        return ArrivingBody(n_bytes, self._threads.submit(self._fetch, place, rows, n_bytes))

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

    def _fetch(self, place: Place, rows: Sequence[Rows], n_bytes: int) -> memoryview:
        try:
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


@functools.cache
def transfers_here() -> Transfers | None:
    """The copies of MLX's default device; None where it has no copy engine that passes its test."""
    if not on_cuda():
        return None
    try:
        driver = CudaDriver()
    except (OSError, RuntimeError, AttributeError):
        return None
    return Transfers(driver) if copies_rightly(driver) else None
