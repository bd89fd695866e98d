"""What sequences say that decode in one batch from beginning to end, suspended on the way or not.

For comparisons to the bit: with `top`, log-probabilities are told as they are. Drives a backend
alone; knows no engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.layer_caches import LayerData
from semantic.domain.entities import AgentBlocks
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import SampledToken, SamplingParams, SequenceId, whole_blocks


def said_by(
    backend: MLXBackend,
    prompts: Sequence[Sequence[int]],
    n_steps: int,
    *,
    top: int,
    suspended_after: Collection[int] = (),
) -> list[list[SampledToken]]:
    """Of each prompt `n_steps` tokens; all are suspended and resumed after so many steps."""
    sampling = SamplingParams(logprobs=top)
    capacity = whole_blocks(max(map(len, prompts)) + n_steps)
    histories = [list(prompt) for prompt in prompts]
    sequences: list[SequenceId] = []
    for prompt in prompts:
        sequence = backend.open(capacity)
        for at in range(0, len(prompt) - 1, backend.best_chunk):
            backend.prefill(sequence, prompt[at : min(at + backend.best_chunk, len(prompt) - 1)])
        backend.start(sequence, prompt[-1], prompt[:-1], sampling, 0)
        sequences.append(sequence)
    said: list[list[SampledToken]] = [[] for _ in prompts]
    for step in range(n_steps):
        if step in suspended_after:
            kept = [
                _suspended(backend, sequence, history, capacity)
                for sequence, history in zip(sequences, histories, strict=True)
            ]
            sequences = [
                backend.restore(blocks, blocks.total_tokens - 1, capacity, exclusive=True)
                for blocks in kept
            ]
            for sequence, history in zip(sequences, histories, strict=True):
                backend.start(sequence, history[-1], history[:-1], sampling, step)
        tokens = {one.sequence: one for one in backend.decode()}
        for sequence, mine, history in zip(sequences, said, histories, strict=True):
            mine.append(tokens[sequence])
            history.append(tokens[sequence].token)
    for sequence in sequences:
        backend.close(sequence)
    return said


def same_bits(mine: Sequence[SampledToken], others: Sequence[SampledToken]) -> list[bool]:
    """Of each token whether it is the other and has the very same log-probabilities."""
    return [(a.token, a.logprob) == (b.token, b.logprob) for a, b in zip(mine, others, strict=True)]


def _suspended(
    backend: MLXBackend, sequence: SequenceId, history: Sequence[int], capacity: int
) -> AgentBlocks[LayerData]:
    """A sequence's cache in blocks, as an engine keeps it."""
    spec = backend.cache_spec()
    counts = spec.blocks_for(capacity)
    pool: BlockPool[LayerData] = BlockPool(spec, sum(counts))
    layers = pool.allocate_layers(counts, "agent")
    unused = {block.block_id for block in backend.extract(sequence, layers)}
    blocks = AgentBlocks[LayerData]("agent", token_ids=tuple(history))
    for block in itertools.chain(*layers):
        if block.block_id not in unused:
            blocks.add_block(block)
    return blocks
