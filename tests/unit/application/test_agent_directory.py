"""`ServedAgents` on a real engine: what is shown of agents, and what changes when they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from semantic.adapters.stores.memory import MemoryStore
from semantic.application.agents.footprint import Chains, chain_of
from semantic.application.cache.agent_notes import origin_of
from semantic.domain.block_hash import BlockKey, Part, Scope
from semantic.domain.errors import AgentNotFoundError, BackendError, InvalidRequestError, StoreError
from semantic.domain.identity import Identity
from semantic.domain.match import MatchEnd
from semantic.domain.stored import Manifest, Place
from semantic.ports.agents import AgentDetail, AgentFilter, AgentSummary, Branch
from tests.support.served_agents import AgentsWorld
from tests.support.store_blocks import saved_agents
from tests.unit.application.thread_world import Panic
from tests.unit.application.world import SPECS


@pytest.fixture
def served() -> AgentsWorld:
    return AgentsWorld()


def listed(served: AgentsWorld, tenant: str = "") -> list[AgentSummary]:
    return list(asyncio.run(served.agents.page(tenant, 1000)).agents)


def names(served: AgentsWorld, tenant: str = "") -> list[str]:
    return [one.id for one in listed(served, tenant)]


def shown(served: AgentsWorld, agent: str, tenant: str = "") -> AgentDetail:
    return asyncio.run(served.agents.show(agent, tenant))


def test_nobody_is_there_at_first(served: AgentsWorld) -> None:
    assert listed(served) == []
    with pytest.raises(AgentNotFoundError, match="'ada'"):
        shown(served, "ada")


def test_an_agent_after_its_turn(served: AgentsWorld) -> None:
    served.turn("ada", 600)
    (ada,) = listed(served)
    assert (ada.id, ada.state, ada.turns, ada.pinned, ada.parent) == ("ada", "idle", 1, False, None)
    assert ada.tokens >= 600
    assert ada.blocks == {"pool": 3}
    assert ada.pool_bytes == served.world.pool.used_bytes > 0
    assert ada.n_bytes > 0
    assert ada.shared_bytes == 0
    assert ada.match is not None
    assert (ada.match.prompt_tokens, ada.match.reused_tokens) == (600, 0)
    served.turn("ada", 600)
    (ada,) = listed(served)
    assert ada.match is not None
    assert (ada.turns, ada.match.reused_tokens) == (2, 599)


def test_where_its_blocks_are(served: AgentsWorld) -> None:
    served.turn("ada", 600)
    served.world.engine.idle_caches.evict()
    detail = shown(served, "ada")
    assert detail.summary.blocks == {"memory": 3}
    assert detail.summary.pool_bytes == 0
    assert [(block.start, block.stop) for block in detail.blocks[:2]] == [(0, 256), (256, 512)]
    assert {block.place for block in detail.blocks} == {"memory"}
    assert sum(block.n_bytes for block in detail.blocks) == detail.summary.n_bytes
    assert not any(block.shared for block in detail.blocks)


def test_blocks_that_are_gone_are_missing() -> None:
    class Forgetful(MemoryStore):
        """Has no first blocks any more."""

        def find(self, keys):  # type: ignore[no-untyped-def]  # as the store's
            found = super().find(keys)
            return {key: found[key] for key in list(found)[1:]}

    served = AgentsWorld(Forgetful(64 << 20))
    served.turn("ada", 600)
    served.world.engine.idle_caches.evict()
    assert shown(served, "ada").blocks[0].place == "missing"


def test_who_shares_what(served: AgentsWorld) -> None:
    served.turn("ada", 600)
    served.turn("bob", 520)
    served.turn("eve", 600, first=7)
    ada, eve = shown(served, "ada"), shown(served, "eve")
    assert [block.shared for block in ada.blocks] == [True, True, False]
    shared = sum(block.n_bytes for block in ada.blocks if block.shared)
    assert ada.summary.shared_bytes == shared
    assert eve.summary.shared_bytes == 0
    assert {one.id: one.shared_bytes for one in listed(served)} == {
        "ada": shared, "bob": shared, "eve": 0,
    }  # fmt: skip


def test_states_of_requests(served: AgentsWorld) -> None:
    served.turn("old", 20)
    for number in range(8):
        served.submit(f"other {number}", 20)
    served.submit("ada", 600)
    assert {one.id: one.state for one in listed(served)}["ada"] == "queued"
    states = []
    while served.engine.has_work:
        served.engine.step_once()
        states.append({one.id: one.state for one in listed(served)}["ada"])
    assert sorted(set(states)) == ["decode", "idle", "prefill", "queued"]
    assert names(served)[-1] == "old"
    served.submit("old", 20)
    assert {one.id: one.state for one in listed(served)}["old"] != "idle"


def test_blocks_after_which_a_state_can_be_resumed_are_marked() -> None:
    for kind, stops in (("state", [256, 512, 604]), ("full", [])):
        served = AgentsWorld(layers=SPECS[kind])
        served.turn("ada", 600)
        blocks = shown(served, "ada").blocks
        assert [one.stop for one in blocks if one.checkpoint] == stops


def test_requests_that_run_and_wait_are_listed(served: AgentsWorld) -> None:
    served.turn("ada", 600)
    served.submit("ada", 700)
    served.submit("bob", 20, tenant="other")
    for number in range(8):
        served.submit(f"more {number}", 20)
    seen = set()
    while served.engine.has_work:
        served.engine.step_once()
        found = asyncio.run(served.agents.requests(""))
        for one in found[:1]:
            seen.add((one.agent_id, one.state))
            assert one.agent_id != "ada" or one.prompt_tokens == 700
            assert one.cached_tokens <= one.read_tokens <= one.prompt_tokens
            assert one.seconds >= 0
        everybody = asyncio.run(served.agents.requests(None))
        assert len(everybody) == len(served.engine.requests)
        assert all(one.agent_id != "bob" for one in found)
    assert ("ada", "decode") in seen
    assert asyncio.run(served.agents.requests(None)) == []


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (AgentFilter(), {"sub/a", "sub/b", "c", "d"}),
        (AgentFilter(prefix="sub/"), {"sub/a", "sub/b"}),
        (AgentFilter(pinned=True), {"sub/b"}),
        (AgentFilter(prefix="sub/", pinned=False), {"sub/a"}),
        (AgentFilter(parent="sub/a"), {"d"}),
        (AgentFilter(state="queued"), {"c"}),
        (AgentFilter(state="idle", prefix="c"), set()),
        (AgentFilter(prefix="z"), set()),
    ],
)
def test_pages_have_the_agents_that_are_chosen(
    served: AgentsWorld, only: AgentFilter, expected: set[str]
) -> None:
    for number, name in enumerate(("sub/a", "sub/b", "c")):
        served.turn(name, 20, first=number)
    asyncio.run(served.agents.pin("sub/b", "", pinned=True))
    asyncio.run(served.agents.fork(Branch("sub/a"), ["d"], ""))
    for number in range(8):
        served.submit(f"x {number}", 600, tenant="other")
    served.submit("c", 30, first=2)
    found: list[str] = []
    after, more = None, True
    while more:
        page = asyncio.run(served.agents.page("", 1, after, only))
        found += [one.id for one in page.agents]
        after, more = page.last or (found[-1] if found else None), page.has_more
    assert sorted(found) == sorted(expected)


def test_a_page_of_chosen_agents_reads_no_more_than_it_may_look_at(
    served: AgentsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.turn("wanted", 20)
    (first,) = saved_agents(served.store)
    for number in range(700):
        name = f"wanted {number}" if number in {3, 600} else f"agent {number}"
        served.store.agents.save(replace(first, agent_id=name, saved_at=float(number)))
    read: list[int] = []
    page_of = served.store.agents.page

    def counted(scope: Scope, limit: int, after: Place | None = None) -> Sequence[Manifest]:
        found = page_of(scope, limit, after)
        read.append(len(found))
        return found

    monkeypatch.setattr(served.store, "page", counted)
    found: list[str] = []
    after, more, n_pages = None, True, 0
    while more:
        read.clear()
        page = asyncio.run(served.agents.page("", 20, after, AgentFilter(prefix="wanted")))
        assert sum(read) <= 240
        found += [one.id for one in page.agents]
        after, more, n_pages = page.last, page.has_more, n_pages + 1
    assert found == ["wanted", "wanted 600", "wanted 3"]
    assert n_pages == 4
    read.clear()
    assert not asyncio.run(served.agents.page("", 20, None, AgentFilter(state="decode"))).agents
    assert not read


def test_an_agent_that_runs_is_found_behind_any_number_that_do_not(served: AgentsWorld) -> None:
    served.turn("ada", 20)
    (ada,) = saved_agents(served.store)
    for number in range(400):
        served.store.agents.save(replace(ada, agent_id=f"agent {number}", saved_at=1e12 + number))
    served.submit("ada", 6000)
    served.engine.step_once()
    page = asyncio.run(served.agents.page("", 20, None, AgentFilter(state="prefill")))
    assert [one.id for one in page.agents] == ["ada"]
    assert not page.has_more


def test_an_agent_in_its_first_turn_is_there(served: AgentsWorld) -> None:
    served.submit("ada", 600)
    served.engine.step_once()
    detail = shown(served, "ada")
    assert (detail.summary.tokens, detail.summary.turns, detail.blocks) == (600, 0, ())
    assert detail.summary.last_used is None
    assert detail.summary.pool_bytes > 0
    for refused in (
        served.agents.fork(Branch("ada"), ["bob"], ""),
        served.agents.pin("ada", "", pinned=True),
        served.agents.forget("ada", ""),
    ):
        with pytest.raises(InvalidRequestError, match="'ada'"):
            asyncio.run(refused)
    served.world.finish()
    assert names(served) == ["ada"]


def test_agents_are_a_tree(served: AgentsWorld) -> None:
    main = Identity("s", "claude-code")
    subs = [Identity("s", "claude-code", agent, main.name) for agent in ("a", "b")]
    for one in (main, subs[1]):
        served.turn(one.name, 300, note=origin_of(one, None).note())
    served.submit(subs[0].name, 20, note=origin_of(subs[0], None).note())
    asyncio.run(served.agents.fork(Branch(main.name), ["copy"], ""))
    children = ("claude-code/s/a", "claude-code/s/b", "copy")
    found = {one.id: one for one in listed(served)}
    assert {name: one.children for name, one in found.items()} == {
        main.name: children, **dict.fromkeys(children, ()),
    }  # fmt: skip
    assert {(one.session, one.client) for one in found.values()} == {("s", "claude-code")}
    assert {found[name].parent for name in children} == {main.name}
    for name, summary in found.items():
        assert shown(served, name).summary == summary
    served.world.finish()
    found[subs[0].name] = listed(served)[0]
    assert (found[subs[0].name].parent, found[subs[0].name].state) == (main.name, "idle")
    assert shown(served, main.name).summary.children == children


def test_an_agent_of_another_tenant_is_nobodys_child(served: AgentsWorld) -> None:
    main, sub = Identity("s"), Identity("t", "", None, "session/s")
    served.turn(main.name, 300, note=origin_of(main, None).note())
    served.turn(sub.name, 300, tenant="eve", note=origin_of(sub, None).note())
    assert listed(served)[0].children == ()
    assert listed(served, "eve")[0].parent == main.name


def test_why_a_prompt_was_computed(served: AgentsWorld) -> None:
    served.turn("ada", 600)
    served.turn("ada", 600, first=1)
    match = shown(served, "ada").match
    assert match is not None
    assert (match.end, match.differs_at, match.expected, match.got) == (MatchEnd.DIVERGED, 0, 0, 1)


# Changes


def test_a_fork_begins_with_all_that_there_was(served: AgentsWorld) -> None:
    served.turn("ada", 600)
    (forked,) = asyncio.run(served.agents.fork(Branch("ada"), ["team/bob"], ""))
    assert (forked.id, forked.parent, forked.pinned) == ("team/bob", "ada", False)
    assert forked.tokens == shown(served, "ada").summary.tokens
    assert forked.shared_bytes == forked.n_bytes
    served.turn("team/bob", 600)
    match = shown(served, "team/bob").summary.match
    assert match is not None
    assert match.reused_tokens == 599
    served.world.check()


@pytest.mark.parametrize("new", ["ada", "bob", "eve", "", "a\nb", "x" * 257, "\ud800"])
def test_a_fork_needs_a_new_name(served: AgentsWorld, new: str) -> None:
    served.turn("ada", 20)
    served.turn("bob", 20)
    served.submit("eve", 20)
    with pytest.raises(InvalidRequestError):
        asyncio.run(served.agents.fork(Branch("ada"), [new], ""))
    assert sorted(names(served)) == ["ada", "bob", "eve"]


def test_pins_last(served: AgentsWorld) -> None:
    served.turn("ada", 600)
    assert asyncio.run(served.agents.pin("ada", "", pinned=True)).pinned
    served.turn("ada", 700)
    assert shown(served, "ada").summary.pinned
    assert not asyncio.run(served.agents.pin("ada", "", pinned=False)).pinned


def test_only_turns_are_counted_as_turns(served: AgentsWorld) -> None:
    served.turn("ada", 600)
    for pinned in (True, False):
        asyncio.run(served.agents.pin("ada", "", pinned=pinned))
    (forked,) = asyncio.run(served.agents.fork(Branch("ada"), ["bob"], ""))
    assert forked.turns == 0
    served.turn("ada", 700)
    served.turn("bob", 700)
    assert shown(served, "ada").summary.turns == 2
    assert shown(served, "bob").summary.turns == 1


def test_a_pin_that_comes_while_a_request_runs_is_not_lost(served: AgentsWorld) -> None:
    served.turn("ada", 600)
    served.submit("ada", 700)
    served.engine.step_once()
    asyncio.run(served.agents.pin("ada", "", pinned=True))
    served.world.finish()
    assert shown(served, "ada").summary.pinned


def test_a_store_that_cannot_save_is_told() -> None:
    class Full(MemoryStore):
        """Has no room for pins."""

        def save(self, manifest: Manifest) -> bool:
            return not manifest.pinned and super().save(manifest)

    served = AgentsWorld(Full(64 << 20))
    served.turn("ada", 20)
    with pytest.raises(StoreError):
        asyncio.run(served.agents.pin("ada", "", pinned=True))
    assert not shown(served, "ada").summary.pinned


def test_what_is_forgotten_is_gone(served: AgentsWorld) -> None:
    served.turn("ada", 600)
    asyncio.run(served.agents.forget("ada", ""))
    assert listed(served) == []
    assert served.world.pool.used_bytes == 0
    with pytest.raises(AgentNotFoundError):
        asyncio.run(served.agents.forget("ada", ""))


# Tenants


def test_a_tenant_sees_its_own_agents_only(served: AgentsWorld) -> None:
    served.turn("ada", 600, tenant="a")
    served.submit("bob", 600, tenant="a", first=7)
    served.turn("ada", 20, tenant="b")
    assert sorted(names(served, "a")) == ["ada", "bob"]
    assert names(served, "b") == ["ada"]
    assert names(served) == []
    assert shown(served, "ada", "b").summary.tokens < 600
    assert shown(served, "ada", "a").summary.shared_bytes == 0
    for tenant in ("b", "", "c"):
        for refused in (
            served.agents.show("bob", tenant),
            served.agents.fork(Branch("bob"), ["eve"], tenant),
            served.agents.pin("bob", tenant, pinned=True),
            served.agents.forget("bob", tenant),
        ):
            with pytest.raises(AgentNotFoundError):
                asyncio.run(refused)
    asyncio.run(served.agents.fork(Branch("ada"), ["bob"], "b"))
    asyncio.run(served.agents.forget("ada", "b"))
    assert names(served, "b") == ["bob"]
    assert sorted(names(served, "a")) == ["ada", "bob"]


def test_agents_of_another_model_are_not_listed(served: AgentsWorld) -> None:
    served.turn("ada", 20)
    (ada,) = saved_agents(served.store)
    served.store.agents.save(replace(ada, scope=Scope(bytes(32), ada.scope.tenant), agent_id="bob"))
    assert names(served) == ["ada"]


# Chains


def test_chains_are_remembered_within_bounds() -> None:
    scope = Scope(bytes(32), bytes(32))
    chains = Chains(max_blocks=5)
    agents = [
        Manifest(scope, f"a{n}", tuple(range(n, n + 600)), generation=1, saved_at=n)
        for n in range(4)
    ]
    for _ in range(2):
        for agent in agents:
            assert chains.of(agent) == chain_of(agent)
    assert chains.of(agents[3]) is chains.of(agents[3])
    again = replace(agents[3], token_ids=tuple(range(900)))
    assert chains.of(again) == chain_of(again)
    assert chains.of(replace(again, token_ids=())) == ()
    long = replace(again, agent_id="long", token_ids=tuple(range(3000)))
    assert len(chains.of(long)) == 12
    link = next(scope.chain(long.token_ids))
    assert chain_of(long)[0].key(Part.FULL) == BlockKey(link.hash, Part.FULL)


def test_a_panic_on_a_worker_fails_one_call_and_not_the_loop() -> None:
    served = AgentsWorld()
    served.turn("ada", 300)

    async def calls() -> list[str]:
        with pytest.raises(BackendError, match="Panic: out of range"):
            await served.agents._work("", panics)
        return [one.id for one in (await served.agents.page("", 5)).agents]

    assert asyncio.run(calls()) == ["ada"]


def panics() -> None:
    raise Panic("out of range")
