"""Bodies: sealed block bodies in an object store, and the headers that tails are found by.

Everything is verified when it is read; what does not hold is an error, which others handle. Knows
where bodies are; not which there are, nor what to do about one that is gone or damaged.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from semantic.adapters.stores.disk.block_file import (
    HEADER_BYTES,
    decode_header,
    encode_header,
    layout_stamp,
)
from semantic.adapters.stores.disk.entries import DamagedError
from semantic.domain.block_hash import BlockHash, BlockKey, BlockLink, Part, Scope
from semantic.domain.stored import BlockHeader, StoredBlock
from semantic_fleet.objects.names import (
    Folder,
    body_identity,
    has_tail,
    tail_identity,
)
from semantic_fleet.objects.objects import Objects
from semantic_fleet.objects.sealing import (
    SealingMemory,
    chunks,
    contents_bytes,
    seal,
    sealed_bytes,
    unsealed,
)
from semantic_fleet.objects.vault import Vault

T = TypeVar("T")
R = TypeVar("R")

THREADS = 8
"""Calls at a time."""


class Parallel:
    """Threads of one kind of call: what waits for others of its own kind would wait for ever."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="remote")

    def each(self, action: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """What `action` returns for each, in order; of a single one on the calling thread."""
        if len(items) <= 1:
            return [action(item) for item in items]
        return list(self._pool.map(action, items))

    def ahead(self, action: Callable[[T], R], items: Iterable[T], n: int) -> Iterator[R]:
        """The same one by one, while the next `n` are on their way."""
        if n == 1:
            yield from map(action, items)
            return
        waiting: deque[Future[R]] = deque()
        for item in items:
            waiting.append(self._pool.submit(action, item))
            if len(waiting) == n:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def close(self) -> None:
        """Return when all calls have ended."""
        self._pool.shutdown()


_SIZE = struct.Struct("<Q")
"""After the header in a tail's object: the bytes of the body."""


class Bodies:
    """The bodies of all scopes in one object store. Thread-safe.

    Every call may raise UnavailableError.
    """

    def __init__(self, objects: Objects, vault: Vault) -> None:
        self._objects = objects
        self._vault = vault
        # Of their own: a body that is read on another thread waits for its parts.
        self._parts = Parallel()
        self._sealing = SealingMemory()

    def folder(self, scope: Scope) -> Folder:
        """Where the objects of a scope are."""
        return Folder(scope, self._vault.tenant(scope.tenant))

    def n_bytes(self, folder: Folder, key: BlockKey) -> int | None:
        """Bytes of a body; None if there is none, or an object of an impossible size."""
        size = self._objects.size(folder.body(key))
        return None if size is None else contents_bytes(size)

    def size(self, header: BlockHeader) -> int:
        """The same. Raises FileNotFoundError, or DamagedError for the size."""
        size = self._objects.size(self.folder(header.link.scope).body(header.key))
        if size is None:
            raise FileNotFoundError
        n_bytes = contents_bytes(size)
        if n_bytes is None:
            raise DamagedError("truncated")
        return n_bytes

    def read(self, header: BlockHeader, n_bytes: int, ahead: int) -> Iterator[memoryview]:
        """The verified body in pieces, of which `ahead` are read at a time. Raises as `chunks`, and
        FileNotFoundError."""
        folder = self.folder(header.link.scope)
        path = folder.body(header.key)
        fetch = partial(
            self._parts.ahead, lambda part: self._objects.read(path, part[0], part[1]), n=ahead
        )
        return chunks(folder.tenant.key, body_identity(header), n_bytes, fetch)

    def write(self, block: StoredBlock, data: bytes | memoryview) -> tuple[str, ...]:
        """Write a body unless it is there, then what it is found by; what happened, to be
        counted."""
        header = block.header
        done: tuple[str, ...] = ()
        folder = self.folder(header.link.scope)
        path, key = folder.body(header.key), folder.tenant.key
        there = self._objects.size(path)
        n_sealed = sealed_bytes(len(data))
        if there != n_sealed:
            with self._sealing.piece(n_sealed) as piece:
                sealed = seal(key, body_identity(header), data, piece)
                if there is None:
                    self._objects.create(path, sealed)
                else:
                    self._objects.replace(path, sealed)
            done = ("written",) if there is None else ("written", "replaced")
        if has_tail(header):
            contents = encode_header(block) + _SIZE.pack(len(data))
            self._objects.create(
                folder.tail(header.key, header.link.parent),
                seal(key, tail_identity(header.key), contents),
            )
        return done

    def tail(
        self, folder: Folder, path: str, key: BlockKey, layout: str
    ) -> tuple[BlockHeader, int] | None:
        """The header in the object of a tail, and the bytes of its body; None if it is of another
        scope or layout.

        Raises FileNotFoundError, DamagedError, MismatchError and NewerFormatError.
        """
        data = unsealed(folder.tenant.key, tail_identity(key), self._objects.get(path))
        if len(data) != HEADER_BYTES + _SIZE.size:
            raise DamagedError("truncated")
        (n_bytes,) = _SIZE.unpack(data[HEADER_BYTES:])
        header = decode_header(data[:HEADER_BYTES], key, HEADER_BYTES + n_bytes).header
        if header.link.scope != folder.scope or header.layout != layout_stamp(layout):
            return None
        link = replace(header.link, scope=folder.scope)
        return replace(header, link=link, layout=layout), n_bytes

    def delete(self, scope: Scope, key: BlockKey, tail_of: BlockHash | None) -> None:
        """Delete a body, and before that what it is found by, if it follows `tail_of`."""
        if tail_of is not None:
            self.delete_tail(scope, key, tail_of)
        self._objects.delete(self.folder(scope).body(key))

    def delete_tail(self, scope: Scope, key: BlockKey, parent: BlockHash) -> None:
        """Delete the header by which a body is found."""
        self._objects.delete(self.folder(scope).tail(key, parent))

    def share(self, link: BlockLink) -> None:
        """Let every process know that turns of several agents end with a block."""
        self._objects.create(self.folder(link.scope).shared(link), b"")

    def is_shared(self, link: BlockLink) -> bool:
        """True if a process has marked the block as shared."""
        return self._objects.size(self.folder(link.scope).shared(link)) is not None

    def delete_parts(self, link: BlockLink, parts: Sequence[Part]) -> None:
        """Delete bodies of a partial block, and what they are found by, with one call."""
        folder, keys = self.folder(link.scope), [link.key(part) for part in parts]
        tails = [folder.tail(key, link.parent) for key in keys if key.part is not Part.WINDOW]
        self._objects.delete_all([*tails, *map(folder.body, keys)])

    def close(self) -> None:
        self._parts.close()
        self._sealing.close()
