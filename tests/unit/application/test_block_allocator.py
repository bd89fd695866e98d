"""Blocks between the pool, requests and idle caches."""

from __future__ import annotations

import pytest

from semantic.application.cache.block_allocator import BlockAllocator
from semantic.application.cache.idle_caches import IdleCaches
from semantic.application.request import Request, StreamingDetokenizer
from semantic.domain.entities import AgentBlocks
from semantic.domain.errors import BackendError, IntegrityError, PoolExhaustedError
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import ModelCacheSpec, SamplingParams
from tests.support.fake_backend import FULL, window
from tests.support.pools import available


class Desk:
    """A allocator with its pool and store, and requests made of plain numbers."""

    def __init__(self, total_blocks: int) -> None:
        self.spec = ModelCacheSpec((FULL, window(300)))
        self.pool = BlockPool(self.spec, total_blocks)
        self.store = IdleCaches(self.pool)
        self.allocator = BlockAllocator(self.pool, self.spec, self.store, "m")
        self.n_requests = 0

    def request(
        self, agent: str, n: int, *, max_tokens: int = 10, cache: AgentBlocks | None = None
    ) -> Request:
        self.n_requests += 1
        return Request(
            uid=f"request-{self.n_requests}",
            number=self.n_requests,
            agent_id=agent,
            prompt=tuple(range(n)),
            max_tokens=max_tokens,
            params=SamplingParams(),
            eos_token_ids=frozenset(),
            detokenizer=StreamingDetokenizer(str),
            given_cache=cache,
        )

    def idle(self, agent: str, n: int) -> AgentBlocks:
        """An idle cache of the tokens 0 to n, put into the store."""
        blocks = AgentBlocks(agent, token_ids=tuple(range(n)), model_id="m")
        for layer in self.pool.allocate_layers(self.spec.blocks_for(n), agent):
            first = max(0, n - 256 * len(layer))
            for i, block in enumerate(layer):
                block.start = first + i * 256
                block.token_count = min(256, n - block.start)
                blocks.add_block(block)
        self.store.put(self.allocator.key(agent), blocks)
        return blocks

    def agents(self) -> list[str]:
        return [key.agent_id for key in self.store.lru_order()]


def test_a_request_gets_blocks_for_its_tokens_and_the_next() -> None:
    desk = Desk(20)
    for n, columns in [(1, 1), (255, 1), (256, 2), (511, 2), (512, 3)]:
        request = desk.request(f"agent {n}", n)
        assert desk.allocator.admit(request)
        assert [len(layer) for layer in request.blocks] == [columns, min(columns, 2)]
        assert request.capacity == columns * 256
        desk.allocator.release(request)
    assert desk.pool.used_blocks == 0


def test_growing_takes_a_block_only_at_a_boundary() -> None:
    desk = Desk(20)
    request = desk.request("a", 250)
    desk.allocator.admit(request)
    taken = []
    for _ in range(8):
        assert desk.allocator.grow(request)
        taken.append(desk.pool.used_blocks)
        request.generated.append(0)
    assert taken == [2, 2, 2, 2, 2, 2, 4, 4]


def test_growing_without_room_changes_nothing() -> None:
    desk = Desk(3)
    request = desk.request("a", 255)
    desk.allocator.admit(request)
    request.generated.append(0)
    assert not desk.allocator.grow(request)
    assert (desk.pool.used_blocks, request.capacity) == (2, 256)
    assert [len(layer) for layer in request.blocks] == [1, 1]


def test_an_idle_cache_of_its_own_is_taken_over() -> None:
    desk = Desk(20)
    idle = desk.idle("a", 300)
    mine = {block.block_id for block in idle.all_blocks()}
    request = desk.request("a", 310)
    assert desk.allocator.admit(request)
    assert request.restore is not None
    assert (request.restore.length, request.restore.exclusive) == (300, True)
    assert {block.block_id for layer in request.blocks for block in layer} == mine
    assert idle.retired
    assert desk.agents() == []
    desk.allocator.unpin(request)
    assert desk.pool.used_blocks == len(mine)


def test_of_two_caches_that_share_alike_its_own_is_taken_over() -> None:
    desk = Desk(20)
    desk.idle("a", 300)
    request = desk.request("a", 310, cache=desk.idle("b", 300))
    assert desk.allocator.admit(request)
    assert request.restore is not None
    assert request.restore.exclusive
    assert desk.agents() == ["b"]


def test_the_cache_of_another_is_pinned_until_it_is_copied() -> None:
    desk = Desk(20)
    idle = desk.idle("a", 300)
    request = desk.request("b", 310, cache=idle)
    assert desk.allocator.admit(request)
    assert request.restore is not None
    assert not request.restore.exclusive
    assert desk.pool.view("b").n_blocks == 8
    desk.store.evict()
    assert idle.retired
    assert desk.pool.is_live(request.restore.blocks.all_blocks())
    desk.allocator.unpin(request)
    assert desk.pool.view("b").n_blocks == 4
    assert desk.pool.used_blocks == 4


def test_a_kept_cache_that_somebody_shares_is_copied() -> None:
    desk = Desk(20)
    idle = desk.idle("a", 300)
    desk.pool.share(idle.all_blocks(), "somebody")
    request = desk.request("a", 310)
    assert desk.allocator.admit(request)
    assert request.restore is not None
    assert not request.restore.exclusive
    assert desk.agents() == ["a"]


def test_a_request_that_did_nothing_gives_its_cache_back() -> None:
    desk = Desk(20)
    desk.idle("a", 300)
    request = desk.request("a", 600)
    desk.allocator.admit(request)
    desk.allocator.give_back(request)
    assert desk.agents() == ["a"]
    kept = desk.store.get(desk.allocator.key("a"))
    assert kept is not None
    assert kept.token_ids == tuple(range(300))
    assert desk.pool.used_blocks == 4
    desk.allocator.check_integrity([])


def test_idle_caches_are_kept_when_dropping_all_would_not_do() -> None:
    desk = Desk(8)
    desk.idle("a", 100)
    desk.idle("b", 100)
    running = desk.request("c", 300)
    assert desk.allocator.admit(running)
    assert available(desk.pool) == 0
    assert not desk.allocator.admit(desk.request("d", 600))
    assert desk.agents() == ["a", "b"]


def test_no_more_idle_caches_are_dropped_than_needed() -> None:
    desk = Desk(6)
    for agent in "abc":
        desk.idle(agent, 100)
    assert desk.allocator.admit(desk.request("d", 300))
    assert desk.agents() == ["c"]


def test_headroom_stays_free_for_the_others() -> None:
    desk = Desk(6)
    request = desk.request("a", 100)
    assert not desk.allocator.admit(request, headroom=2 * 2)
    assert not any(request.blocks)
    assert desk.pool.used_blocks == 0
    assert desk.allocator.admit(request, headroom=1)


def test_a_cache_that_leaves_no_room_is_given_up() -> None:
    desk = Desk(7)
    shared = desk.idle("a", 500)
    desk.pool.allocate(1, 0, "somebody")
    request = desk.request("b", 400, cache=shared)
    assert desk.allocator.admit(request)
    assert request.restore is None
    assert desk.agents() == []


def test_a_refused_admission_puts_an_own_cache_back() -> None:
    desk = Desk(6)
    idle = desk.idle("a", 300)
    desk.pool.allocate(2, 0, "somebody")
    request = desk.request("a", 513)
    assert not desk.allocator.admit(request)
    assert desk.store.get(desk.allocator.key("a")) is idle
    assert not idle.retired
    desk.allocator.check_integrity([request])


def test_what_cannot_end_alone_is_refused() -> None:
    desk = Desk(5)
    desk.allocator.require_capacity(desk.request("a", 700, max_tokens=68), [])
    with pytest.raises(PoolExhaustedError, match=r"^Cannot allocate 6 blocks .*has 5 blocks$"):
        desk.allocator.require_capacity(desk.request("a", 700, max_tokens=69), [])


def test_an_account_that_lost_a_block_is_noticed() -> None:
    desk = Desk(20)
    request = desk.request("a", 300)
    desk.allocator.admit(request)
    desk.allocator.check_integrity([request])
    request.blocks[0].pop()
    with pytest.raises(IntegrityError, match="agent 'a' holds 4 blocks, expected 3"):
        desk.allocator.check_integrity([request])


def test_a_cache_given_back_does_not_replace_a_newer_one() -> None:
    desk = Desk(20)
    desk.idle("a", 300)
    cancelled = desk.request("a", 310)
    desk.allocator.admit(cancelled)
    newer = desk.idle("a", 600)
    desk.allocator.give_back(cancelled)
    assert desk.store.get(desk.allocator.key("a")) is newer


def test_whole_blocks_are_shared_where_layers_can_share_them() -> None:
    desk = Desk(20)
    desk.allocator = BlockAllocator(desk.pool, desk.spec, desk.store, "m", None, (True, False))
    idle = desk.idle("a", 600)
    before = desk.pool.used_blocks
    request = desk.request("b", 700, cache=idle)
    assert desk.allocator.admit(request)
    desk.allocator.unpin(request)
    shared = [block.block_id for block in idle.blocks_for_layer(0)][: 600 // 256]
    assert [block.block_id for block in request.blocks[0]][:2] == shared
    assert [len(layer) for layer in request.blocks] == [3, 2]
    assert desk.pool.used_blocks == before + 1 + 2
    desk.allocator.check_integrity([request])
    desk.allocator.readmit(request)
    assert desk.pool.used_blocks == before + 3 + 2
    desk.allocator.release(request)
    assert desk.pool.used_blocks == before
    desk.allocator.check_integrity([])


def test_a_refused_admission_shares_nothing() -> None:
    desk = Desk(6)
    desk.allocator = BlockAllocator(desk.pool, desk.spec, desk.store, "m", None, (True, False))
    idle = desk.idle("a", 300)
    request = desk.request("b", 513, cache=idle)
    assert not desk.allocator.admit(request, headroom=1)
    assert desk.agents() == ["a"]
    assert desk.pool.used_blocks == 4
    desk.allocator.check_integrity([request])


def test_a_prompt_that_shares_blocks_is_not_computed_again_in_a_full_pool() -> None:
    desk = Desk(8)
    desk.allocator = BlockAllocator(desk.pool, desk.spec, desk.store, "m", None, (True, False))
    request = desk.request("b", 513, cache=desk.idle("a", 512))
    assert desk.allocator.admit(request)
    desk.allocator.unpin(request)
    desk.pool.allocate(1, 0, "somebody")
    with pytest.raises(BackendError, match=r"^cannot compute the prompt again: the pool is full$"):
        desk.allocator.readmit(request)
    desk.allocator.check_integrity([request])
