"""A block in memory as the answer to a read: is it the one asked for, and into the targets with it.

Knows how a body is cut into segments; not where the block comes from.
"""

from __future__ import annotations

from semantic.domain.stored import BlockRead, StoredBlock
from semantic.domain.value_objects import BLOCK_TOKENS


def fill(read: BlockRead, block: StoredBlock) -> bool:
    """Copy the body of `block` into the targets of `read`.

    False, with the targets as they were, when the headers differ in any field or the body is not
    of the size that the targets ask for.
    """
    if block.header != read.header:
        return False
    n_tokens = len(read.header.link.tokens)
    sizes = [target.nbytes // BLOCK_TOKENS * n_tokens for target in read.targets]
    if sum(sizes) != len(block.body):
        return False
    body = memoryview(block.body)
    at = 0
    for target, size in zip(read.targets, sizes, strict=True):
        target.cast("B")[:size] = body[at : at + size]
        at += size
    return True
