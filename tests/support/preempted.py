"""Sequences of a backend preempted and resumed as an engine does it. Knows no engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from semantic.adapters.mlx.backend import MLXBackend
from semantic.domain.entities import AgentBlocks
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import SequenceId


def preempted(
    backend: MLXBackend, sequence: SequenceId, history: Sequence[int], capacity: int
) -> AgentBlocks:
    """A sequence's cache, which holds `history`, as blocks; it had room for `capacity` tokens."""
    spec = backend.cache_spec()
    counts = spec.blocks_for(capacity)
    pool: BlockPool = BlockPool(spec, sum(counts))
    layers = pool.allocate_layers(counts, "agent")
    unused = {block.block_id for block in backend.extract(sequence, layers)}
    blocks = AgentBlocks("agent", token_ids=tuple(history))
    for block in itertools.chain(*layers):
        if block.block_id not in unused:
            blocks.add_block(block)
    return blocks


def resumed(backend: MLXBackend, blocks: AgentBlocks, capacity: int) -> SequenceId:
    """A sequence with the cache of all but the last token, which it continues from."""
    sequence = backend.restore(blocks, blocks.total_tokens - 1, capacity, exclusive=True)
    for block in blocks.all_blocks():
        block.layer_data = None
    return sequence
