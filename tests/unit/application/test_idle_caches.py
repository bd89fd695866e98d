"""Idle caches in the pool: given back as they were put, the one used longest ago dropped first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantic.application.cache.idle_caches import IdleCaches
from semantic.domain.entities import AgentBlocks
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CacheKey, ModelCacheSpec
from tests.support.fake_backend import FULL
from tests.support.lanes import examples

Store = IdleCaches
Pool = BlockPool


class Shelf:
    """A store, the pool its caches lie in, and a way to make caches."""

    def __init__(self) -> None:
        self.pool = Pool(ModelCacheSpec((FULL,)), 100)
        self.store = Store(self.pool)

    def cache(self, agent: str, *tokens: int) -> AgentBlocks:
        blocks = AgentBlocks(agent, token_ids=tokens, model_id="m")
        for block in self.pool.allocate(2, 0, agent):
            block.layer_data = f"{agent} {tokens}"
            blocks.add_block(block)
        return blocks

    def put(self, agent: str, *tokens: int, model: str = "m") -> AgentBlocks:
        blocks = self.cache(agent, *tokens)
        self.store.put(CacheKey(model, agent), blocks)
        return blocks

    def agents(self) -> list[str]:
        return [key.agent_id for key in self.store.lru_order()]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def key(agent: str, model: str = "m") -> CacheKey:
    return CacheKey(model, agent)


def test_an_empty_store_has_nothing(shelf: Shelf) -> None:
    assert shelf.store.get(key("a")) is None
    assert shelf.store.take(key("a")) is None
    assert shelf.store.lru_order() == ()
    assert shelf.store.evict() is False


def test_a_cache_comes_back_with_its_tokens_and_data(shelf: Shelf) -> None:
    shelf.put("a", 1, 2, 3)
    found = shelf.store.get(key("a"))
    assert found is not None
    assert not found.retired
    assert (found.agent_id, found.token_ids, found.model_id) == ("a", (1, 2, 3), "m")
    assert [block.layer_data for block in found.all_blocks()] == ["a (1, 2, 3)"] * 2


def test_looking_leaves_a_cache_where_it_is(shelf: Shelf) -> None:
    shelf.put("a", 1)
    assert shelf.store.get(key("a")) is not None
    assert shelf.store.get(key("a")) is not None
    assert shelf.agents() == ["a"]


def test_taking_forgets_the_cache_but_not_its_blocks(shelf: Shelf) -> None:
    shelf.put("a", 1)
    taken = shelf.store.take(key("a"))
    assert taken is not None
    assert not taken.retired
    assert shelf.store.get(key("a")) is None
    assert shelf.pool.is_live(taken.all_blocks())
    assert shelf.pool.view("a").n_blocks == 2


def test_a_newer_cache_replaces_the_older_and_its_blocks_return(shelf: Shelf) -> None:
    older = shelf.put("a", 1)
    shelf.put("a", 1, 2)
    found = shelf.store.get(key("a"))
    assert found is not None
    assert found.token_ids == (1, 2)
    assert older.retired
    assert shelf.pool.used_blocks == 2
    assert shelf.agents() == ["a"]


def test_putting_the_same_cache_again_keeps_it(shelf: Shelf) -> None:
    blocks = shelf.put("a", 1)
    shelf.store.put(key("a"), blocks)
    assert not blocks.retired
    assert shelf.pool.used_blocks == 2


def test_models_do_not_share_caches(shelf: Shelf) -> None:
    shelf.put("a", 1, model="m")
    shelf.put("a", 2, model="n")
    ours, theirs = shelf.store.get(key("a")), shelf.store.get(key("a", "n"))
    assert ours is not None
    assert theirs is not None
    assert (ours.token_ids, theirs.token_ids) == ((1,), (2,))
    assert shelf.store.take(key("a", "n")) is theirs
    assert shelf.store.get(key("a")) is ours


def test_the_cache_used_longest_ago_goes_first(shelf: Shelf) -> None:
    caches = [shelf.put(agent, 1) for agent in "abc"]
    shelf.put("a", 1, 2)
    assert shelf.agents() == ["b", "c", "a"]
    assert shelf.store.evict()
    assert shelf.agents() == ["c", "a"]
    assert caches[1].retired
    assert not caches[2].retired
    assert shelf.pool.view("b").n_blocks == 0


def test_the_tenant_with_most_loses_first(shelf: Shelf) -> None:
    for tenant, agent, n_tokens in (("b", "b1", 300), ("a", "a1", 300), ("a", "a2", 200)):
        shelf.store.put(CacheKey("m", agent, tenant), shelf.cache(agent, *range(n_tokens)))
    order = []
    while shelf.agents():
        order.append(shelf.agents())
        assert shelf.store.evict()
    assert order == [["b1", "a1", "a2"], ["b1", "a2"], ["a2"]]


def test_a_store_can_be_emptied(shelf: Shelf) -> None:
    for agent in "abc":
        shelf.put(agent, 1)
    assert [shelf.store.evict() for _ in range(4)] == [True, True, True, False]
    assert shelf.pool.used_blocks == 0


def test_an_evicted_cache_whose_blocks_others_hold_leaves_them(shelf: Shelf) -> None:
    blocks = shelf.put("a", 1)
    held = list(blocks.all_blocks())
    shelf.pool.share(held, "b")
    shelf.store.evict()
    assert shelf.pool.is_live(held)
    assert shelf.pool.holders() == ("b",)


commands = st.tuples(st.sampled_from(["put", "take", "evict", "get"]), st.sampled_from("abc"))


@settings(max_examples=examples(50, thorough=500))
@given(todo=st.lists(commands, max_size=30))
def test_a_store_is_a_dictionary_in_order_of_use(todo: list[tuple[str, str]]) -> None:
    shelf = Shelf()
    expected: dict[str, tuple[int, ...]] = {}
    for i, (command, agent) in enumerate(todo):
        match command:
            case "put":
                shelf.put(agent, i)
                expected.pop(agent, None)
                expected[agent] = (i,)
            case "take":
                taken = shelf.store.take(key(agent))
                assert (taken and taken.token_ids) == expected.pop(agent, None)
                if taken is not None:
                    shelf.pool.free(taken.all_blocks(), agent)
            case "evict":
                assert shelf.store.evict() == bool(expected)
                if expected:
                    del expected[next(iter(expected))]
            case _:
                found = shelf.store.get(key(agent))
                assert (found and found.token_ids) == expected.get(agent)
        assert shelf.agents() == list(expected)
        assert shelf.pool.used_blocks == 2 * len(expected)
        shelf.pool.check_integrity()
