"""Idle caches in the pool: given back as they were put, the one used longest ago dropped first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantic.application.cache.idle_caches import IdleCaches
from semantic.domain.entities import AgentBlocks
from semantic.domain.identity import NO_HINTS, Hints
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CacheKey, ModelCacheSpec
from tests.support.fake_backend import FULL
from tests.support.fake_clock import FakeClock
from tests.support.lanes import examples
from tests.support.pools import holders

Store = IdleCaches
Pool = BlockPool


class Shelf:
    """A store, the pool its caches lie in, and a way to make caches."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.pool = Pool(ModelCacheSpec((FULL,)), 100)
        self.store = Store(self.pool, clock or FakeClock())

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
    assert holders(shelf.pool) == ("b",)


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


# What agents say of themselves


def told(clock: FakeClock, **hints: Hints) -> Shelf:
    """Caches in the order of `hints`, one second apart."""
    shelf = Shelf(clock)
    for agent, said in hints.items():
        shelf.put(agent, 1)
        shelf.store.heed(key(agent), said)
        clock.advance(1)
    return shelf


def evicted(shelf: Shelf) -> list[str]:
    """All agents, in the order in which their caches are evicted."""
    order = []
    while before := shelf.agents():
        shelf.store.evict()
        order += [agent for agent in before if agent not in shelf.agents()]
        shelf.pool.check_integrity()
    return order


def test_the_cache_of_an_agent_that_is_done_goes_first() -> None:
    shelf = told(FakeClock(), a=NO_HINTS, b=NO_HINTS, c=Hints(done=True), d=Hints(done=True))
    assert evicted(shelf) == ["c", "d", "a", "b"]


def test_an_agent_that_will_be_back_is_evicted_after_the_others_until_then() -> None:
    clock = FakeClock()
    hints = {"a": Hints(back_in=10), "b": NO_HINTS, "c": NO_HINTS}
    assert evicted(told(clock, **hints)) == ["b", "c", "a"]
    shelf = told(clock, **hints)
    clock.advance(60)
    shelf.put("d", 1)
    assert evicted(shelf) == ["b", "c", "a", "d"]  # used, as it were, after 10 s


def test_where_all_will_be_back_the_last_to_return_goes_first() -> None:
    shelf = told(FakeClock(), a=Hints(back_in=9), b=Hints(back_in=90), c=Hints(back_in=20))
    assert evicted(shelf) == ["b", "c", "a"]


def test_an_agent_that_is_away_for_long_is_as_any_other() -> None:
    assert evicted(told(FakeClock(), a=Hints(back_in=301), b=NO_HINTS)) == ["a", "b"]
    assert evicted(told(FakeClock(), a=Hints(back_in=300), b=NO_HINTS)) == ["b", "a"]


def test_a_hint_ends_with_the_agents_next_request() -> None:
    shelf = told(FakeClock(), a=Hints(done=True), b=NO_HINTS)
    shelf.put("a", 1, 2)
    assert evicted(shelf) == ["b", "a"]


def test_a_hint_of_an_agent_without_a_cache_changes_nothing(shelf: Shelf) -> None:
    shelf.store.heed(key("a"), Hints(done=True))
    shelf.put("b", 1)
    shelf.store.heed(key("a"), Hints(back_in=5))
    assert evicted(shelf) == ["b"]


def test_a_hint_of_one_tenant_says_nothing_of_anothers_agent_of_that_name() -> None:
    shelf = told(FakeClock(), a=NO_HINTS, b=NO_HINTS)
    shelf.store.heed(CacheKey("m", "b", "other"), Hints(done=True))
    shelf.store.heed(CacheKey("m", "a", "other"), Hints(back_in=60))
    assert evicted(shelf) == ["a", "b"]


def test_a_tenant_cannot_keep_its_caches_at_the_cost_of_another(shelf: Shelf) -> None:
    for tenant, agent, n_tokens in (("x", "x1", 300), ("x", "x2", 300), ("y", "y1", 400)):
        own = CacheKey("m", agent, tenant)
        shelf.store.put(own, shelf.cache(agent, *range(n_tokens)))
        shelf.store.heed(own, Hints(back_in=60) if tenant == "x" else Hints(done=True))
    # The tenant with most loses first, whatever it said; then it has less than the other.
    assert evicted(shelf) == ["x1", "y1", "x2"]


said = st.sampled_from([NO_HINTS, Hints(done=True), *(Hints(back_in=n) for n in (0, 3, 9, 400))])
visits = st.tuples(st.sampled_from("abcdef"), said, st.integers(0, 4))


@settings(max_examples=examples(50, thorough=500))
@given(todo=st.lists(visits, max_size=20), wait=st.integers(0, 12))
def test_the_order_is_that_of_sorting_all_by_what_was_said(
    todo: list[tuple[str, Hints, int]], wait: int
) -> None:
    clock = FakeClock()
    shelf = Shelf(clock)
    last: dict[str, tuple[float, int, Hints]] = {}
    for number, (agent, hints, seconds) in enumerate(todo):
        shelf.put(agent, 1)
        shelf.store.heed(key(agent), hints)
        last[agent] = clock.now, number, hints
        clock.advance(seconds)
    clock.advance(wait)

    def place(agent: str) -> tuple[int, float, int]:
        at, number, hints = last[agent]
        if hints.done:
            return 0, at, number
        if hints.back_in is None or hints.back_in > 300:
            return 1, at, number
        back = at + hints.back_in
        return (1, back, number) if back <= clock.now else (2, -back, number)

    assert evicted(shelf) == sorted(last, key=place)


def test_caches_are_found_by_a_long_common_beginning_and_tenant(shelf: Shelf) -> None:
    long = tuple(range(1000))
    for agent in "ab":
        shelf.put(agent, *long, ord(agent))
    shelf.put("short", *long[:300])
    assert [one.agent_id for one in shelf.store.alike("", (*long, 7, 8))] == ["b", "a"]
    found = shelf.store.alike("", (*long[:290], *long[:50]))
    assert {one.agent_id for one in found} == {"a", "b", "short"}
    assert shelf.store.alike("", long[:200]) == []
    assert shelf.store.alike("", tuple(reversed(long))) == []
    assert shelf.store.alike("other", long) == []
    shelf.store.take(key("b"))
    assert [one.agent_id for one in shelf.store.alike("", (*long, 7, 8))] == ["a"]


def test_few_of_the_caches_that_begin_alike_are_compared(shelf: Shelf) -> None:
    for i in range(20):
        shelf.put(f"{i}", *range(256), i)
    found = [one.agent_id for one in shelf.store.alike("", range(300))]
    assert found == [f"{i}" for i in range(19, 11, -1)]
