"""What the engine needs from a place that keeps blocks: in memory, on disk, or both.

A store is a cache, never a source of truth: whatever it has lost, dropped or cannot prove is a
miss. It may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from semantic.domain.block_hash import BlockHash, BlockKey, Part, Scope
from semantic.domain.stored import (
    BlockHeader,
    BlockRead,
    Found,
    Manifest,
    StoredBlock,
    StoreStats,
)


class CacheStorePort(Protocol):
    """Keeps immutable block bodies under the hash of their content, and agents' manifests.

    No call raises for what goes wrong with a disk: it is counted in `stats` and is a miss.
    """

    @property
    def secret(self) -> bytes:
        """32 random bytes that tenants' tags are derived with; the same as long as it exists."""
        ...

    # Blocks

    def put(self, block: StoredBlock) -> bool:
        """Keep `block`, or do nothing when it is there already.

        False when it is not kept: no room beside pins, back-pressure, a failing disk. The budget
        holds before and after; what was used longest ago is evicted to make room, of a chain the
        tail first. `block` is shared, never changed.
        """
        ...

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        """Which of `keys` are there, as far as is known without reading them. Not a use."""
        ...

    def lacking(self, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Which of `keys` to `put` (again), so that they last as long as they can here.

        Nothing while putting would be in vain.
        """
        ...

    def children(
        self, parent: BlockHash, part: Part, like: Sequence[int] | None = None
    ) -> Sequence[BlockHeader]:
        """The headers of the blocks that follow `parent`, as far as is known without reading.

        With `like` only those of which `begins_like` holds: many may follow one block.
        """
        ...

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        """Fill the targets of each read; True for each body that is proven to be the one asked for.

        Reads in parallel. False leaves anything in the targets. A damaged body is put aside.
        """
        ...

    def read(self, header: BlockHeader) -> bytes | None:
        """The body, proven as in `read_into`, or None."""
        ...

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """These were used now, together; the first (a chain's root) are to be kept longest."""
        ...

    # Agents

    def save(self, manifest: Manifest) -> bool:
        """Keep `manifest` as its agent's newest, after all blocks that were put before it.

        The generation is the store's to give. Marks the agent's blocks as used. False when it is
        not kept.
        """
        ...

    def manifest(self, scope: Scope, agent_id: str) -> Manifest | None:
        """The agent's newest manifest, or None."""
        ...

    def manifests(self) -> Sequence[Manifest]:
        """The newest manifest of every agent of every model and tenant, last saved first."""
        ...

    def remove(self, scope: Scope, agent_id: str) -> bool:
        """Forget the agent; False when it is not known. Its blocks stay until room is needed."""
        ...

    # Life

    def stats(self) -> Sequence[StoreStats]:
        """One entry per tier."""
        ...

    def flush(self) -> None:
        """Return when all that was accepted is as safe as this store can make it."""
        ...

    def close(self) -> None:
        """Flush, and let go of files and threads. Nothing may be called afterwards."""
        ...
