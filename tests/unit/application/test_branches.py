"""Checkpoints, forks, families and differences of agents."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

from semantic.adapters.stores.memory import MemoryStore
from semantic.application.agents.branches import as_of, checkpoint_id, family
from semantic.application.cache.agent_notes import note_of
from semantic.application.chat.transcript import messages_in, transcript_of
from semantic.domain.block_hash import BlockKey, Part, Scope
from semantic.domain.chat import Message
from semantic.domain.errors import AgentNotFoundError, InvalidRequestError, StoreError
from semantic.domain.request_parts import Named, Parts
from semantic.domain.stored import Found, Manifest, TurnEnd
from semantic.ports.agents import Branch, Checkpoints
from tests.support.served_agents import AgentsWorld

T = TypeVar("T")


@pytest.fixture
def served() -> AgentsWorld:
    found = AgentsWorld()
    for n in (300, 600, 900):
        found.turn("ada", n)
    return found


def run(work: Coroutine[object, object, T]) -> T:
    return asyncio.run(work)


def names(served: AgentsWorld) -> list[str]:
    return sorted(one.id for one in run(served.agents.page("", 100)).agents)


def saved(served: AgentsWorld, agent: str) -> Manifest:
    return run(served.agents.saved(agent, ""))


def checkpoint(served: AgentsWorld, name: str, turn: int | None = None) -> None:
    run(served.agents.checkpoint(Branch("ada", turn=turn), name, "", pinned=False))


def reused(served: AgentsWorld, agent: str) -> int:
    """How many tokens of its last prompt came from a cache."""
    match = saved(served, agent).match
    assert match is not None
    return match.reused_tokens


def listed(served: AgentsWorld, agent: str = "ada") -> Checkpoints:
    return run(served.agents.checkpoints(agent, ""))


# Turns


def test_a_history_knows_its_turns(served: AgentsWorld) -> None:
    ends = saved(served, "ada").turn_ends
    # A prompt of this world leaves the answer before it, so a turn's end is in no later history.
    assert ends == (TurnEnd(900, len(saved(served, "ada").token_ids)),)
    tokens = saved(served, "ada").token_ids
    served.engine.submit("ada", [*tokens, 1, 2, 3], max_tokens=4)
    served.world.finish()
    last = saved(served, "ada")
    assert last.turn_ends == (*ends, TurnEnd(len(tokens) + 3, len(last.token_ids)))
    served.engine.submit("ada", tokens, max_tokens=4)
    served.world.finish()
    assert saved(served, "ada").earlier == ends


def test_a_turn_of_another_history_is_not_kept(served: AgentsWorld) -> None:
    served.turn("ada", 500, first=3)
    assert saved(served, "ada").earlier == ()


def talk(served: AgentsWorld, agent: str, n_turns: int) -> list[tuple[int, ...]]:
    """Turns that each continue the last; the history after each."""
    found: list[tuple[int, ...]] = []
    for turn in range(n_turns):
        before = found[-1] if found else tuple(range(30)) * 10
        served.engine.submit(agent, [*before, turn, turn], max_tokens=4)
        served.world.finish()
        found.append(saved(served, agent).token_ids)
    return found


def test_a_checkpoint_at_a_turn_has_the_history_of_that_turn(served: AgentsWorld) -> None:
    histories = talk(served, "bob", 4)
    for turn in (1, 2, 4):
        branch = Branch("bob", turn=turn)
        one = run(served.agents.checkpoint(branch, f"turn {turn}", "", pinned=False))
        assert (one.id, one.tokens) == (f"turn {turn}", len(histories[turn - 1]))
        at = saved(served, checkpoint_id("bob", f"turn {turn}"))
        assert at.token_ids == histories[turn - 1]
        assert len(at.turn_ends) == turn
    assert [one.tokens for one in listed(served, "bob").turns] == list(map(len, histories))
    for wrong in (0, 5, -1):
        with pytest.raises(InvalidRequestError, match=r"turn must be 1 to 4, .*, got"):
            run(served.agents.fork(Branch("bob", turn=wrong), ["x"], ""))


def test_the_conversation_of_an_earlier_turn() -> None:
    asked = [Message("user" if i % 2 == 0 else "assistant", f"{i}") for i in range(7)]
    note = note_of("", None, transcript_of(asked))
    ends = tuple(TurnEnd(10 * i + 5, 10 * i + 9) for i in range(3))
    agent = Manifest(
        Scope(b"n" * 32, b"t" * 32),
        "a",
        tuple(range(50)),
        prompt_tokens=45,
        note=note,
        earlier=ends,
    )
    assert as_of(agent, 4) is agent
    for turn in (1, 2, 3):
        found = as_of(agent, turn)
        assert messages_in(found.note) == tuple(asked[: 2 * turn - 1])
        assert (len(found.token_ids), found.prompt_tokens) == (10 * turn - 1, 10 * turn - 5)
    # A client that sent only a part of the conversation: the rest is unknown.
    short = replace(agent, note=note_of("", None, transcript_of(asked[:1])))
    assert messages_in(as_of(short, 2).note) is None


# Checkpoints


def test_a_checkpoint_stays_while_its_agent_goes_on(served: AgentsWorld) -> None:
    before = saved(served, "ada").token_ids
    checkpoint(served, "plan")
    served.turn("ada", 1200)
    (plan,) = listed(served).saved
    assert (plan.id, plan.tokens, plan.parent) == ("plan", len(before), "ada")
    assert saved(served, checkpoint_id("ada", "plan")).token_ids == before
    assert plan.n_bytes > 0
    # It is no agent of its own.
    assert names(served) == ["ada"]
    assert run(served.agents.show("ada", "")).summary.children == ()
    page = run(served.agents.page("", 1))
    assert (len(page.agents), page.has_more) == (1, False)


def test_a_checkpoint_needs_a_new_name_and_an_agent_with_a_turn(served: AgentsWorld) -> None:
    checkpoint(served, "plan")
    with pytest.raises(InvalidRequestError, match="name: agent 'ada' has a checkpoint 'plan'"):
        checkpoint(served, "plan")
    for bad in ("", "a\nb", "\x1e", "x" * 257):
        with pytest.raises(InvalidRequestError, match="name must have 1 to 256 printable"):
            checkpoint(served, bad)
    with pytest.raises(AgentNotFoundError):
        run(served.agents.checkpoint(Branch("eve"), "plan", "", pinned=False))
    with pytest.raises(AgentNotFoundError, match="'plan'"):
        run(served.agents.restore("ada", "other", ""))
    with pytest.raises(AgentNotFoundError):
        listed(served, "eve")
    with pytest.raises(AgentNotFoundError):
        run(served.agents.checkpoints("ada", "another tenant"))


def test_a_checkpoint_that_does_not_last_is_none() -> None:
    served = AgentsWorld(durable=MemoryStore(64 << 20))
    served.turn("ada", 300)
    with pytest.raises(StoreError, match="cannot keep checkpoint 'plan': the store dropped it"):
        checkpoint(served, "plan")
    assert listed(served).saved == ()


def test_an_agent_goes_back_to_its_checkpoint(served: AgentsWorld) -> None:
    run(served.agents.pin("ada", "", pinned=True))
    before = saved(served, "ada")
    checkpoint(served, "plan")
    served.turn("ada", 1200)
    back = run(served.agents.restore("ada", "plan", ""))
    assert (back.id, back.tokens, back.pinned) == ("ada", len(before.token_ids), True)
    assert saved(served, "ada").token_ids == before.token_ids
    served.engine.submit("ada", [*before.token_ids, 1, 2], max_tokens=4)
    served.world.finish()
    assert reused(served, "ada") == len(before.token_ids)
    assert saved(served, "ada").earlier == before.turn_ends
    # Again, after the agent is forgotten by mistake: only its checkpoint is left to tell.
    assert [one.id for one in listed(served).saved] == ["plan"]


def test_an_agent_with_a_request_is_not_restored(served: AgentsWorld) -> None:
    checkpoint(served, "plan")
    served.submit("ada", 1300)
    with pytest.raises(InvalidRequestError, match="has a request"):
        run(served.agents.restore("ada", "plan", ""))
    served.world.finish()


def test_a_forgotten_agent_takes_its_checkpoints_along(served: AgentsWorld) -> None:
    checkpoint(served, "plan")
    checkpoint(served, "other")
    run(served.agents.delete_checkpoint("ada", "other", ""))
    assert [one.id for one in listed(served).saved] == ["plan"]
    assert run(served.agents.forget("ada", "")) == ["ada"]
    with pytest.raises(AgentNotFoundError):
        listed(served)
    assert served.store.agents.scopes() == []


def test_a_checkpoint_outlives_an_evicted_agent(served: AgentsWorld) -> None:
    checkpoint(served, "plan")
    tokens = saved(served, "ada").token_ids
    scope = saved(served, "ada").scope
    served.store.agents.remove(scope, "ada")
    served.world.forget_all()
    assert listed(served).turns == ()
    assert run(served.agents.restore("ada", "plan", "")).tokens == len(tokens)
    assert run(served.agents.forget("ada", "")) == ["ada"]
    assert served.store.agents.scopes() == []


# Forks


def test_several_forks_of_a_checkpoint_reuse_its_history(served: AgentsWorld) -> None:
    before = saved(served, "ada").token_ids
    checkpoint(served, "plan")
    served.turn("ada", 1200)
    new = [f"sub-{i}" for i in range(3)]
    forks = run(served.agents.fork(Branch("ada", "plan"), new, ""))
    assert [(one.id, one.parent, one.tokens) for one in forks] == [
        (name, "ada", len(before)) for name in new
    ]
    for i, name in enumerate(new):
        served.engine.submit(name, [*before, i, i], max_tokens=4)
    served.world.finish()
    assert {reused(served, name) for name in new} == {len(before)}


@pytest.mark.parametrize("bad", [[], ["a", "a"], ["a", "ada"], ["a", ""], ["x"] * 257])
def test_all_forks_are_made_or_none(served: AgentsWorld, bad: list[str]) -> None:
    with pytest.raises(InvalidRequestError):
        run(served.agents.fork(Branch("ada"), bad, ""))
    assert names(served) == ["ada"]


def test_a_fork_of_an_unknown_checkpoint_is_none(served: AgentsWorld) -> None:
    with pytest.raises(AgentNotFoundError, match="no checkpoint 'plan'; it has none"):
        run(served.agents.fork(Branch("ada", "plan"), ["a"], ""))
    assert names(served) == ["ada"]


# Families


def test_a_family_is_shown_and_forgotten_as_one(served: AgentsWorld) -> None:
    run(served.agents.fork(Branch("ada"), ["b", "a"], ""))
    run(served.agents.fork(Branch("a"), ["a1"], ""))
    served.turn("other", 20, first=9)
    run(served.agents.checkpoint(Branch("a1"), "mark", "", pinned=False))
    found = run(served.agents.family("ada", ""))
    assert [(one.id, depth) for one, depth in found] == [("ada", 0), ("a", 1), ("a1", 2), ("b", 1)]
    assert run(served.agents.forget("a", "", family=True)) == ["a", "a1"]
    assert names(served) == ["ada", "b", "other"]
    with pytest.raises(AgentNotFoundError):
        listed(served, "a1")
    with pytest.raises(AgentNotFoundError):
        run(served.agents.family("eve", ""))


def test_a_family_with_a_request_is_left_whole(served: AgentsWorld) -> None:
    run(served.agents.fork(Branch("ada"), ["a"], ""))
    served.submit("a", 1000)
    with pytest.raises(InvalidRequestError, match="agent 'a' has a request"):
        run(served.agents.forget("ada", "", family=True))
    assert names(served) == ["a", "ada"]
    served.world.finish()


def test_a_family_that_turns_in_a_circle_ends() -> None:
    children = {"a": ["b"], "b": ["a", "c"], "c": ["b"]}
    assert list(family(children.__getitem__, "a")) == [("a", 0), ("b", 1), ("c", 2)]


# Differences


def test_where_and_why_two_branches_part(served: AgentsWorld) -> None:
    run(served.agents.fork(Branch("ada"), ["a", "b"], ""))
    tokens = saved(served, "ada").token_ids
    for name, last in (("a", 7), ("b", 8)):
        parts = Parts((Named("effort", str(last)),), (), (), 0, 0)
        served.engine.submit(name, [*tokens, last, 1], max_tokens=4, note=note_of("", parts))
        served.world.finish()
    found = run(served.agents.compare("a", "b", ""))
    assert (found.common_tokens, found.expected, found.got) == (len(tokens), 7, 8)
    assert found.shared_blocks == len(tokens) // 256
    assert found.part is not None
    assert found.part.name == "effort"
    same = run(served.agents.compare("ada", "ada", ""))
    assert (same.expected, same.got, same.common_tokens) == (None, None, len(tokens))
    assert same.shared_blocks == -(-len(tokens) // 256)
    longer = run(served.agents.compare("ada", "a", ""))
    assert (longer.expected, longer.got, longer.part) == (None, 7, None)


# Turns that the pool has


def test_a_turn_in_the_pool_looks_for_stored_blocks_only_when_it_saves() -> None:
    store = MemoryStore(64 << 20)
    served = AgentsWorld(store)
    served.turn("ada", 600)
    keys = [
        link.key(part)
        for link in saved(served, "ada").scope.chain(saved(served, "ada").token_ids)
        for part in Part
    ]
    store.drop(keys)  # as if other agents had needed the room
    looked: list[int] = []
    find = store.find

    def finds(keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        looked.append(len(keys))
        return find(keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "find", finds)
        served.submit("ada", 620)
        while not any(one.generated for one in served.engine.requests):
            served.engine.step_once()
            assert looked == []
        served.world.finish()
    assert reused(served, "ada") == 600
    detail = run(served.agents.show("ada", ""))
    served.engine.idle_caches.evict()
    assert run(served.agents.show("ada", "")).summary.blocks == {"memory": len(detail.blocks)}
