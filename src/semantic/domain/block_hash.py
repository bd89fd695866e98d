"""BlockHash: the content address of a stored block.

It is a chained SHA-256 of the block's namespace, tenant and tokens, and of all tokens before it.
"""

from __future__ import annotations

import hmac
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NewType

from semantic.domain.identity import digest
from semantic.domain.value_objects import BLOCK_TOKENS

BlockHash = NewType("BlockHash", bytes)
"""32 bytes of SHA-256."""

HASH_BYTES = 32
TOKEN_BYTES = 4
HEAD_TOKENS = 16
"""The number of tokens that `begins_like` compares."""
_ID_BYTES = 8
_LAYOUT_VERSION = b"1"
"""Increment this when the meaning of a stored body's bytes changes."""


ANY_CHIP = "any-chip:"
"""Begins the id of a model whose blocks all chips share, although chips round differently."""


class Part(StrEnum):
    """A part of a block's cache that has a stored body. The values are part of the file format."""

    FULL = "full"
    """Keys and values of the block's tokens in full-attention layers; empty if there are none."""
    WINDOW = "window"
    """Keys and values of sliding-window layers, stored only where a sequence may resume."""
    CHECKPOINT = "checkpoint"
    """The other data needed to resume after the block's last token, such as states."""


@dataclass(frozen=True, slots=True)
class BlockKey:
    hash: BlockHash
    part: Part


def begins_like(tokens: Sequence[int], like: Sequence[int]) -> bool:
    """Return whether two token sequences are equal in the first 16 tokens that both have."""
    n = min(HEAD_TOKENS, len(tokens), len(like))
    return n > 0 and tuple(tokens[:n]) == tuple(like[:n])


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack token ids as little-endian u32."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Undo `pack_tokens`. Raises ValueError for a length that is not a multiple of 4."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def namespace_of(model_id: str, layout: str) -> bytes:
    """Return the 32-byte namespace of all blocks that a model computes."""
    size = BLOCK_TOKENS.to_bytes(8, "little")
    return digest("ns-v1", model_id.encode(), layout.encode(), size, _LAYOUT_VERSION)


LOCAL_TENANT = ""
"""The tenant of requests without an API key."""
PUBLIC_TENANT = "public"
"""The tenant of prefixes that the operator shares with every tenant."""


def tenant_tag(secret: bytes, tenant: str) -> bytes:
    """Return the 32-byte tag of `tenant` in hashes."""
    return hmac.digest(secret, tenant.encode("utf-8", "surrogatepass"), "sha256")


def tenant_id(secret: bytes, tag: bytes) -> str:
    """Return the id under which operators see a tenant, such as "local"."""
    named = {tenant_tag(secret, LOCAL_TENANT): "local", tenant_tag(secret, PUBLIC_TENANT): "public"}
    return named.get(tag) or digest("tenant-id-v1", tag)[:_ID_BYTES].hex()


@dataclass(frozen=True)  # no slots: caches `root`
class Scope:
    """A model's namespace and a tenant's tag, 32 bytes each. Only requests in a scope share blocks.

    A `salt` limits sharing to the agents of one import.
    """

    namespace: bytes
    tenant: bytes
    salt: bytes = field(default=b"", compare=False)

    @cached_property
    def root(self) -> BlockHash:
        """The parent hash of every first block."""
        if self.salt:
            return BlockHash(digest("root-salted-v1", self.namespace, self.tenant, self.salt))
        return BlockHash(digest("root-v1", self.namespace, self.tenant))

    def hash_of(self, parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
        """Return the hash of the block with `tokens` that follows `parent`."""
        packed = pack_tokens(tokens)
        return BlockHash(digest("blk-v1", self.namespace, self.tenant, parent, packed))

    def chain(
        self, tokens: Sequence[int], *, parent: BlockHash | None = None, start: int = 0
    ) -> Iterator[BlockLink]:
        """Yield the blocks of `tokens`, which follow the block `parent`. Their first position,
        `start`, is a multiple of 256."""
        before = self.root if parent is None else parent
        for at in range(0, len(tokens), BLOCK_TOKENS):
            own = tuple(tokens[at : at + BLOCK_TOKENS])
            link = BlockLink(self, self.hash_of(before, own), before, start + at, own)
            yield link
            before = link.hash

    def continued(self, links: Sequence[BlockLink], tokens: Sequence[int]) -> list[BlockLink]:
        """Return all blocks of `tokens`. The first blocks are `links`."""
        start = len(links) * BLOCK_TOKENS
        parent = links[-1].hash if links else None
        return [*links, *self.chain(tokens[start:], parent=parent, start=start)]


@dataclass(frozen=True, slots=True)
class BlockLink:
    """One block of a chain, with the inputs of its hash."""

    scope: Scope
    hash: BlockHash
    parent: BlockHash
    start: int
    tokens: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The position after the block's last token."""
        return self.start + len(self.tokens)

    @property
    def is_full(self) -> bool:
        return len(self.tokens) == BLOCK_TOKENS

    def key(self, part: Part) -> BlockKey:
        """Return the key under which a store keeps a part of this block."""
        return BlockKey(self.hash, part)
