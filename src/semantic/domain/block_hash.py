"""BlockHash: the content address of a stored block, a chained SHA-256 over length-framed fields:
its namespace, its tenant, every token before it and its own tokens. Knows nothing about files or
the content of a block's body."""

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
"""Increment this when the meaning of a body's bytes changes, to make older blocks unknown."""


ANY_CHIP = "any-chip:"
"""Begins the id of a model whose blocks chips may share even if they round differently."""


class Part(StrEnum):
    """A part of a block's cache that has a stored body. The values are part of the file format."""

    FULL = "full"
    """Keys and values of the block's tokens in full-attention layers; empty if there are none."""
    WINDOW = "window"
    """Keys and values in the sliding-window layers, stored only where a sequence may resume."""
    CHECKPOINT = "checkpoint"
    """Everything else needed to resume after the block's last token: states, the window's edge."""


@dataclass(frozen=True, slots=True)
class BlockKey:
    hash: BlockHash
    part: Part


def begins_like(tokens: Sequence[int], like: Sequence[int]) -> bool:
    """Return whether both sequences begin with the same 16 tokens; a shorter sequence must match as
    a whole. Fewer shared tokens are not worth a read, because a chat template begins all
    conversations alike."""
    n = min(HEAD_TOKENS, len(tokens), len(like))
    return n > 0 and tuple(tokens[:n]) == tuple(like[:n])


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack token ids as little-endian u32."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Return the token ids that `pack_tokens` packed. Raises ValueError for a length that is not a
    multiple of 4."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def namespace_of(model_id: str, layout: str) -> bytes:
    """Return the 32-byte namespace of all blocks that a model computes. `model_id` identifies the
    numerics and the content of weights, configuration and tokenizer; `layout` identifies layer
    kinds, shapes, dtypes and the order of a body's bytes."""
    size = BLOCK_TOKENS.to_bytes(8, "little")
    return digest("ns-v1", model_id.encode(), layout.encode(), size, _LAYOUT_VERSION)


LOCAL_TENANT = ""
"""The tenant of requests without an API key."""
PUBLIC_TENANT = "public"
"""The tenant of prefixes that the operator shares with every tenant. Never a client's tenant."""


def tenant_tag(secret: bytes, tenant: str) -> bytes:
    """Return the 32-byte tag that stands for `tenant` in hashes; deriving it requires `secret`."""
    return hmac.digest(secret, tenant.encode("utf-8", "surrogatepass"), "sha256")


def tenant_id(secret: bytes, tag: bytes) -> str:
    """Return the id under which operators see a tenant: "local" for requests without an API key,
    "public", or 16 hexadecimal digits, which reveal neither the tenant's key nor its tag."""
    named = {tenant_tag(secret, LOCAL_TENANT): "local", tenant_tag(secret, PUBLIC_TENANT): "public"}
    return named.get(tag) or digest("tenant-id-v1", tag)[:_ID_BYTES].hex()


@dataclass(frozen=True)  # no slots: caches `root`
class Scope:
    """A model's content and a tenant, 32 bytes each; requests share blocks only within a scope. A
    `salt` limits sharing further, to agents of one import. Comparisons of scopes, names of agents
    and lists of agents ignore the `salt`."""

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
        """Yield the blocks of `tokens` in order; the last block may be partial. The tokens follow
        the block `parent` and begin at position `start` of their sequence, a multiple of 256."""
        before = self.root if parent is None else parent
        for at in range(0, len(tokens), BLOCK_TOKENS):
            own = tuple(tokens[at : at + BLOCK_TOKENS])
            link = BlockLink(self, self.hash_of(before, own), before, start + at, own)
            yield link
            before = link.hash

    def continued(self, links: Sequence[BlockLink], tokens: Sequence[int]) -> list[BlockLink]:
        """Return all blocks of `tokens`, which begin with the full blocks `links`."""
        start = len(links) * BLOCK_TOKENS
        parent = links[-1].hash if links else None
        return [*links, *self.chain(tokens[start:], parent=parent, start=start)]


@dataclass(frozen=True, slots=True)
class BlockLink:
    """One block of a chain: the inputs of its hash. `start` is the position of its first token."""

    scope: Scope
    hash: BlockHash
    parent: BlockHash
    start: int
    tokens: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Position after the block's last token."""
        return self.start + len(self.tokens)

    @property
    def is_full(self) -> bool:
        return len(self.tokens) == BLOCK_TOKENS

    def key(self, part: Part) -> BlockKey:
        """Return the key under which a store keeps the body of part `part` of this block."""
        return BlockKey(self.hash, part)
