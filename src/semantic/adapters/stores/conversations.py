"""Responses and turns on disk, in two SQLite files.

If the disk fails, responses stay in memory, and the server renders missing turns again.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from semantic.adapters.stores.records import Records, UnusableFileError
from semantic.domain.block_hash import TOKEN_BYTES, pack_tokens, unpack_tokens
from semantic.domain.chat import Point, Turn
from semantic.domain.errors import StoreError
from semantic.domain.identity import digest
from semantic.domain.responses import StoredResponse, encoded, key_of, owner_of, response_in
from semantic.ports.store import ResponsesPort


def _ignore(_: str) -> None:
    """Do nothing."""


class SqliteResponses:
    """Implements `ResponsesPort` with a file, created on first use. Beyond `max_bytes`, deletes
    the oldest responses of the largest tenant first."""

    def __init__(self, path: Path, max_bytes: int, notify: Callable[[str], None] = _ignore) -> None:
        self._records = Records(path, max_bytes, "responses", notify)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        return response_in(self._records.get(key_of(tenant, response_id)), response_id)

    def put(self, tenant: str, response: StoredResponse) -> None:
        self._records.put(key_of(tenant, response.id), encoded(response), owner_of(tenant))

    def delete(self, tenant: str, response_id: str) -> bool:
        """See `ResponsesPort.delete`. Overwrites the text on disk."""
        return self._records.delete(key_of(tenant, response_id))

    def close(self) -> None:
        self._records.close()


class FallbackResponses:
    """Implements `ResponsesPort` with `disk`. If `disk` fails, uses `memory` instead. Calls
    `notify` at the first failure."""

    def __init__(
        self, disk: ResponsesPort, memory: ResponsesPort, notify: Callable[[str], None]
    ) -> None:
        self._disk = disk
        self._memory = memory
        self._notify = notify
        self._notified = False
        self._off = False
        self._mutex = threading.Lock()

    def disable_disk(self) -> None:
        """Keep responses in memory only from now on."""
        self._off = True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        found = self._memory.get(tenant, response_id)
        if found is not None or self._off:
            return found
        try:
            return self._disk.get(tenant, response_id)
        except UnusableFileError as error:
            self._give_up(error)
            return None

    def put(self, tenant: str, response: StoredResponse) -> None:
        """See `ResponsesPort.put`. A failure of the disk raises no error."""
        if not self._off:
            try:
                self._disk.put(tenant, response)
            except UnusableFileError as error:
                self._give_up(error)
            except StoreError as error:
                self._report(error)
            else:
                return
        self._memory.put(tenant, response)

    def delete(self, tenant: str, response_id: str) -> bool:
        on_disk = False
        if not self._off:
            try:
                on_disk = self._disk.delete(tenant, response_id)
            except UnusableFileError as error:
                self._give_up(error)
        return self._memory.delete(tenant, response_id) or on_disk

    def close(self) -> None:
        self._disk.close()
        self._memory.close()

    def _give_up(self, error: StoreError) -> None:
        self._off = True
        self._report(error)

    def _report(self, error: StoreError) -> None:
        with self._mutex:
            notified, self._notified = self._notified, True
        if not notified:
            self._notify(f"{error}; they stay in memory until the process ends")


_HEAD: Final = struct.Struct("<?32sQ32s")
"""Flag, digest and length of the parent, and the digest of the turn's thought."""
_NO_POINT: Final = bytes(32)


class DiskTurns:
    """Implements `TurnsPort` with a file. Beyond `max_bytes`, deletes the oldest turns of the
    largest tenant first. Its methods raise nothing."""

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
        """See `TurnsPort.put`. Returns after the write."""
        if not turn.tokens and self.get(turn.point) is not None:
            return
        try:
            self._records.put(turn_key(turn.point), encoded_turn(turn), turn.owner)
        except StoreError as error:
            self._report(error)

    def look_up(self, owner: bytes, points: Sequence[Point]) -> None:
        """See `TurnsPort.look_up`. Does nothing, as `get` reads the file."""

    def close(self) -> None:
        self._records.close()

    def _report(self, error: StoreError) -> None:
        if not self._notified:
            self._notified = True
            self._notify(f"{error}; after a restart the server renders some history again")


def turn_key(point: Point) -> bytes:
    """Return the 32-byte key of the turn that ends at `point`."""
    return digest("turn-key-v1", point)


def encoded_turn(turn: Turn) -> bytes:
    """Return `turn` as bytes, without point and owner."""
    parent = turn.parent or _NO_POINT
    head = _HEAD.pack(turn.parent is not None, parent, turn.start, turn.thought)
    return head + pack_tokens(turn.tokens)


def decoded_turn(point: Point, data: bytes, owner: bytes = b"") -> Turn | None:
    """Return the turn in `data`; None if `data` is malformed."""
    tokens = data[_HEAD.size :]
    if len(data) < _HEAD.size or len(tokens) % TOKEN_BYTES:
        return None
    has_parent, parent, start, thought = _HEAD.unpack_from(data)
    return Turn(point, parent if has_parent else None, start, unpack_tokens(tokens), thought, owner)
