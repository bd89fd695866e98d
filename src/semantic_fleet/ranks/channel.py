"""An authenticated connection between two ranks. Sends frames of integers, some followed by bytes.

Each rank proves that it knows a secret, without sending the secret. Between machines, a seal on
each frame reveals a changed, missing or foreign frame. Frames are not encrypted.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import secrets
import socket
import struct
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from semantic.domain.errors import BackendError
from semantic.ports.ranks import Data, Frame, MappedPort, Op

_RANDOM, _RANK, _PROOF = 32, 4, 32
"""Sizes in bytes of a random number, of a rank's number and of a proof."""


class Keys(NamedTuple):
    """The sealing keys of this rank and of its peer."""

    own: bytes
    peer: bytes


def join(sock: socket.socket, secret: bytes, rank: int) -> Keys | None:
    """Return the keys of a connection to rank 0. Returns None if it has another `secret`."""
    theirs = _read(sock, _RANDOM)
    said = secrets.token_bytes(_RANDOM) + rank.to_bytes(_RANK, "little")
    talk = theirs + said
    with suppress(OSError):  # a refusal shows in the reply to the proof
        sock.sendall(said + _derived(secret, b"proof of another", talk))
    if not hmac.compare_digest(_read(sock, _PROOF), _derived(secret, b"proof of rank 0", talk)):
        return None
    return Keys(_derived(secret, b"from another", talk), _derived(secret, b"from rank 0", talk))


def admit(sock: socket.socket, secret: bytes) -> tuple[int, Keys] | None:
    """Return the rank at the other end of a new connection to rank 0, and the connection's keys.
    Returns None if it does not know `secret`."""
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


def is_of_this_user(sock: socket.socket) -> bool:
    """Return True if the process at the other end of a Unix socket runs as this user."""
    if sys.platform == "linux":
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return bool(struct.unpack("iII", credentials)[1] == os.geteuid())
    user, group = ctypes.c_uint32(), ctypes.c_uint32()
    of_peer = ctypes.CDLL(None).getpeereid
    failed: int = of_peer(sock.fileno(), ctypes.byref(user), ctypes.byref(group))
    return failed == 0 and user.value == os.geteuid()


def _derived(secret: bytes, purpose: bytes, talk: bytes) -> bytes:
    return hmac.digest(secret, purpose + b"\0" + talk, "sha256")


def _read(sock: socket.socket, n_bytes: int) -> bytes:
    found, until = b"", time.monotonic() + (sock.gettimeout() or 3600.0)
    with suppress(OSError):
        while len(found) < n_bytes and (more := sock.recv(n_bytes - len(found))):
            found += more
            sock.settimeout(max(0.001, until - time.monotonic()))
    return found


_HEAD = struct.Struct("<qqqq")
"""The head of a frame: its kind, the call's number, and the numbers of integers and of bytes."""
_INT_BYTES = 8
_MOST_INTS = 1 << 24
_MOST_BYTES = (1 << 31) - 1
"""The maximum number of bytes under one seal."""


class _Seals:
    """Seals and checks pieces of frames. A seal depends on the number of earlier pieces."""

    SIZE = 16

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError:
            from semantic.adapters.mlx import extra_to_install

            raise BackendError(
                f"cannot seal frames between two machines: {extra_to_install('fleet')}"
            ) from None
        self._cipher = AESGCM(key)
        self._n = 0

    def next(self, piece: Data) -> bytes:
        seal = self._cipher.encrypt(self._n.to_bytes(12, "little"), b"", piece)
        self._n += 1
        return seal


class PeerLostError(Exception):
    """The other rank ended, was silent or sent an invalid frame."""


class Channel:
    """A connection to one other rank. Any thread may send, one thread receives."""

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        silence: float,
        mapped: MappedPort,
        keys: Keys | None = None,
    ) -> None:
        """`peer` is the number of the other rank, and is lost after `silence` seconds without a
        frame. Without `keys`, `sock` must be a Unix socket. `mapped` receives the peer's memory."""
        self.peer = peer
        self.is_local = keys is None
        self.mapped = mapped
        self._sock = sock
        self._silence = silence
        self._sending = threading.Lock()
        self._own = self._theirs = None
        if keys is not None:
            self._own, self._theirs = _Seals(keys.own), _Seals(keys.peer)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(silence)

    def send(self, frame: Frame, descriptor: int | None = None) -> None:
        """Send a frame, then the file `descriptor`. Only `frames` reports a lost peer."""
        ints = array("q", frame.ints)
        if sys.byteorder == "big":
            ints.byteswap()
        head = _HEAD.pack(frame.op, frame.number, len(ints), len(frame.data))
        try:
            with self._sending:  # seal numbers follow the order of sending
                start = b"".join(self._sealed(one) for one in (head, ints.tobytes()) if one)
                self._sock.sendall(start)
                if frame.data:
                    self._sock.sendall(frame.data)
                    self._sock.sendall(self._seal(frame.data))
                if descriptor is not None:
                    socket.send_fds(self._sock, [b"\0"], [descriptor])
        except OSError:
            self.close()

    def frames(self) -> Iterator[Frame]:
        """Yield each received frame. Skips heartbeats and frames about shared memory. Raises
        PeerLostError."""
        while True:
            # Check the head's seal before allocating memory for its sizes.
            op, number, n_ints, n_bytes = _HEAD.unpack(self._checked(_HEAD.size))
            if not (0 <= n_ints <= _MOST_INTS and 0 <= n_bytes <= _MOST_BYTES):
                raise PeerLostError(f"rank {self.peer} sent an invalid frame")
            ints = array("q", bytes(self._checked(n_ints * _INT_BYTES)))
            if sys.byteorder == "big":
                ints.byteswap()
            frame = Frame(Op(op), number, ints, self._checked(n_bytes))
            match frame.op:
                case Op.BEAT:
                    pass
                case Op.PIECE if self.is_local:
                    self.mapped.add(number, self._descriptor(), ints[0])
                case Op.DROP:
                    self.mapped.drop(ints)
                case Op.ROOM:
                    self.mapped.offer(number, ints)
                case _:
                    yield frame

    def close(self) -> None:
        """End the connection, which also ends `frames`."""
        with suppress(OSError):  # already ended
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _seal(self, piece: Data) -> bytes:
        return b"" if self._own is None else self._own.next(piece)

    def _sealed(self, piece: bytes) -> bytes:
        return piece + self._seal(piece)

    def _checked(self, n_bytes: int) -> bytearray:
        piece = self._read(n_bytes)
        if (
            piece
            and self._theirs is not None
            and not hmac.compare_digest(self._read(_Seals.SIZE), self._theirs.next(piece))
        ):
            raise PeerLostError(f"cannot verify the seal of a frame from rank {self.peer}")
        return piece

    def _descriptor(self) -> int:
        try:
            _, found, _, _ = socket.recv_fds(self._sock, 1, 1)
            return found[0]
        except (OSError, IndexError):
            raise PeerLostError(f"rank {self.peer} sent no descriptor") from None

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
                n = 0  # the peer ended with unread data
            if not n:
                raise PeerLostError(f"rank {self.peer} ended: see the output of that rank")
            at += n
        return found
