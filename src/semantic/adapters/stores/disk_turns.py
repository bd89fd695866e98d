"""Turns in one SQLite file, durable. A missing turn is rendered again.

Knows turns and records; not what turns are for.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from semantic.adapters.stores.records import Records
from semantic.domain.block_hash import TOKEN_BYTES, pack_tokens, unpack_tokens
from semantic.domain.errors import StoreError
from semantic.domain.history import Point, Turn
from semantic.domain.identity import digest

_HEAD: Final = struct.Struct("<?32sQ32s")
"""Whether it has a parent, the parent's digest, its number of tokens, the thought's digest."""
_NO_POINT: Final = bytes(32)


class DiskTurns:
    """Implements `TurnsPort`; beyond `max_bytes` the oldest turns are deleted, those of the tenant
    that has most first.

    `notify` receives one sentence when turns cannot be stored, and one when a corrupt file was
    quarantined. Raises nothing.
    """

    def __init__(self, path: Path, max_bytes: int, notify: Callable[[str], None]) -> None:
        self._records = Records(path, max_bytes, "turns", notify)
        self._notify = notify
        self._notified = False

    def get(self, point: Point) -> Turn | None:
        try:
            data = self._records.get(turn_key(point))
        except StoreError as error:
            self._report(error)
            return None
        return None if data is None else decoded_turn(point, data)

    def put(self, turn: Turn) -> None:
        """See `TurnsPort.put`: written on return, for this machine only."""
        if not turn.tokens and self.get(turn.point) is not None:
            return
        try:
            self._records.put(turn_key(turn.point), encoded_turn(turn), turn.owner)
        except StoreError as error:
            self._report(error)

    def look_up(self, owner: bytes, points: Sequence[Point]) -> None:
        """See `TurnsPort.look_up`: nothing, `get` reads."""

    def close(self) -> None:
        self._records.close()

    def _report(self, error: StoreError) -> None:
        if not self._notified:
            self._notified = True
            self._notify(f"{error}; after a restart some history is rendered again")


def turn_key(point: Point) -> bytes:
    """The key of the turn that ends at `point`, 32 bytes."""
    return digest("turn-key-v1", point)


def encoded_turn(turn: Turn) -> bytes:
    """`turn` as bytes, without its point and owner."""
    parent = turn.parent or _NO_POINT
    head = _HEAD.pack(turn.parent is not None, parent, turn.start, turn.thought)
    return head + pack_tokens(turn.tokens)


def decoded_turn(point: Point, data: bytes, owner: bytes = b"") -> Turn | None:
    """The inverse of `encoded_turn`; None for any other bytes."""
    tokens = data[_HEAD.size :]
    if len(data) < _HEAD.size or len(tokens) % TOKEN_BYTES:
        return None
    has_parent, parent, start, thought = _HEAD.unpack_from(data)
    return Turn(point, parent if has_parent else None, start, unpack_tokens(tokens), thought, owner)
