"""Sample chains, headers, bodies and manifests for stores, derived from small numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from random import Random

from semantic.application.agents.footprint import newest_first
from semantic.domain.block_hash import (
    BlockHash,
    BlockKey,
    BlockLink,
    Part,
    Scope,
    namespace_of,
    tenant_tag,
)
from semantic.domain.stored import BlockHeader, BlockLayout, BlockRead, Manifest, StoredBlock
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.store import StorePort

LAYOUT = BlockLayout("test: 3 segments", full=(8, 2, 4), window=(16,), window_tokens=512)
"""A full block of it has 3,584 bytes."""


def scope_of(model: str = "model", tenant: str = "tenant") -> Scope:
    """Where blocks of `model` and `tenant` are shared."""
    return Scope(namespace_of(model, LAYOUT.name), tenant_tag(b"s" * 32, tenant))


SCOPE = scope_of()


@functools.lru_cache(256)
def text(n_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """`n_tokens` token ids; the beginnings of texts of one seed are alike."""
    random = Random(seed)
    return tuple(random.getrandbits(17) for _ in range(n_tokens))


def chain(n_tokens: int, seed: int = 0, scope: Scope = SCOPE) -> list[BlockLink]:
    """The blocks of `text`."""
    return list(_chain(n_tokens, seed, scope))


@functools.lru_cache(256)
def _chain(n_tokens: int, seed: int, scope: Scope) -> tuple[BlockLink, ...]:
    return tuple(scope.chain(text(n_tokens, seed)))


def header(link: BlockLink, part: Part = Part.FULL, layout: BlockLayout = LAYOUT) -> BlockHeader:
    """What identifies the block's body of `part`."""
    return BlockHeader(link, part, layout.name)


def block(link: BlockLink, part: Part = Part.FULL, layout: BlockLayout = LAYOUT) -> StoredBlock:
    """The block with a body of its own; a checkpoint's body has 1,000 bytes."""
    n_bytes = 1000 if part is Part.CHECKPOINT else layout.body_bytes(part, len(link.tokens))
    return StoredBlock(header(link, part, layout), body_of(link.hash, part, n_bytes))


def body_of(name: BlockHash, part: Part, n_bytes: int) -> bytes:
    """Bytes that no other block has."""
    return Random(name + part.encode()).randbytes(n_bytes)


def blocks(links: Sequence[BlockLink], part: Part = Part.FULL) -> list[StoredBlock]:
    """One block per link."""
    return [block(link, part) for link in links]


def keys(links: Sequence[BlockLink], part: Part = Part.FULL) -> list[BlockKey]:
    """One key per link."""
    return [link.key(part) for link in links]


def manifest(
    agent_id: str,
    n_tokens: int,
    seed: int = 0,
    *,
    scope: Scope = SCOPE,
    pinned: bool = False,
    parent: str | None = None,
) -> Manifest:
    """The manifest of an agent whose history is `text`."""
    return Manifest(scope, agent_id, text(n_tokens, seed), pinned=pinned, parent=parent)


def saved_agents(store: StorePort) -> list[Manifest]:
    """The manifests of all agents, newest first."""
    return list(newest_first(store.agents))


class Room:
    """Memory that a body can be read into."""

    def __init__(self, asked: BlockHeader, layout: BlockLayout = LAYOUT) -> None:
        sizes = layout.bytes_per_token(asked.part)
        self.segments = [bytearray(BLOCK_TOKENS * size) for size in sizes]
        self.used = [len(asked.link.tokens) * size for size in sizes]
        self.read = BlockRead(asked, [memoryview(segment) for segment in self.segments])

    @property
    def body(self) -> bytes:
        """What was read, as one body again."""
        used = zip(self.segments, self.used, strict=True)
        return b"".join(segment[:n_bytes] for segment, n_bytes in used)

    @property
    def rest_is_untouched(self) -> bool:
        """Whether nothing was written behind the block's tokens."""
        used = zip(self.segments, self.used, strict=True)
        return not any(any(segment[n_bytes:]) for segment, n_bytes in used)
