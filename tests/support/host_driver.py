"""A `CopyDriver` whose device is this machine's memory: transfers are tested without a GPU."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from typing import cast

import mlx.core as mx

from semantic.adapters.mlx.transfers import Rows, address_of


class HostDriver:
    """Copies by hand and counts; `gate` stops copies from the device while it is not set."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False
        self.memory: dict[int, bytearray] = {}
        self.copying_threads: set[str] = set()
        self.pinned: set[int] = set()

    def address(self, array: mx.array) -> int:
        mx.eval(array)
        return address_of(memoryview(cast(bytes, array)).cast("B"))

    def allocate(self, n_bytes: int) -> int:
        self.calls["allocate"] += 1
        memory = bytearray(n_bytes)
        address = address_of(memoryview(memory))
        self.memory[address] = memory
        return address

    def free(self, address: int) -> None:
        self.calls["free"] += 1
        del self.memory[address]

    def pin(self, address: int, n_bytes: int) -> None:
        assert len(ctypes.string_at(address, n_bytes)) == n_bytes
        assert address not in self.pinned
        self.pinned.add(address)

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)

    def to_host(self, host: int, device: int, rows: Rows) -> None:
        self.gate.wait()
        self._note("to_host")
        for i in range(rows.n):
            at = device + rows.at + i * rows.pitch
            ctypes.memmove(host + i * rows.width, at, rows.width)

    def to_device(self, device: int, host: int, rows: Rows) -> None:
        self._note("to_device")
        for i in range(rows.n):
            at = device + rows.at + i * rows.pitch
            ctypes.memmove(at, host + i * rows.width, rows.width)

    def _note(self, call: str) -> None:
        self.calls[call] += 1
        self.copying_threads.add(threading.current_thread().name)
        if self.broken:
            raise RuntimeError("injected")
