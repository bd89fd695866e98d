"""Block bodies of all ranks, and how their parts move between the ranks.

On Linux, the ranks share host memory. Elsewhere they send the parts.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from semantic.adapters.mlx.cuda.copies import transfers_here
from semantic.adapters.mlx.transfers import HostMemory, Transfers, address_of
from semantic.domain.stored import Body
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.generation import BodyTarget
from semantic.ports.ranks import ChannelPort, Data, Frame, Op, Pins

LEAST_BYTES = 1 << 15
"""The minimum size of a shared part, in bytes. Ranks send smaller parts."""
_COPY_THREADS = 4
_PREPARED = 4
"""The number of pieces to map in advance."""


class Loan(NamedTuple):
    """A rank's part of a call's block body. It stays in shared memory until `rank` has read it."""

    rank: int
    number: int
    target: int


class MappedMemory:
    """A `MappedPort` that maps rank 0's shared memory into this process."""

    def __init__(self) -> None:
        self.driver: Pins | None = None
        """Pins the memory that the device must access."""
        self._pieces: dict[int, tuple[int, int]] = {}
        self._pinned: set[int] = set()
        self._rooms: dict[int, Future[Sequence[int]]] = {}

    def add(self, number: int, descriptor: int, n_bytes: int) -> None:
        """Map a piece and close its `descriptor`. If this fails, `view` raises an error later."""
        with suppress(OSError):
            self._pieces[number] = map_piece(descriptor, n_bytes), n_bytes
        os.close(descriptor)

    def drop(self, numbers: Sequence[int]) -> None:
        """Unmap the pieces `numbers`."""
        for number in numbers:
            address, n_bytes = self._pieces.pop(number, (0, 0))
            if number in self._pinned and self.driver is not None:
                self._pinned.remove(number)
                self.driver.unpin(address)
            if n_bytes:
                unmap_piece(address, n_bytes)

    def view(self, number: int, at: int, n_bytes: int) -> memoryview:
        """Return `n_bytes` of a piece, pinned for the device. Raises RuntimeError on failure."""
        if number not in self._pieces:
            raise RuntimeError("cannot map memory of rank 0")
        address, size = self._pieces[number]
        if self.driver is not None and number not in self._pinned:
            self.driver.pin(address, size)
            self._pinned.add(number)
        piece = (ctypes.c_ubyte * size).from_address(address)
        return memoryview(piece).cast("B")[at : at + n_bytes]

    def offer(self, call: int, where: Sequence[int]) -> None:
        """Record where rank 0 wants a body. If `where` is empty, this rank sends the body."""
        self._room(call).set_result(where)

    def room(self, call: int, n_bytes: int) -> memoryview | None:
        """Wait for rank 0 to offer memory for a body; return None if this rank must send the body.
        Raises RuntimeError if the sizes differ."""
        where = self._room(call).result()
        if not where:
            return None
        view = self.view(*where)
        if view.nbytes != n_bytes:
            raise RuntimeError(f"rank 0 expects {view.nbytes} bytes, got {n_bytes}")
        return view

    def leave(self, call: int) -> None:
        self._rooms.pop(call, None)

    def _room(self, call: int) -> Future[Sequence[int]]:
        return self._rooms.setdefault(call, Future())


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_piece(descriptor: int, n_bytes: int) -> int:
    """Map shared memory and return its address. Raises OSError."""
    # Not Python's mmap, which would keep the descriptor open. All pages now: allocating them while
    # pinning would stall the device.
    access = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    address: int = _LIBC.mmap(None, n_bytes, access, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "cannot map shared memory")
    return address


def unmap_piece(address: int, n_bytes: int) -> None:
    """Undo `map_piece`."""
    _LIBC.munmap(address, n_bytes)


class SharedMemory:
    """Host memory of rank 0 in numbered pieces that all other ranks map. Thread-safe."""

    def __init__(self, channels: Sequence[ChannelPort], transfers: Transfers | None) -> None:
        """`channels` lead to the other ranks; `transfers` copy to and from the device."""
        self.dropped: deque[int] = deque()
        """The numbers of the pieces that the other ranks may unmap."""
        self._channels = channels
        self._transfers = transfers
        self._driver = None if transfers is None else transfers.driver
        self._pieces: dict[int, tuple[int, int]] = {}
        self._lent: dict[Loan, memoryview] = {}
        self._next = 0
        self._memory = HostMemory(self)

    def take(self, n_bytes: int) -> memoryview:
        """Return memory of `n_bytes` with arbitrary content, shared if it is large enough."""
        if n_bytes < LEAST_BYTES:
            return memoryview(bytearray(n_bytes))
        return self._memory.take(n_bytes)

    def prepare(self, n_bytes: int) -> None:
        """Map some pieces of at least `n_bytes` in advance."""
        pieces = [self.take(n_bytes) for _ in range(_PREPARED)]
        pieces.clear()

    def for_bodies(self, n_bytes: int) -> memoryview:
        """Return memory that only rank 0 and its device use."""
        if self._transfers is None:
            return memoryview(bytearray(n_bytes))
        return self._transfers.memory.take(n_bytes)

    def where(self, data: memoryview) -> tuple[int, int, int] | None:
        """Return piece number, offset and length of `data` in bytes; None if it is not shared."""
        if not isinstance(data.obj, ctypes.Array):
            return None
        begin = ctypes.addressof(data.obj)
        piece = self._pieces.get(begin)
        return piece and (piece[0], address_of(data) - begin, data.nbytes)

    def lend(self, data: memoryview, loan: Loan) -> tuple[int, ...]:
        """Share `data`, or a copy of it, with a rank until `taken`. Returns the place of the data,
        which is empty if shared memory is short."""
        where = self.where(data)
        if where is None:
            copy = self.take(len(data))
            where = self.where(copy)
            if where is None:
                return ()
            _copy(data, copy)
            data = copy
        self._lent[loan] = data
        return where

    def taken(self, loan: Loan) -> None:
        """End a loan, because the rank has read its part of the body."""
        del self._lent[loan]

    def allocate(self, n_bytes: int) -> int:
        number, self._next = self._next, self._next + 1
        try:
            descriptor = os.memfd_create("semantic")
            try:
                os.ftruncate(descriptor, n_bytes)
                address = map_piece(descriptor, n_bytes)
                for channel in self._channels:
                    channel.send(Frame(Op.PIECE, number, (n_bytes,)), descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise MemoryError(str(error)) from error
        self._pieces[address] = number, n_bytes
        if self._driver is not None:
            try:
                self._driver.pin(address, n_bytes)
            except RuntimeError as error:
                self._drop(address)
                raise MemoryError(str(error)) from error
        return address

    def free(self, address: int) -> None:
        if self._driver is not None:
            self._driver.unpin(address)
        self._drop(address)

    def _drop(self, address: int) -> None:
        number, n_bytes = self._pieces.pop(address)
        unmap_piece(address, n_bytes)
        self.dropped.append(number)


def shared_by(channels: Sequence[ChannelPort]) -> SharedMemory | None:
    """Return memory shared by all ranks; None unless all ranks are on this machine."""
    if not hasattr(os, "memfd_create") or not all(one.is_local for one in channels):
        return None
    return SharedMemory(channels, transfers_here())


class SharedRoom:
    """Memory for the block body that one call exports. Other ranks write their parts to it."""

    def __init__(self, memory: SharedMemory, channels: Sequence[ChannelPort], number: int) -> None:
        self._memory = memory
        self._channels = channels
        self._number = number
        self._parts: dict[int, memoryview] = {}
        self.whole: memoryview | None = None
        """The body, complete once all parts have arrived; None if the ranks send their parts."""

    def take(self, n_bytes: int) -> memoryview | None:
        """Take memory for the body and return rank 0's part of it. Return None if the other ranks
        send their parts."""
        places: dict[int, tuple[int, ...]] = {}
        try:
            for channel in self._channels:
                part = self._memory.take(n_bytes)
                places[channel.peer] = self._memory.where(part) or ()
                self._parts[channel.peer] = part
            if all(places.values()):
                self.whole = self._memory.for_bodies(n_bytes * (1 + len(self._channels)))
        finally:
            for channel in self._channels:
                place = () if self.whole is None else places[channel.peer]
                channel.send(Frame(Op.ROOM, self._number, place))
        return None if self.whole is None else self.whole[:n_bytes]

    def arrived(self, rank: int, *, written: bool) -> None:
        """Copy a rank's part into the body, if the rank has `written` this part."""
        part = self._parts.pop(rank, None)
        if written and part is not None and self.whole is not None:
            _copy(part, self.whole[rank * len(part) :])


def _copy(data: memoryview, to: memoryview) -> None:
    """Copy on several threads, because one thread is slower than memory."""
    source, target, step = address_of(data), address_of(to), -(-len(data) // _COPY_THREADS)

    def copy(at: int) -> None:
        ctypes.memmove(target + at, source + at, min(step, len(data) - at))

    list(_copiers().map(copy, range(0, len(data), step)))


@functools.cache
def _copiers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="ranks")


@dataclass(slots=True)
class GatheredBody:
    """A `DeferredBody` to which each rank contributes a part."""

    own: Body
    others: Sequence[Future[Data]]
    room: SharedRoom | None = None

    def __len__(self) -> int:
        return len(self.own) * (1 + len(self.others))

    def wait(self) -> memoryview:
        own = self.own if isinstance(self.own, bytes) else self.own.wait()
        parts = [own, *(other.result() for other in self.others)]
        whole = None if self.room is None else self.room.whole
        return memoryview(b"".join(parts)) if whole is None else whole


@dataclass(frozen=True, slots=True)
class Place:
    """Identifies a target on the other ranks: the number of its `loading` call, and its index."""

    channels: Sequence[ChannelPort]
    number: int
    target: int


class SharedTarget:
    """A `BodyTarget` that writes each rank's part of the body."""

    def __init__(
        self, own: BodyTarget, place: Place, per_token: int, memory: SharedMemory | None
    ) -> None:
        """`per_token` is the number of bytes per token in one rank's part."""
        self._own = own
        self._place = place
        self._per_token = per_token
        self._memory = memory
        self._parts: list[memoryview] = []

    def put(self, body: bytes | memoryview) -> None:
        data = memoryview(body)
        size = len(data) // (1 + len(self._place.channels))
        for rank, channel in enumerate(self._place.channels, 1):
            self._send(channel, data[rank * size : (rank + 1) * size])
        self._own.put(data[:size])

    def open(self) -> list[memoryview]:
        size = BLOCK_TOKENS * self._per_token
        memory = self._memory
        for _ in self._place.channels:
            part = memoryview(bytearray(size)) if memory is None else memory.take(size)
            self._parts.append(part)
        return [*self._own.open(), *self._parts]

    def close(self, n_tokens: int = 0) -> None:
        parts, self._parts = self._parts, []
        self._own.close(n_tokens)
        if n_tokens:
            for channel, part in zip(self._place.channels, parts, strict=False):
                self._send(channel, part[: n_tokens * self._per_token])

    def _send(self, channel: ChannelPort, data: memoryview) -> None:
        place = self._place
        loan = Loan(channel.peer, place.number, place.target)
        where = () if self._memory is None else self._memory.lend(data, loan)
        ints = (place.target, *where)
        channel.send(Frame(Op.BODY, place.number, ints, b"" if where else data))
