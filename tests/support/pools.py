"""What tests ask of a pool and the engine does not."""

from __future__ import annotations

from semantic.domain.services import BlockPool


def available(pool: BlockPool) -> int:
    """Blocks that can still be allocated; by bytes, those of the largest layer."""
    limits = []
    if pool.total_blocks is not None:
        limits.append(pool.total_blocks - pool.used_blocks)
    if pool.max_bytes is not None:
        largest = max(layer.bytes_per_block for layer in pool.spec.layers)
        limits.append((pool.max_bytes - pool.used_bytes) // largest)
    return min(limits)


def holders(pool: BlockPool) -> tuple[str, ...]:
    """The agents that hold at least one block."""
    return tuple(pool._held)
