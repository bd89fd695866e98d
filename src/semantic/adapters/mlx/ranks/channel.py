"""A connection between two ranks: frames of integers, some followed by bytes.

A wait for a frame costs no computation, unlike one inside a collective operation, and the end of a
process is known at once. Knows sockets; not what the integers mean beyond the kind of a frame.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import IntEnum, auto
from typing import NamedTuple

_HEAD = struct.Struct("<qqqq")
"""Kind, number of the call, number of integers, number of bytes."""
_INT_BYTES = 8
_MOST_INTS = 1 << 24
_MOST_BYTES = 1 << 34


class Op(IntEnum):
    """The kinds of frames. Those without a comment are the calls of `BatchBackend`, from rank 0."""

    BEAT = auto()  # either way: the sender lives
    END = auto()  # from rank 0: the work is done
    LOST = auto()  # either way: the sender ends, and so must the receiver; the bytes are a reason
    MEMORY = auto()  # to rank 0, as a beat: bytes that the sender may still take
    FAILED = auto()  # to rank 0: a call raised; the bytes are its message
    BODY = auto()  # from rank 0: bytes of a body to load; to rank 0: of one that was exported
    NO_BODY = auto()  # to rank 0: one could not be exported; the bytes are a message
    FREE = auto()  # from rank 0: keys of blocks that nothing refers to any more
    OPEN = auto()
    RESTORE = auto()
    RESERVE = auto()
    SET_ASIDE = auto()
    RETURN_MEMORY = auto()
    GIVE_BACK = auto()  # no call of the port: memory that MLX keeps is not needed
    PREFILL = auto()
    PREFILL_TOGETHER = auto()
    SCORE = auto()
    START = auto()
    DECODE = auto()
    EXTRACT = auto()
    CLOSE = auto()
    PAUSE = auto()
    EXPORT = auto()
    CHECKPOINT = auto()
    LOADING = auto()
    LOADED = auto()


Data = bytes | bytearray | memoryview


class Frame(NamedTuple):
    """One frame. `number` is that of the call that it is or belongs to."""

    op: Op
    number: int
    ints: Sequence[int] = ()
    data: Data = b""

    @property
    def text(self) -> str:
        """The bytes of a message."""
        return bytes(self.data).decode()


class PeerLostError(Exception):
    """The other rank ended, is silent or sends what is no frame; the text says which."""


class Channel:
    """Frames to and from one other rank. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket, peer: int, silence: float) -> None:
        """`peer` is the other's rank. It is lost if nothing comes for `silence` seconds."""
        self.peer = peer
        self._sock = sock
        self._silence = silence
        self._sending = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(silence)

    def send(self, frame: Frame) -> None:
        """Send a frame. A peer that is lost is reported by `frames`, not here."""
        ints = array("q", frame.ints)
        if sys.byteorder == "big":
            ints.byteswap()
        head = _HEAD.pack(frame.op, frame.number, len(ints), len(frame.data))
        try:
            with self._sending:
                self._sock.sendall(head + ints.tobytes())
                if frame.data:
                    self._sock.sendall(frame.data)
        except OSError:
            self.close()

    def frames(self) -> Iterator[Frame]:
        """Each frame as it comes, without beats. Raises PeerLostError."""
        while True:
            op, number, n_ints, n_bytes = _HEAD.unpack(self._read(_HEAD.size))
            if not (0 <= n_ints <= _MOST_INTS and 0 <= n_bytes <= _MOST_BYTES):
                raise PeerLostError(f"rank {self.peer} sent what is no frame")
            ints = array("q", bytes(self._read(n_ints * _INT_BYTES)))
            if sys.byteorder == "big":
                ints.byteswap()
            data = self._read(n_bytes)
            if op != Op.BEAT:
                yield Frame(Op(op), number, ints, data)

    def close(self) -> None:
        """End the connection; `frames` ends with it."""
        with suppress(OSError):  # it had ended
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, n_bytes: int) -> bytearray:
        found = bytearray(n_bytes)
        view, at = memoryview(found), 0
        while at < n_bytes:
            try:
                n = self._sock.recv_into(view[at:])
            except TimeoutError:
                raise PeerLostError(
                    f"rank {self.peer} was silent for {self._silence:.0f} seconds"
                ) from None
            except OSError:
                n = 0  # it ended with something unread
            if not n:
                raise PeerLostError(f"rank {self.peer} ended; its own output says why")
            at += n
        return found
