"""Copies by the copy engine of a CUDA device, through the driver's C interface.

MLX cannot copy to host memory that its caller chooses.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from array import array as numbers
from typing import cast

import mlx.core as mx

from semantic.adapters.mlx.cuda.nvrtc import CudaKernel, Parameter
from semantic.adapters.mlx.device import on_cuda
from semantic.adapters.mlx.transfers import CopyDriver, Rows, Transfers, address_of

_LIBRARY = "libcuda.so.1"
_NON_BLOCKING = 1  # a stream that does not wait for the default stream
_PORTABLE = 1  # memory that is pinned for every context
_HOST, _DEVICE = 1, 2
_HUGE_PAGE = 2 << 20
_FROM_HUGE = 4 * _HUGE_PAGE
_ADDRESS = "if (threadIdx.x == 0) address[0] = (unsigned long long)data;"
_TESTED = 1 << 14
"""The number of array elements that the self-test copies."""
_HALF, _WHOLE = 4, 8
"""A row of the self-test has `_HALF` numbers. On the device, rows begin `_WHOLE` numbers apart."""
_ROWS = Rows(_TESTED // _WHOLE, 4 * _HALF, 4 * _WHOLE)


class _Copy2D(ctypes.Structure):
    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


class CudaDriver:
    """A `CopyDriver` for MLX's device. Each thread copies on a stream of its own."""

    def __init__(self) -> None:
        """Raise OSError if the driver's library is missing, RuntimeError if a driver call fails."""
        self._cuda = ctypes.CDLL(_LIBRARY)
        self._call("cuInit", ctypes.c_uint(0))
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        # Use the same context as MLX.
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._threads = threading.local()
        self._mapped: dict[int, mmap.mmap] = {}
        self._locate = CudaKernel(
            "semantic_address",
            [Parameter("data", "void")],
            [Parameter("address", "unsigned long long")],
            "",
            _ADDRESS,
        )

    def address(self, array: mx.array) -> int:
        mx.eval(array)
        (found,) = self._locate(
            inputs=[array],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.uint64],
        )
        return cast(int, found.item())

    def allocate(self, n_bytes: int) -> int:
        """See `CopyDriver.allocate`. Uses huge pages if possible."""
        self._stream()
        huge = n_bytes >= _FROM_HUGE and hasattr(mmap, "MADV_HUGEPAGE")
        try:
            memory = mmap.mmap(-1, n_bytes + _HUGE_PAGE if huge else n_bytes)
        except OSError as error:
            raise MemoryError(str(error)) from error
        address = address_of(memoryview(memory))
        if huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
            address += -address % _HUGE_PAGE
        # Touch the pages here, outside CUDA: while CUDA pins pages that do not exist yet, no other
        # thread can launch anything.
        ctypes.memset(address, 0, n_bytes)
        try:
            self.pin(address, n_bytes)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        self._mapped[address] = memory
        return address

    def free(self, address: int) -> None:
        self.unpin(address)
        del self._mapped[address]

    def pin(self, address: int, n_bytes: int) -> None:
        self._stream()
        self._call(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(n_bytes),
            ctypes.c_uint(_PORTABLE),
        )

    def unpin(self, address: int) -> None:
        self._stream()
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def to_host(self, host: int, device: int, rows: Rows) -> None:
        stream = self._stream()
        if rows.width == rows.pitch:
            self._call(
                "cuMemcpyDtoHAsync_v2",
                ctypes.c_void_p(host),
                ctypes.c_uint64(device + rows.at),
                ctypes.c_size_t(rows.nbytes),
                stream,
            )
        else:
            copy = _Copy2D(srcMemoryType=_DEVICE, srcDevice=device + rows.at, srcPitch=rows.pitch,
                           dstMemoryType=_HOST, dstHost=host, dstPitch=rows.width,
                           WidthInBytes=rows.width, Height=rows.n)  # fmt: skip
            self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), stream)
        self._call("cuStreamSynchronize", stream)

    def to_device(self, device: int, host: int, rows: Rows) -> None:
        stream = self._stream()
        if rows.width == rows.pitch:
            self._call(
                "cuMemcpyHtoDAsync_v2",
                ctypes.c_uint64(device + rows.at),
                ctypes.c_void_p(host),
                ctypes.c_size_t(rows.nbytes),
                stream,
            )
        else:
            copy = _Copy2D(srcMemoryType=_HOST, srcHost=host, srcPitch=rows.width,
                           dstMemoryType=_DEVICE, dstDevice=device + rows.at, dstPitch=rows.pitch,
                           WidthInBytes=rows.width, Height=rows.n)  # fmt: skip
            self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), stream)
        self._call("cuStreamSynchronize", stream)

    def _stream(self) -> ctypes.c_void_p:
        stream: ctypes.c_void_p | None = getattr(self._threads, "stream", None)
        if stream is None:
            self._call("cuCtxSetCurrent", self._context)
            stream = ctypes.c_void_p()
            self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
            self._threads.stream = stream
        return stream

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with error {code} of the CUDA driver")


def copies_rightly(driver: CopyDriver) -> bool:
    """Return whether `driver` copies arrays and rows correctly in both directions."""
    array = mx.arange(_TESTED, dtype=mx.int32) + 1
    try:
        device = driver.address(array)
        host = memoryview(bytearray(array.nbytes))
        return _reads(driver, device, host) and _writes(driver, device, host, array)
    except (RuntimeError, ValueError, MemoryError, AttributeError):
        return False


def _reads(driver: CopyDriver, device: int, host: memoryview) -> bool:
    expected = numbers("i", range(1, _TESTED + 1))
    driver.to_host(address_of(host), device, Rows(1, len(host), len(host)))
    if bytes(host) != expected.tobytes():
        return False
    pinned = driver.allocate(len(host) // 2)
    driver.to_host(pinned, device, _ROWS)
    halves = numbers("i", (n for n in expected if (n - 1) % _WHOLE < _HALF))
    right = ctypes.string_at(pinned, len(host) // 2) == halves.tobytes()
    driver.free(pinned)
    return right


def _writes(driver: CopyDriver, device: int, host: memoryview, array: mx.array) -> bool:
    driver.to_device(device, address_of(host[: len(host) // 2]), _ROWS)
    at = mx.arange(_TESTED, dtype=mx.int32)
    expected = mx.where(at % _WHOLE < _HALF, at // _WHOLE * _HALF + at % _WHOLE + 1, at + 1)
    return bool(mx.array_equal(array + 0, expected).item())


@functools.cache
def transfers_here() -> Transfers | None:
    """Return `Transfers` for MLX's default device; None if its copy engine fails the self-test."""
    if not on_cuda():
        return None
    try:
        driver = CudaDriver()
    except (OSError, RuntimeError, AttributeError):
        return None
    return Transfers(driver) if copies_rightly(driver) else None
