"""A connection between two ranks: frames of integers, some followed by bytes.

A wait for a frame costs no computation, unlike one inside a collective operation, and the end of a
process is known at once. The two prove to each other that they know a secret without sending it:
each answers the other's random number, and from both come the keys of each direction. Every frame
is sealed: one that is changed, left out, repeated or of another sender is found. Nothing is
encrypted. Knows sockets; not what the integers mean beyond the kind of a frame.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import IntEnum, auto
from typing import NamedTuple

_RANDOM, _RANK, _PROOF = 32, 4, 32
"""Bytes of a random number, of a rank's number and of a proof."""


class Keys(NamedTuple):
    """What is sealed with, and what the peer seals with."""

    own: bytes
    peer: bytes


def join(sock: socket.socket, secret: bytes, rank: int) -> Keys | None:
    """The keys of `rank`'s connection to rank 0; None unless each knows the `secret`."""
    theirs = _read(sock, _RANDOM)
    said = secrets.token_bytes(_RANDOM) + rank.to_bytes(_RANK, "little")
    talk = theirs + said
    with suppress(OSError):  # refused: it shows in what is read
        sock.sendall(said + _derived(secret, b"proof of another", talk))
    if not hmac.compare_digest(_read(sock, _PROOF), _derived(secret, b"proof of rank 0", talk)):
        return None
    return Keys(_derived(secret, b"from another", talk), _derived(secret, b"from rank 0", talk))


def admit(sock: socket.socket, secret: bytes) -> tuple[int, Keys] | None:
    """The rank behind a new connection to rank 0, and its keys; None for one that does not know
    the `secret`, which learns nothing of it."""
    challenge = secrets.token_bytes(_RANDOM)
    with suppress(OSError):
        sock.sendall(challenge)
    said = _read(sock, _RANDOM + _RANK)
    talk = challenge + said
    proof = _read(sock, _PROOF)
    if not hmac.compare_digest(proof, _derived(secret, b"proof of another", talk)):
        return None
    with suppress(OSError):
        sock.sendall(_derived(secret, b"proof of rank 0", talk))
    keys = Keys(_derived(secret, b"from rank 0", talk), _derived(secret, b"from another", talk))
    return int.from_bytes(said[_RANDOM:], "little"), keys


def _derived(secret: bytes, purpose: bytes, talk: bytes) -> bytes:
    return hmac.digest(secret, purpose + b"\0" + talk, "sha256")


def _read(sock: socket.socket, n_bytes: int) -> bytes:
    """Read `n_bytes` within the socket's timeout; returns fewer if the time is over or the
    connection ends."""
    found, until = b"", time.monotonic() + (sock.gettimeout() or 3600.0)
    with suppress(OSError):
        while len(found) < n_bytes and (more := sock.recv(n_bytes - len(found))):
            found += more
            sock.settimeout(max(0.001, until - time.monotonic()))
    return found


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


class _Seals:
    """The seals of one direction: over each piece and the number of those before it."""

    SIZE = 32

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._n = 0

    def next(self, *pieces: Data) -> bytes:
        seal = hmac.new(self._key, self._n.to_bytes(8, "little"), "sha256")
        self._n += 1
        for piece in pieces:
            seal.update(piece)
        return seal.digest()


class PeerLostError(Exception):
    """The other rank ended, is silent or sends what is no frame; the text says which."""


class Channel:
    """Frames to and from one other rank. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket, peer: int, silence: float, keys: Keys) -> None:
        """`peer` is the other's rank, which has the same `keys`. It is lost if nothing comes for
        `silence` seconds."""
        self.peer = peer
        self._sock = sock
        self._silence = silence
        self._sending = threading.Lock()
        self._own, self._theirs = _Seals(keys.own), _Seals(keys.peer)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(silence)

    def send(self, frame: Frame) -> None:
        """Send a frame. A peer that is lost is reported by `frames`, not here."""
        ints = array("q", frame.ints)
        if sys.byteorder == "big":
            ints.byteswap()
        head = _HEAD.pack(frame.op, frame.number, len(ints), len(frame.data))
        body = ints.tobytes()
        try:
            with self._sending:  # seals are numbered in the order of sending
                start = head + self._own.next(head)
                if not body and not frame.data:
                    self._sock.sendall(start)
                    return
                self._sock.sendall(start + body)
                if frame.data:
                    self._sock.sendall(frame.data)
                self._sock.sendall(self._own.next(body, frame.data))
        except OSError:
            self.close()

    def frames(self) -> Iterator[Frame]:
        """Each frame as it comes, without beats. Raises PeerLostError."""
        while True:
            head = self._read(_HEAD.size)
            self._check_seal(head)  # before memory is taken for what it promises
            op, number, n_ints, n_bytes = _HEAD.unpack(head)
            if not (0 <= n_ints <= _MOST_INTS and 0 <= n_bytes <= _MOST_BYTES):
                raise PeerLostError(f"rank {self.peer} sent what is no frame")
            body = self._read(n_ints * _INT_BYTES)
            data = self._read(n_bytes)
            if body or data:
                self._check_seal(body, data)
            ints = array("q", bytes(body))
            if sys.byteorder == "big":
                ints.byteswap()
            if op != Op.BEAT:
                yield Frame(Op(op), number, ints, data)

    def close(self) -> None:
        """End the connection; `frames` ends with it."""
        with suppress(OSError):  # it had ended
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _check_seal(self, *pieces: bytearray) -> None:
        if not hmac.compare_digest(self._read(_Seals.SIZE), self._theirs.next(*pieces)):
            raise PeerLostError(f"what came is not what rank {self.peer} sent")

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
