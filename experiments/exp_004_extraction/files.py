"""An agent's blocks as one safetensors file, and back. Only for this experiment: no checksums, no
atomic rename. Knows nothing of engines.

Tensor `layer.block.k` is (1, kv_heads, tokens, head_dim); the JSON header lists the tokens of each
block.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import cast

import mlx.core as mx

from semantic.adapters.mlx.kv_cache.contiguous.cache import BufferRange, KVBuffer
from semantic.domain.entities import AgentBlocks
from semantic.domain.services import BlockPool

HEADER = "semantic_agent"


def save(path: Path, agent: AgentBlocks) -> None:
    """Write the agent's blocks; every block must be a range of arrays."""
    tensors: dict[str, mx.array] = {}
    blocks: list[dict[str, int | str]] = []
    for block in agent.all_blocks():
        piece = block.layer_data
        if not isinstance(piece, BufferRange):
            raise TypeError(f"layer {block.layer_id} holds {type(piece).__name__}, no arrays")
        name = f"{block.layer_id}.{len(blocks)}"
        tensors[f"{name}.k"], tensors[f"{name}.v"] = piece.buffer.read(piece.start, piece.stop)
        blocks.append({"layer": block.layer_id, "start": block.start, "name": name})
    header = {
        "agent_id": agent.agent_id,
        "model_id": agent.model_id,
        "token_ids": list(agent.token_ids),
        "blocks": blocks,
    }
    mx.save_safetensors(str(path), tensors, {HEADER: json.dumps(header)})


def load(path: Path, pool: BlockPool) -> AgentBlocks:
    """The agent in `path`, its blocks taken from `pool` in its name; arrays are read at once."""
    tensors, metadata = cast(
        "tuple[dict[str, mx.array], dict[str, str]]", mx.load(str(path), return_metadata=True)
    )
    mx.eval(list(tensors.values()))
    header = json.loads(metadata[HEADER])
    agent = AgentBlocks(
        header["agent_id"], token_ids=tuple(header["token_ids"]), model_id=header["model_id"]
    )
    for kept in header["blocks"]:
        (block,) = pool.allocate(1, kept["layer"], agent.agent_id)
        buffer = KVBuffer(tensors[f"{kept['name']}.k"], tensors[f"{kept['name']}.v"])
        block.start, block.token_count = kept["start"], buffer.capacity
        block.layer_data = BufferRange(buffer, 0, buffer.capacity)
        agent.add_block(block)
    return agent


def digest(agent: AgentBlocks) -> str:
    """Changes with any bit of any key or value, and with the tokens they belong to."""
    found = hashlib.sha256(json.dumps(list(agent.token_ids)).encode())
    for block in agent.all_blocks():
        piece = block.layer_data
        if isinstance(piece, BufferRange):
            for array in piece.buffer.read(piece.start, piece.stop):
                found.update(cast("bytes", memoryview(cast("bytes", mx.contiguous(array)))))
    return found.hexdigest()


def digest_of_first(agent: AgentBlocks, n_tokens: int) -> str:
    """SHA-256 of the keys and values of the first tokens, layer by layer.

    However they are cut into blocks, and whatever follows them.
    """
    found = hashlib.sha256()
    for layer in sorted({block.layer_id for block in agent.all_blocks()}):
        for side in (0, 1):
            pieces = [
                block.layer_data.buffer.read(block.layer_data.start, block.layer_data.stop)[side]
                for block in agent.blocks_for_layer(layer)
                if isinstance(block.layer_data, BufferRange)
            ]
            tokens = mx.concatenate(pieces, axis=2)[:, :, :n_tokens]
            found.update(cast("bytes", memoryview(cast("bytes", mx.contiguous(tokens)))))
    return found.hexdigest()
