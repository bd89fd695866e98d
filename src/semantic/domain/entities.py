"""Entities: a block of cached tokens, and an agent's chain of blocks.

A block says which tokens of which layer it stands for; what holds their keys and values
(`layer_data`) belongs to a backend and is opaque here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NewType, TypeAlias

BlockData: TypeAlias = object
"""What a backend keeps in a block: opaque here, and only the backend that put it there reads it."""

BlockId = NewType("BlockId", int)
"""A block's number. Never given twice, so a stale or foreign reference is always noticed."""


@dataclass(slots=True)
class KVBlock:
    """Up to 256 consecutive tokens of one layer.

    `start` is the position of its first token in the sequence, `token_count` how many tokens
    it holds; `layer_data` is None until a backend has filled it.
    """

    block_id: BlockId
    layer_id: int
    token_count: int = 0
    layer_data: BlockData | None = None
    start: int = 0

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + self.token_count


@dataclass(slots=True, eq=False)
class AgentBlocks:
    """One agent's cache: the tokens it covers and, per layer, the blocks that hold them.

    Layers may hold different ranges: a sliding-window layer holds only the last tokens.
    `model_id` names the model that computed it, `owner` in whose name the pool holds its blocks
    (the agent's id when nothing else is said). A retired one has handed its blocks on (to the
    agent's next request, or back to the pool) and is empty; it may still be passed as a cache,
    it just saves nothing.
    """

    agent_id: str
    total_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    model_id: str = ""
    owner: str = ""
    retired: bool = False
    _layers: dict[int, list[KVBlock]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owner = self.owner or self.agent_id
        if self.token_ids:
            if self.total_tokens not in (0, len(self.token_ids)):
                raise ValueError(
                    f"total_tokens is {self.total_tokens} but {len(self.token_ids)} token ids given"
                )
            self.total_tokens = len(self.token_ids)

    def add_block(self, block: KVBlock) -> None:
        """Append `block` to its layer's chain."""
        self._layers.setdefault(block.layer_id, []).append(block)

    def blocks_for_layer(self, layer_id: int) -> Sequence[KVBlock]:
        """The layer's blocks in token order; empty when it holds none."""
        return self._layers.get(layer_id, [])

    def token_range(self, layer_id: int) -> range:
        """Positions of the tokens that layer `layer_id` holds."""
        blocks = self.blocks_for_layer(layer_id)
        return range(blocks[0].start, blocks[-1].stop) if blocks else range(0)

    def all_blocks(self) -> Iterable[KVBlock]:
        """Every block of every layer."""
        for blocks in self._layers.values():
            yield from blocks

    @property
    def n_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._layers.values())

    def snapshot(self, agent_id: str | None = None, owner: str | None = None) -> AgentBlocks:
        """The same blocks in a chain of their own, untouched when this one retires.

        In another agent's name when there is one.
        """
        copy = AgentBlocks(
            self.agent_id if agent_id is None else agent_id,
            self.total_tokens,
            self.token_ids,
            self.model_id,
            self.owner if owner is None else owner,
        )
        for block in self.all_blocks():
            copy.add_block(block)
        return copy

    def retire(self) -> None:
        """Let go of the blocks: they belong to someone else now, or to nobody."""
        self.retired = True
        self._layers = {}
