"""KVBlock, a block of cached tokens, and AgentBlocks, an agent's cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NewType, TypeAlias

BlockData: TypeAlias = object

BlockId = NewType("BlockId", int)
"""A block's number, unique in the process."""


@dataclass(slots=True)
class KVBlock:
    """Up to 256 consecutive tokens of one layer. `start` is the first token's position.
    `layer_data` is None until a backend fills it."""

    block_id: BlockId
    layer_id: int
    token_count: int = 0
    layer_data: BlockData | None = None
    start: int = 0

    @property
    def stop(self) -> int:
        """The position after the block's last token."""
        return self.start + self.token_count


@dataclass(slots=True, eq=False)
class AgentBlocks:
    """One agent's cache: its tokens and, for each layer, the blocks that hold the tokens.

    `owner` is the pool's name for the holder of the blocks. A retired cache is empty.
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
        self._layers.setdefault(block.layer_id, []).append(block)

    def blocks_for_layer(self, layer_id: int) -> Sequence[KVBlock]:
        """Return the layer's blocks in token order; may be empty."""
        return self._layers.get(layer_id, [])

    def token_range(self, layer_id: int) -> range:
        """Return the positions of the tokens that a layer holds."""
        blocks = self.blocks_for_layer(layer_id)
        return range(blocks[0].start, blocks[-1].stop) if blocks else range(0)

    def all_blocks(self) -> Iterable[KVBlock]:
        for blocks in self._layers.values():
            yield from blocks

    @property
    def n_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._layers.values())

    def snapshot(self, agent_id: str | None = None, owner: str | None = None) -> AgentBlocks:
        """Return a copy with the same blocks that stays valid when the original retires."""
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
        """Drop the references to the blocks."""
        self.retired = True
        self._layers = {}
