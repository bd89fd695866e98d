"""Turns in one SQLite file. They survive the process; losing them costs time.

Knows turns and records; not what turns are for.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from semantic.adapters.stores.records import Records
from semantic.domain.block_hash import TOKEN_BYTES, pack_tokens, unpack_tokens
from semantic.domain.digest import digest
from semantic.domain.errors import StoreError
from semantic.domain.history import Point, Turn

_HEAD: Final = struct.Struct("<?32sQ32s")
"""Whether it stands on something, the digest of that, how many tokens that are, the thought."""
_NO_POINT: Final = bytes(32)


class DiskTurns:
    """Implements `TurnsPort`; of `max_bytes` the oldest go. `tell` gets one sentence when turns
    cannot be kept, and one when a broken file was moved aside."""

    def __init__(self, path: Path, max_bytes: int, tell: Callable[[str], None]) -> None:
        self._records = Records(path, max_bytes, "turns", tell)
        self._tell = tell
        self._told = False

    def get(self, point: Point) -> Turn | None:
        """See `TurnsPort.get`."""
        try:
            data = self._records.get(_key_of(point))
        except StoreError as error:
            self._say(error)
            return None
        return None if data is None else _decoded(point, data)

    def put(self, turn: Turn) -> None:
        """See `TurnsPort.put`."""
        try:
            self._records.put(_key_of(turn.point), _encoded(turn))
        except StoreError as error:
            self._say(error)

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _say(self, error: StoreError) -> None:
        if not self._told:
            self._told = True
            self._tell(f"{error}; after a restart some history is rendered again")


def _key_of(point: Point) -> bytes:
    return digest("turn-key-v1", point)


def _encoded(turn: Turn) -> bytes:
    parent = turn.parent or _NO_POINT
    head = _HEAD.pack(turn.parent is not None, parent, turn.start, turn.thought)
    return head + pack_tokens(turn.tokens)


def _decoded(point: Point, data: bytes) -> Turn | None:
    tokens = data[_HEAD.size :]
    if len(data) < _HEAD.size or len(tokens) % TOKEN_BYTES:
        return None
    has_parent, parent, start, thought = _HEAD.unpack_from(data)
    return Turn(point, parent if has_parent else None, start, unpack_tokens(tokens), thought)
