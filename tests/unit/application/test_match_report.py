"""What an agent had and computed again: how much, in what time, and for which part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from semantic.adapters.stores.memory import MemoryStore
from semantic.application.cache.agent_notes import end_reason, note_of
from semantic.domain.block_hash import BlockHash, BlockKey, Part
from semantic.domain.chat import Chat, Message, Tool
from semantic.domain.match import CacheMiss, MatchEnd
from semantic.domain.request_parts import Change, Difference, PartKind, parts_of
from semantic.domain.stored import BlockHeader, Found
from semantic.domain.value_objects import ModelCacheSpec, SamplingParams
from tests.support.fake_backend import FULL, STATE
from tests.unit.application.world import Done, World, text_of

CHAT = Chat((Message("user", "a"),), (Tool("Read"), Tool("Bash")))
TOOL = Difference(PartKind.TOOL, Change.CHANGED, 2, "Bash")


def note(chat: Chat) -> str:
    return note_of("", parts_of(chat))


BEFORE = note(CHAT)
AFTER = note(replace(CHAT, tools=(Tool("Read"), Tool("Bash", "Runs."))))


def world(store: MemoryStore | None = None) -> World:
    return World(
        ModelCacheSpec((FULL, FULL)),
        400,
        largest_chunk=256,
        prefix_store=store or MemoryStore(1 << 30),
    )


def ask(
    of: World, prompt: Sequence[int], note: str = "", agent: str = "ann", tenant: str = ""
) -> Done:
    of.engine.submit(agent, prompt, max_tokens=8, note=note, tenant=tenant)
    (done,) = of.finish()
    return done


def lost(done: Done) -> CacheMiss | None:
    assert done.match is not None
    return done.match.lost


def edited(prompt: Sequence[int], at: int) -> tuple[int, ...]:
    return (*prompt[:at], (prompt[at] + 1) % 90, *prompt[at + 1 :])


PROMPT = text_of(1, 900)


@pytest.mark.parametrize("restart", [False, True])
def test_what_was_computed_again_is_told_with_its_part_and_its_time(restart: bool) -> None:
    of = world()
    assert lost(ask(of, PROMPT, BEFORE)) is None
    if restart:
        assert isinstance(of.prefix_store, MemoryStore)
        of = world(of.prefix_store)
    longer = (*edited(PROMPT, 700), *text_of(2, 300))
    found = lost(ask(of, longer, AFTER))
    assert found is not None
    held = 900 + 8 - (1 if found.tokens == 207 else 0)  # the last token is not always kept
    assert (found.tokens, found.part) == (held - 700, TOOL)
    match = of.engine.manifest("ann")
    assert match is not None
    assert match.match is not None
    assert found.seconds == pytest.approx(match.match.seconds * found.tokens / (1200 - 1 - 700))
    assert match.match.lost == found


def test_a_shorter_prompt_loses_no_more_than_it_has() -> None:
    of = world()
    ask(of, PROMPT, BEFORE)
    found = lost(ask(of, edited(PROMPT[:400], 300), AFTER))
    assert found is not None
    assert found.tokens == 99  # of the 400 the last always runs


def test_nothing_is_lost_by_going_on_or_back() -> None:
    of = world()
    first = ask(of, PROMPT, BEFORE)
    history = (*PROMPT, *first.tokens)
    assert lost(ask(of, (*history, 1, 2, 3), AFTER)) is None
    assert lost(ask(of, PROMPT, AFTER)) is None
    assert lost(ask(of, PROMPT[:300], AFTER)) is None


class Forgetful(MemoryStore):
    """Keeps manifests, and finds no block when the test says so."""

    forgot = False

    def find(self, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
        return {} if self.forgot else super().find(keys)

    def nearest(self, parent: BlockHash, part: Part, like: Sequence[int]) -> Sequence[BlockHeader]:
        return () if self.forgot else super().nearest(parent, part, like)


def test_blocks_that_are_gone_are_a_loss_without_a_part() -> None:
    store = Forgetful(1 << 30)
    ask(world(store), PROMPT, BEFORE)
    store.forgot = True
    done = ask(world(store), PROMPT, BEFORE)
    found = lost(done)
    assert done.match is not None
    assert found is not None
    assert (done.match.end, done.match.differs_at) == (MatchEnd.MISSING, None)
    assert (found.tokens, found.seconds, found.part) == (899, done.match.seconds, None)


def test_less_than_a_block_that_is_not_there_is_no_loss() -> None:
    of = World(
        ModelCacheSpec((FULL, STATE)), 400, largest_chunk=256, prefix_store=MemoryStore(1 << 30)
    )
    ask(of, PROMPT, BEFORE)
    done = ask(of, PROMPT[:770], BEFORE)
    assert done.match is not None
    assert done.match.differs_at is None
    found = lost(done)
    assert (found is None) == (769 - done.cached_tokens < 256)


def test_scores_that_were_asked_for_cost_what_was_there() -> None:
    of = world()
    ask(of, PROMPT, BEFORE)
    of.engine.submit("ann", PROMPT, sampling=SamplingParams(prompt_logprobs=1), max_tokens=2)
    (done,) = of.finish()
    assert done.match is not None
    assert done.match.end is MatchEnd.SCORED
    found = lost(done)
    assert found is not None
    assert (found.tokens, found.part) == (899, None)


@pytest.mark.parametrize(
    ("before", "after"), [("", AFTER), (BEFORE, ""), ('{"origin": 1}', AFTER), ("text", "text")]
)
def test_without_parts_the_position_is_told(before: str, after: str) -> None:
    of = world()
    ask(of, PROMPT, before)
    done = ask(of, edited(PROMPT, 700), after)
    assert done.match is not None
    assert done.match.differs_at == 700
    found = lost(done)
    assert found is not None
    assert (found.tokens, found.part) == (199, None)


def test_a_request_that_was_not_saved_is_not_compared_with() -> None:
    of = world()
    ask(of, PROMPT, BEFORE)
    of.engine.submit("ann", text_of(5, 600), max_tokens=4, note=AFTER)
    while not any(request.computed > 300 for request in of.engine.requests):
        of.engine.step_once()
    (request,) = of.engine.requests
    of.engine.cancel(
        request.uid
    )  # nothing was said: the pool has this prompt, the store the one before
    of.finish()
    found = lost(ask(of, edited(text_of(5, 600), 100), AFTER))
    assert found is not None
    assert found.part is None


def test_who_leaves_before_anything_is_computed_has_lost_nothing() -> None:
    of = world()
    ask(of, PROMPT, BEFORE)
    uid = of.engine.submit("ann", edited(PROMPT, 100), max_tokens=4, note=AFTER)
    of.engine.cancel(uid)
    (done,) = of.finish()
    assert done.finish_reason == "cancelled"
    assert lost(done) is None


def test_an_agent_of_another_tenant_is_not_looked_at() -> None:
    of = world()
    ask(of, PROMPT, BEFORE)
    assert lost(ask(of, edited(PROMPT, 700), AFTER, tenant="eve")) is None
    assert lost(ask(of, edited(PROMPT, 700), AFTER, agent="bob")) is None


def test_what_a_neighbour_had_cached_is_not_said_to_be_nothing() -> None:
    of = world()
    reasons = []
    for agent in ("ann", "ben"):
        match = ask(of, PROMPT, agent=agent).match
        assert match is not None
        reasons.append((match.end, match.reused_tokens > 0, end_reason(match)))
    assert reasons == [
        (MatchEnd.NEW, False, "No cached prefix matches it."),
        (MatchEnd.NEW, True, "The agent had nothing cached; it reused other agents' blocks."),
    ]
