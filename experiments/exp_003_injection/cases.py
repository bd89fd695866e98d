"""The ways in which a cache is injected into mlx-lm's BatchGenerator. Knows no clock, no verdict.

A cache is made by our `ContiguousLayers`; the generator is mlx-lm's, new in each case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator

from experiments import subjects
from semantic.adapters.mlx.kv_cache.contiguous.cache import SequenceCache
from semantic.adapters.mlx.kv_cache.contiguous.layers import ContiguousCache, ContiguousLayers
from semantic.adapters.mlx.kv_cache.forms import LayerCache
from semantic.adapters.mlx.kv_cache.spec_reader import read_shapes, read_spec
from semantic.domain.entities import AgentBlocks
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import ModelCacheSpec, whole_blocks

TEXTS = {
    "short": ("The quick brown fox", 5),
    "long": ("Once upon a time there was a fox. " * 30, 280),
}
"""Text of each prompt, and its length in tokens for a model without a tokenizer."""


def prompts_of(subject: subjects.Subject, new: int) -> dict[str, tuple[int, ...]]:
    """The prompts of `subject`, short enough for answers of `new` tokens."""
    return {
        name: subject.prompt(*text)[: subject.context - 2 * new] for name, text in TEXTS.items()
    }


class Injector:
    """Prepares caches of one model and runs it with them."""

    def __init__(self, model: Module, ragged: Sequence[bool]) -> None:
        spec = read_spec(model)
        if spec is None:
            raise TypeError(f"expected an mlx-lm model, got {type(model).__name__}")
        self.model = model
        self.spec: ModelCacheSpec = spec
        self.caches = ContiguousLayers(model, spec, read_shapes(model), ragged)

    def prefilled(self, tokens: Sequence[int], room: int) -> list[ContiguousCache]:
        """Our caches after `tokens`, computed alone, with room for `room` more."""
        caches = self.caches.empty(whole_blocks(len(tokens) + room))
        self.model(mx.array([list(tokens)]), cache=caches)
        mx.eval([cache.state for cache in caches])
        return caches

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        caches: Sequence[Sequence[LayerCache]],
        max_tokens: int,
    ) -> tuple[list[list[int]], list[list[ContiguousCache]]]:
        """Greedy tokens of each prompt behind its cache, in one batch; and the caches after."""
        generator = BatchGenerator(self.model)
        uids: list[int] = generator.insert(
            [list(prompt) for prompt in prompts],
            max_tokens=[max_tokens] * len(prompts),
            caches=[list(one) for one in caches],
        )
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        ended: dict[int, list[ContiguousCache]] = {}
        while len(ended) < len(uids):
            for response in generator.next_generated():
                tokens[response.uid].append(int(response.token))
                if response.finish_reason is not None:
                    ended[response.uid] = cast("list[ContiguousCache]", response.prompt_cache)
        generator.close()
        return [tokens[uid] for uid in uids], [ended[uid] for uid in uids]

    def to_blocks(self, caches: list[ContiguousCache], tokens: Sequence[int]) -> AgentBlocks:
        """The caches, which hold the first of `tokens`, as an agent's blocks."""
        tokens = tokens[: max(c.offset for c in caches if isinstance(c, SequenceCache))]
        counts = self.spec.blocks_for(whole_blocks(len(tokens)))
        pool = BlockPool(self.spec, total_blocks=sum(counts))
        layers = pool.allocate_layers(counts, "agent")
        unused = {block.block_id for block in self.caches.fill(caches, layers, len(tokens))}
        agent = AgentBlocks("agent", token_ids=tuple(tokens))
        for block in (block for layer in layers for block in layer):
            if block.block_id not in unused:
                agent.add_block(block)
        return agent

    def restored(self, agent: AgentBlocks, length: int, room: int) -> list[ContiguousCache]:
        """New caches with the first `length` tokens of `agent`, which stays as it is."""
        capacity = whole_blocks(length + room)
        return self.caches.restored(agent, length, capacity, exclusive=False)
