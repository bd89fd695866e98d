"""How two ranks prove to each other that they know a secret, without sending it.

Each answers the other's random number; from both come the keys of a connection, one for each
direction. Knows sockets and the secret; not where that is from.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from contextlib import suppress
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
    """What comes, of so many bytes; less if the connection ends or stays silent."""
    found = b""
    with suppress(OSError):
        while len(found) < n_bytes and (more := sock.recv(n_bytes - len(found))):
            found += more
    return found
