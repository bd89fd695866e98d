"""Block files: a header that identifies the block, a body, and checksums of header and body.

    offset  bytes
         0      8  magic
         8      4  format version
        12      4  part: 1 full, 2 window, 3 checkpoint
        16      4  tokens in the block, 1 to 256
        20      4  bytes of the layout's name
        24      8  position of the first token
        32      8  bytes of the body
        40    128  namespace, tenant, block hash, parent, 32 bytes each
       168     16  xxh3-128 of the body
       184   1024  tokens, u32 each, zero-padded
      1208   2872  the layout's name in UTF-8 (its hash when it is longer), zero-padded
      4080     16  xxh3-128 of the 4080 bytes before it

All numbers are little-endian. The body follows without a gap and ends the file.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from semantic.adapters.stores.disk.entries import (
    MAX_NUMBER,
    DamagedError,
    Entries,
    MismatchError,
    NewerFormatError,
    block_entry,
)
from semantic.adapters.stores.disk.files import read_whole
from semantic.domain.block_hash import (
    BlockHash,
    BlockKey,
    BlockLink,
    Part,
    Scope,
    pack_tokens,
    unpack_tokens,
)
from semantic.domain.identity import digest
from semantic.domain.stored import BlockHeader, BlockRead, StoredBlock
from semantic.domain.value_objects import BLOCK_TOKENS

T = TypeVar("T")
R = TypeVar("R")

HEADER_BYTES = 4096
VERSION = 1
MAX_BODY_BYTES = 1 << 32
"""The maximum size of a body in bytes, 16 MiB for each of 256 tokens."""

_MAGIC = b"SEMBLOCK"
_START = struct.Struct("<8sI")
_FIELDS = struct.Struct("<8sIIIIQQ32s32s32s32s16s")
_TOKENS_END = _FIELDS.size + 4 * BLOCK_TOKENS
_SUM_BYTES = 16
_SUM_AT = HEADER_BYTES - _SUM_BYTES
_LAYOUT_BYTES = _SUM_AT - _TOKENS_END
_CODES = {Part.FULL: 1, Part.WINDOW: 2, Part.CHECKPOINT: 3}
_PARTS = {code: part for part, code in _CODES.items()}

_MAX_VIEWS = 512
"""The maximum number of segments per system call. Linux and macOS allow 1,024."""
_GROUP_BYTES = 1 << 18
"""The number of bytes to read and hash at a time. They fit into the processor's cache."""
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A verified header."""

    header: BlockHeader
    body_bytes: int
    body_sum: bytes


# Format


def layout_stamp(layout: str) -> str:
    """Return a layout's name for a header, or the hash of a long name."""
    if len(layout.encode()) <= _LAYOUT_BYTES:
        return layout
    return "sha256:" + digest("layout-v1", layout.encode()).hex()


def encode_header(block: StoredBlock) -> bytes:
    """Return the 4096 bytes before the body of `block`. Raises ValueError for a wrong number of
    tokens."""
    link, body = block.header.link, block.data()
    if not 1 <= len(link.tokens) <= BLOCK_TOKENS:
        raise ValueError(f"a block has 1 to {BLOCK_TOKENS} tokens, got {len(link.tokens)}")
    layout = layout_stamp(block.header.layout).encode()
    fields = _FIELDS.pack(
        _MAGIC,
        VERSION,
        _CODES[block.header.part],
        len(link.tokens),
        len(layout),
        link.start,
        len(body),
        link.scope.namespace,
        link.scope.tenant,
        link.hash,
        link.parent,
        xxhash.xxh3_128_digest(body),
    )
    tokens = pack_tokens(link.tokens).ljust(4 * BLOCK_TOKENS, b"\0")
    framed = fields + tokens + layout.ljust(_LAYOUT_BYTES, b"\0")
    return framed + xxhash.xxh3_128_digest(framed)


def decode_header(data: bytes, key: BlockKey, file_bytes: int) -> FileHeader:
    """Return the header in `data`, the first bytes of a file of `file_bytes`. Raises
    NewerFormatError, or DamagedError unless the header is intact and belongs to `key`."""
    _check_frame(data)
    (_, _, code, n_tokens, n_layout, start, n_body, namespace, tenant, name, parent, body_sum) = (
        _FIELDS.unpack_from(data)
    )
    if not 1 <= n_tokens <= BLOCK_TOKENS or n_layout > _LAYOUT_BYTES or code not in _PARTS:
        raise DamagedError("header fields")
    if start > MAX_NUMBER or n_body > MAX_BODY_BYTES:
        raise DamagedError("header fields")
    if file_bytes != HEADER_BYTES + n_body:
        raise DamagedError("truncated" if file_bytes < HEADER_BYTES + n_body else "too long")
    tokens = unpack_tokens(data[_FIELDS.size : _FIELDS.size + 4 * n_tokens])
    scope = Scope(namespace, tenant)
    # Recompute the hash, so that a header's contents verify it, not the file's name.
    if BlockKey(BlockHash(name), _PARTS[code]) != key:
        raise DamagedError("identity")
    if scope.hash_of(BlockHash(parent), tokens) != name:
        raise DamagedError("tokens")
    link = BlockLink(scope, BlockHash(name), BlockHash(parent), start, tokens)
    layout = _text(data[_TOKENS_END : _TOKENS_END + n_layout])
    return FileHeader(BlockHeader(link, _PARTS[code], layout), n_body, body_sum)


def require_same(found: FileHeader, expected: BlockHeader) -> None:
    """Raise MismatchError unless two headers are equal."""
    have, want = found.header, expected
    pairs: dict[str, tuple[object, object]] = {
        "namespace": (have.link.scope.namespace, want.link.scope.namespace),
        "tenant": (have.link.scope.tenant, want.link.scope.tenant),
        "block hash": (have.key, want.key),
        "parent": (have.link.parent, want.link.parent),
        "start": (have.link.start, want.link.start),
        "tokens": (have.link.tokens, want.link.tokens),
        "layout": (have.layout, layout_stamp(want.layout)),
    }
    for name, (mine, theirs) in pairs.items():
        if mine != theirs:
            raise MismatchError(name)


def _check_frame(data: bytes) -> None:
    if len(data) < HEADER_BYTES:
        raise DamagedError("truncated")
    magic, version = _START.unpack_from(data)
    if magic != _MAGIC:
        raise DamagedError("magic")
    if version > VERSION:
        raise NewerFormatError(f"format {version}")
    if xxhash.xxh3_128_digest(data[:_SUM_AT]) != data[_SUM_AT:HEADER_BYTES]:
        raise DamagedError("header checksum")
    if version != VERSION:
        raise DamagedError("header fields")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DamagedError("header fields") from None


# Reading


class BlockReader:
    """Reads block files. Every method raises DamagedError, NewerFormatError, MismatchError or
    OSError."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._files = entries.files
        self._pool: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    def header(self, key: BlockKey) -> FileHeader:
        """Return the block's verified header."""
        with self._entries.opened(block_entry(key)) as (fd, size):
            return self._header(fd, key, size)

    def check(self, key: BlockKey) -> FileHeader:
        """Verify the block's header and body; return the header."""
        with self._entries.opened(block_entry(key)) as (fd, size):
            found = self._header(fd, key, size)
            scratch = memoryview(bytearray(min(_GROUP_BYTES, found.body_bytes)))
            self._verify(fd, _repeated(scratch, found.body_bytes), found)
            return found

    def fill(self, read: BlockRead) -> None:
        """Read the block's body into the targets of `read`, and verify the body."""
        with self._entries.opened(block_entry(read.header.key)) as (fd, size):
            found = self._expected(fd, read.header, size)
            segments = read.segments
            if sum(len(segment) for segment in segments) != found.body_bytes:
                raise MismatchError("size")
            self._verify(fd, segments, found)

    def body(self, header: BlockHeader) -> bytes:
        """Return the block's verified body."""
        with self._entries.opened(block_entry(header.key)) as (fd, size):
            found = self._expected(fd, header, size)
            try:
                body = bytearray(found.body_bytes)
                self._verify(fd, [memoryview(body)], found)
                return bytes(body)
            except MemoryError:
                raise OSError(errno.ENOMEM, "no memory for a block's body") from None

    def each(self, action: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Call `action` for all items, on several threads; return the results in order."""
        if len(items) <= 1:
            return [action(item) for item in items]
        with self._starting:
            if self._pool is None:
                threads = min(_MAX_THREADS, (os.cpu_count() or 1) + 2)
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

    def _verify(self, fd: int, segments: Iterable[memoryview], found: FileHeader) -> None:
        """Read the body into `segments`. Raises DamagedError if the checksum does not match."""
        hashed = xxhash.xxh3_128()
        at = HEADER_BYTES
        for group in _groups(segments):
            at = self._fill_group(fd, group, at)
            for view in group:
                hashed.update(view)
        if hashed.digest() != found.body_sum:
            raise DamagedError("body checksum")

    def _fill_group(self, fd: int, group: Sequence[memoryview], at: int) -> int:
        """Read into `group` from offset `at`; return the offset of the next read."""
        rest = list(group)
        while rest:
            got = self._files.preadv(fd, rest, at)
            if got == 0:
                raise DamagedError("truncated")
            at += got
            rest = _after(rest, got)
        return at


def _repeated(scratch: memoryview, n_bytes: int) -> Iterator[memoryview]:
    for at in range(0, n_bytes, _GROUP_BYTES):
        yield scratch[: n_bytes - at]


def _groups(segments: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the segments as lists that one system call can fill."""
    group: list[memoryview] = []
    n_bytes = 0
    for piece in _pieces(segments):
        if group and (len(group) == _MAX_VIEWS or n_bytes + len(piece) > _GROUP_BYTES):
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
    left = []
    for view in views:
        taken = min(n_bytes, len(view))
        n_bytes -= taken
        if taken < len(view):
            left.append(view[taken:])
    return left
