"""Reads block files into memory that waits for them, and proves every byte on the way.

A few threads read side by side: the system copies while Python waits. Decides nothing about a
file that fails; knows no index.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash

from semantic.adapters.stores.disk.block_file import (
    HEADER_BYTES,
    FileHeader,
    decode_header,
    require_same,
)
from semantic.adapters.stores.disk.damage import DamagedError, MismatchError
from semantic.adapters.stores.disk.entries import Entries
from semantic.adapters.stores.disk.files import read_whole
from semantic.adapters.stores.disk.names import block_entry
from semantic.domain.block_hash import BlockKey
from semantic.domain.stored import BlockHeader, BlockRead
from semantic.domain.value_objects import BLOCK_TOKENS

T = TypeVar("T")
R = TypeVar("R")

_MOST_VIEWS = 512
"""Targets of one system call; POSIX promises few, Linux and macOS take 1,024."""
_GROUP_BYTES = 1 << 18
"""Read and hashed at a time, so that what is hashed is still in the processor's cache."""
_MOST_THREADS = 8


class BlockReader:
    """Every method raises DamagedError, NewerFormatError, MismatchError or OSError."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._files = entries.files
        self._pool: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    def header(self, key: BlockKey) -> FileHeader:
        """The header of the block's file; its body is not read."""
        with self._entries.opened(block_entry(key)) as (fd, size):
            return self._header(fd, key, size)

    def check(self, key: BlockKey) -> FileHeader:
        """The same, with the body read and proven."""
        with self._entries.opened(block_entry(key)) as (fd, size):
            found = self._header(fd, key, size)
            scratch = memoryview(bytearray(min(_GROUP_BYTES, found.body_bytes)))
            self._prove(fd, _again_and_again(scratch, found.body_bytes), found)
            return found

    def fill(self, read: BlockRead) -> None:
        """Read the body into the targets of `read`."""
        with self._entries.opened(block_entry(read.header.key)) as (fd, size):
            found = self._expected(fd, read.header, size)
            n_tokens = len(read.header.link.tokens)
            segments = [
                target.cast("B")[: target.nbytes // BLOCK_TOKENS * n_tokens]
                for target in read.targets
                if target.nbytes
            ]
            if sum(len(segment) for segment in segments) != found.body_bytes:
                raise MismatchError("size")
            self._prove(fd, segments, found)

    def body(self, header: BlockHeader) -> bytes:
        """The body as bytes of its own."""
        with self._entries.opened(block_entry(header.key)) as (fd, size):
            found = self._expected(fd, header, size)
            try:
                body = bytearray(found.body_bytes)
                self._prove(fd, [memoryview(body)], found)
                return bytes(body)
            except MemoryError:
                raise OSError(errno.ENOMEM, "no memory for a block's body") from None

    def each(self, action: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """`action` of every item, in order, several at a time."""
        if len(items) <= 1:
            return [action(item) for item in items]
        with self._starting:
            if self._pool is None:
                threads = min(_MOST_THREADS, (os.cpu_count() or 1) + 2)
                self._pool = ThreadPoolExecutor(threads, thread_name_prefix="semantic-read")
            pool = self._pool
        return list(pool.map(action, items))

    def close(self) -> None:
        with self._starting:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None

    def _header(self, fd: int, key: BlockKey, size: int) -> FileHeader:
        return decode_header(read_whole(self._files, fd, HEADER_BYTES), key, size)

    def _expected(self, fd: int, expected: BlockHeader, size: int) -> FileHeader:
        found = self._header(fd, expected.key, size)
        require_same(found, expected)
        return found

    def _prove(self, fd: int, segments: Iterable[memoryview], found: FileHeader) -> None:
        """Read the body into `segments`. Raises DamagedError unless its checksum is right."""
        hashed = xxhash.xxh3_128()
        at = HEADER_BYTES
        for group in _groups(segments):
            at = self._fill_group(fd, group, at)
            for view in group:
                hashed.update(view)
        if hashed.digest() != found.body_sum:
            raise DamagedError("body checksum")

    def _fill_group(self, fd: int, group: Sequence[memoryview], at: int) -> int:
        """Read on from `at` until `group` is full; where that ended."""
        rest = list(group)
        while rest:
            got = self._files.preadv(fd, rest, at)
            if got == 0:
                raise DamagedError("truncated")
            at += got
            rest = _after(rest, got)
        return at


def _again_and_again(scratch: memoryview, n_bytes: int) -> Iterator[memoryview]:
    """The same memory for one part of `n_bytes` after the other."""
    for at in range(0, n_bytes, _GROUP_BYTES):
        yield scratch[: n_bytes - at]


def _groups(segments: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in the same order, in groups that are read with one call each."""
    group: list[memoryview] = []
    n_bytes = 0
    for piece in _pieces(segments):
        if group and (len(group) == _MOST_VIEWS or n_bytes + len(piece) > _GROUP_BYTES):
            yield group
            group, n_bytes = [], 0
        group.append(piece)
        n_bytes += len(piece)
    if group:
        yield group


def _pieces(segments: Iterable[memoryview]) -> Iterator[memoryview]:
    for segment in segments:
        for at in range(0, len(segment), _GROUP_BYTES):
            yield segment[at : at + _GROUP_BYTES]


def _after(views: Sequence[memoryview], n_bytes: int) -> list[memoryview]:
    """What is left of `views` when the first `n_bytes` of them are filled."""
    left = []
    for view in views:
        taken = min(n_bytes, len(view))
        n_bytes -= taken
        if taken < len(view):
            left.append(view[taken:])
    return left
