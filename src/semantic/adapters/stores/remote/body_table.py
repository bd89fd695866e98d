"""Body table: the sizes of a million bodies in little memory, the least recently used forgotten.

From a body's name, see `name_of_body`, to a record of bytes, which garbage collection passes over:

    offset  bytes
         0      8  the first of the hash, so that no other body of that name is taken for this one
         8      8  the name of the full block before it
        16      4  how deep it is, see `depth_of`
        20      8  bytes of the body, and in the lowest 16 bits the number of its scope

They lie in generations by the time of their last use, so that forgetting neither searches nor
compares. Knows neither tokens nor where a body is.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from semantic.adapters.stores.remote.names import depth_of, name_of_body
from semantic.domain.block_hash import BlockHash, BlockKey, Part, Scope
from semantic.domain.stored import BlockHeader

ENTRY_BYTES = 160
"""Memory for a body, at most: its name and its record, 112, and its places in a dictionary."""
GENERATIONS = 12
"""The oldest of which is forgotten at once when the newest is full."""
_RECORD = struct.Struct("<8sQIQ")
_SCOPE_BITS = 16
_MOST_SCOPES = 1 << _SCOPE_BITS


class Known(NamedTuple):
    """What is known of a body: `before` is the name of the full block that it follows."""

    n_bytes: int
    scope: Scope
    depth: int
    before: int


class BodyTable:
    """At most `max_bytes` of records. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._most = max(1, max_bytes // ENTRY_BYTES // GENERATIONS)
        self._generations: deque[dict[int, bytes]] = deque([{}], GENERATIONS)
        self._scopes: list[Scope | None] = []  # None: what is recorded of it is known no more
        self._numbers: dict[Scope, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._generations))

    def add(self, header: BlockHeader, n_bytes: int) -> None:
        """Know a body, used now; of more than 65536 scopes it is not known."""
        scope = header.link.scope
        number = self._numbers.setdefault(scope, len(self._scopes))
        if number == len(self._scopes):
            if number == _MOST_SCOPES:
                del self._numbers[scope]
                return
            self._scopes.append(scope)
        name, before = name_of_body(header.key), BlockKey(header.link.parent, Part.FULL)
        self._take(name)
        self._insert(
            name,
            _RECORD.pack(
                _mark(header.link.hash),
                name_of_body(before),
                depth_of(header),
                n_bytes << _SCOPE_BITS | number,
            ),
        )

    def get(self, key: BlockKey) -> Known | None:
        """What is known of a body."""
        record = self._record(name_of_body(key))
        return self._known(record) if record and record.startswith(_mark(key.hash)) else None

    def named(self, name: int) -> Known | None:
        """What is known of the body of this name."""
        record = self._record(name)
        return None if record is None else self._known(record)

    def use(self, keys: Iterable[BlockKey]) -> None:
        """Record a use of those that are known."""
        for name in map(name_of_body, keys):
            if name not in self._generations[0] and (record := self._take(name)) is not None:
                self._insert(name, record)

    def drop(self, name: int) -> None:
        """Forget the body of this name."""
        self._take(name)

    def drop_tenant(self, tenant: bytes) -> None:
        """Forget all bodies of a tenant, in a time that does not grow with their number."""
        for scope in [one for one in self._numbers if one.tenant == tenant]:
            self._scopes[self._numbers.pop(scope)] = None

    def clear(self) -> None:
        """Forget all."""
        self._generations.clear()
        self._generations.append({})

    def _insert(self, name: int, record: bytes) -> None:
        if len(self._generations[0]) >= self._most:
            self._generations.appendleft({})
        self._generations[0][name] = record

    def _record(self, name: int) -> bytes | None:
        for one in self._generations:
            if name in one:
                return one[name]
        return None

    def _take(self, name: int) -> bytes | None:
        for one in self._generations:
            if name in one:
                return one.pop(name)
        return None

    def _known(self, record: bytes) -> Known | None:
        _, before, depth, both = _RECORD.unpack(record)
        scope = self._scopes[both & (_MOST_SCOPES - 1)]
        return None if scope is None else Known(both >> _SCOPE_BITS, scope, depth, before)


def _mark(name: BlockHash) -> bytes:
    return name[:8]
