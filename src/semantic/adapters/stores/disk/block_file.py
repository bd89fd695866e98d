"""The frame around a block's body: 4096 bytes that say whose body follows, and two checksums.

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
       184   1024  tokens, u32 each, zeros behind the last
      1208   2872  the layout's name in UTF-8 (its hash when it is longer), zeros behind it
      4080     16  xxh3-128 of the 4080 bytes before it

All numbers are little-endian; the body follows without a gap and ends the file. Knows no paths.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from semantic.adapters.stores.disk.damage import DamagedError, MismatchError, NewerFormatError
from semantic.adapters.stores.disk.names import MOST_NUMBER
from semantic.domain.block_hash import (
    BlockHash,
    BlockKey,
    BlockLink,
    Part,
    Scope,
    pack_tokens,
    unpack_tokens,
)
from semantic.domain.digest import digest
from semantic.domain.stored import BlockHeader, StoredBlock
from semantic.domain.value_objects import BLOCK_TOKENS

HEADER_BYTES = 4096
VERSION = 1
MAX_BODY_BYTES = 1 << 32
"""No body is longer: 16 MiB for each of 256 tokens. A file with a hole may claim any length."""

_MAGIC = b"SEMBLOCK"
_START = struct.Struct("<8sI")
_FIELDS = struct.Struct("<8sIIIIQQ32s32s32s32s16s")
_TOKENS_END = _FIELDS.size + 4 * BLOCK_TOKENS
_SUM_BYTES = 16
_SUM_AT = HEADER_BYTES - _SUM_BYTES
_LAYOUT_ROOM = _SUM_AT - _TOKENS_END
_CODES = {Part.FULL: 1, Part.WINDOW: 2, Part.CHECKPOINT: 3}
_PARTS = {code: part for part, code in _CODES.items()}


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A header that was found sound: whose body follows, its size and its checksum."""

    header: BlockHeader
    body_bytes: int
    body_sum: bytes


def layout_stamp(layout: str) -> str:
    """What stands for a layout in a header: its name, or a hash of it when that is too long."""
    if len(layout.encode()) <= _LAYOUT_ROOM:
        return layout
    return "sha256:" + digest("layout-v1", layout.encode()).hex()


def encode_header(block: StoredBlock) -> bytes:
    """The 4096 bytes before the body of `block`. Raises ValueError for what no block has."""
    link = block.header.link
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
        len(block.body),
        link.scope.namespace,
        link.scope.tenant,
        link.hash,
        link.parent,
        xxhash.xxh3_128_digest(block.body),
    )
    tokens = pack_tokens(link.tokens).ljust(4 * BLOCK_TOKENS, b"\0")
    framed = fields + tokens + layout.ljust(_LAYOUT_ROOM, b"\0")
    return framed + xxhash.xxh3_128_digest(framed)


def decode_header(data: bytes, key: BlockKey, file_bytes: int) -> FileHeader:
    """What the first bytes of the file of `key`, `file_bytes` long, say.

    Raises NewerFormatError, or DamagedError unless all is as it was written and belongs to `key`.
    """
    _check_frame(data)
    (_, _, code, n_tokens, n_layout, start, n_body, namespace, tenant, name, parent, body_sum) = (
        _FIELDS.unpack_from(data)
    )
    if not 1 <= n_tokens <= BLOCK_TOKENS or n_layout > _LAYOUT_ROOM or code not in _PARTS:
        raise DamagedError("header fields")
    if start > MOST_NUMBER or n_body > MAX_BODY_BYTES:
        raise DamagedError("header fields")
    if file_bytes != HEADER_BYTES + n_body:
        raise DamagedError("truncated" if file_bytes < HEADER_BYTES + n_body else "too long")
    tokens = unpack_tokens(data[_FIELDS.size : _FIELDS.size + 4 * n_tokens])
    scope = Scope(namespace, tenant)
    # The hash is recomputed: a header proves itself, whatever the file is called.
    if BlockKey(BlockHash(name), _PARTS[code]) != key:
        raise DamagedError("identity")
    if scope.hash_of(BlockHash(parent), tokens) != name:
        raise DamagedError("tokens")
    link = BlockLink(scope, BlockHash(name), BlockHash(parent), start, tokens)
    layout = _text(data[_TOKENS_END : _TOKENS_END + n_layout])
    return FileHeader(BlockHeader(link, _PARTS[code], layout), n_body, body_sum)


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


def require_same(found: FileHeader, expected: BlockHeader) -> None:
    """Raise MismatchError unless a sound header is the one that was asked for, in every field."""
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


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DamagedError("header fields") from None
