"""Blocks and chains of blocks."""

from __future__ import annotations

import pytest

from semantic.domain.entities import AgentBlocks, BlockId, KVBlock


def block(number: int, layer: int, start: int = 0, count: int = 256) -> KVBlock:
    return KVBlock(BlockId(number), layer, count, f"kv{number}", start)


def two_layers() -> AgentBlocks:
    blocks = AgentBlocks(agent_id="a", token_ids=tuple(range(300)), model_id="m")
    for one in (block(0, 0), block(1, 1, 44), block(2, 0, 256, 44)):
        blocks.add_block(one)
    return blocks


def test_a_block_ends_after_its_last_token() -> None:
    assert block(0, 0, start=512, count=44).stop == 556


def test_a_block_has_no_data_until_a_backend_fills_it() -> None:
    empty = KVBlock(BlockId(1), 0)
    assert (empty.token_count, empty.start, empty.layer_data) == (0, 0, None)


def test_layers_may_hold_different_tokens() -> None:
    blocks = two_layers()
    assert blocks.token_range(0) == range(300)
    assert blocks.token_range(1) == range(44, 300)
    assert blocks.token_range(2) == range(0)


def test_blocks_of_a_layer_come_in_the_order_they_were_added() -> None:
    blocks = two_layers()
    assert [b.block_id for b in blocks.blocks_for_layer(0)] == [0, 2]
    assert [b.block_id for b in blocks.blocks_for_layer(7)] == []
    assert sorted(b.block_id for b in blocks.all_blocks()) == [0, 1, 2]
    assert blocks.n_blocks == 3


def test_the_token_ids_say_how_many_tokens_there_are() -> None:
    assert two_layers().total_tokens == 300
    assert AgentBlocks("a", total_tokens=3, token_ids=(1, 2, 3)).total_tokens == 3


def test_a_wrong_total_is_refused() -> None:
    with pytest.raises(ValueError, match="total_tokens is 4 but 3 token ids"):
        AgentBlocks("a", total_tokens=4, token_ids=(1, 2, 3))


def test_tokens_may_be_counted_without_being_known() -> None:
    assert AgentBlocks(agent_id="a", total_tokens=512).total_tokens == 512


def test_retiring_lets_go_of_every_block() -> None:
    blocks = two_layers()
    blocks.retire()
    assert blocks.retired
    assert blocks.n_blocks == 0
    assert blocks.token_range(0) == range(0)


def test_a_snapshot_outlives_the_original() -> None:
    blocks = two_layers()
    copy = blocks.snapshot()
    blocks.retire()
    assert not copy.retired
    assert (copy.agent_id, copy.total_tokens, copy.model_id) == ("a", 300, "m")
    assert copy.token_ids == tuple(range(300))
    assert [b.block_id for b in copy.blocks_for_layer(0)] == [0, 2]


def test_a_snapshot_grows_alone() -> None:
    blocks = two_layers()
    copy = blocks.snapshot()
    copy.add_block(block(9, 0, 300, 1))
    assert (copy.n_blocks, blocks.n_blocks) == (4, 3)


def test_chains_are_told_apart_by_identity() -> None:
    assert two_layers() != two_layers()
