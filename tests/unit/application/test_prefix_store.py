"""What the engine keeps in a store and begins with: never another token, and nothing twice."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from semantic.adapters.stores.memory import MemoryStore
from semantic.adapters.stores.tiered import TieredStore
from semantic.application.cache.prefix_store import PrefixStore
from semantic.application.request import Phase
from semantic.domain.block_hash import BlockKey, Part
from semantic.domain.errors import InvalidRequestError
from semantic.domain.match import MatchEnd
from semantic.domain.stored import BlockHeader, BlockRead, StoredBlock, Tier
from semantic.domain.value_objects import LayerSpec, ModelCacheSpec, SamplingParams, TokenEvent
from tests.support.fake_backend import FULL, STATE, window
from tests.support.fake_clock import FakeClock
from tests.support.lanes import examples
from tests.support.late_reads import LateReads
from tests.unit.application.world import (
    SPECS,
    VARIANTS,
    Done,
    Event,
    World,
    completions,
    expected,
    text_of,
)

AMPLE = 1 << 30
PROMPT = text_of(1, 12 * 256)
every_spec = pytest.mark.parametrize("layers", SPECS.values(), ids=SPECS.keys())
WHOLE = (FULL, FULL)
with_checkpoints = pytest.mark.parametrize(
    "layers",
    [layers for layers in SPECS.values() if layers != WHOLE],
    ids=[name for name, layers in SPECS.items() if layers != WHOLE],
)


def world(
    layers: Sequence[LayerSpec] = WHOLE,
    store: MemoryStore | None = None,
    *,
    total_blocks: int = 400,
    largest_chunk: int = 256,
) -> World:
    """An engine with a store; with the store of another one it is that one restarted."""
    return World(
        ModelCacheSpec(tuple(layers)),
        total_blocks,
        largest_chunk=largest_chunk,
        prefix_store=store if store is not None else MemoryStore(AMPLE),
    )


def answer(of: World, agent: str, prompt: Sequence[int], n: int = 8, tenant: str = "") -> Done:
    """One request, alone, which must give what it gives without any cache."""
    of.engine.submit(agent, prompt, max_tokens=n, tenant=tenant)
    (done,) = of.finish()
    assert done.finish_reason == "length"
    assert done.tokens == expected(of.spec, prompt, n).tokens
    return done


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenEvent)]


def store_of(of: World) -> MemoryStore:
    assert isinstance(of.prefix_store, MemoryStore)
    return of.prefix_store


@every_spec
@pytest.mark.parametrize("n", [3, 255, 256, 257, 511, 513, 900])
def test_an_agent_goes_on_after_a_restart(layers: tuple[LayerSpec, ...], n: int) -> None:
    first = world(layers)
    prompt = text_of(1, n)
    done = answer(first, "ann", prompt)
    again = world(layers, store_of(first))
    history = (*prompt, *done.tokens)
    longer = answer(again, "ann", (*history, 5, 6, 7))
    assert longer.cached_tokens == len(history)
    assert longer.match is not None
    assert (longer.match.source, longer.match.end) == ("memory", MatchEnd.COMPLETE)
    third = answer(again, "ann", (*history, 5, 6, 7, *longer.tokens, 1))
    assert third.match is not None
    assert third.match.source == "pool"


def test_a_prompt_that_was_edited_is_reused_up_to_the_edit() -> None:
    first = world()
    prompt = text_of(1, 900)
    answer(first, "ann", prompt)
    edited = [*prompt]
    edited[700] = (edited[700] + 1) % 90
    done = answer(world(WHOLE, store_of(first)), "ann", edited)
    assert done.cached_tokens == 700
    match = done.match
    assert match is not None
    assert (match.end, match.differs_at) == (MatchEnd.DIVERGED, 700)
    assert (match.expected, match.got) == (prompt[700], edited[700])


@every_spec
def test_the_second_agent_of_a_shared_prompt_computes_its_own_part(
    layers: tuple[LayerSpec, ...],
) -> None:
    shared = text_of(1, 1000)
    of = world(layers)
    needs_checkpoint = layers != WHOLE
    cached = []
    for number, agent in enumerate(("ann", "ben", "cay")):
        done = answer(of, agent, (*shared, *([number + 7] * 40)))
        cached.append(done.cached_tokens)
    # Where a checkpoint is needed the second agent continues from the last one of the grid, and
    # takes one where it differs.
    assert cached == ([0, 768, 1000] if needs_checkpoint else [0, 1000, 1000])


@every_spec
def test_agents_that_arrive_together_compute_what_they_share_once(
    layers: tuple[LayerSpec, ...],
) -> None:
    of = world(layers, largest_chunk=100, total_blocks=4000)
    shared = text_of(1, 2000)
    prompts = {f"agent-{i}": (*shared, *([i + 1] * 30)) for i in range(8)}
    for agent, prompt in prompts.items():
        of.engine.submit(agent, prompt, max_tokens=4)
    done = of.finish()
    assert {end.agent_id: end.tokens for end in done} == {
        agent: expected(of.spec, prompt, 4).tokens for agent, prompt in prompts.items()
    }
    computed = sum(end.prompt_tokens - end.cached_tokens for end in done)
    # The seven full blocks once, and each its own rest: 2030 - 7 * 256. Less with a checkpoint
    # where they part.
    at = 2000 if layers != WHOLE else 7 * 256
    assert computed <= at + 8 * (2030 - at)


@with_checkpoints
def test_a_request_that_waits_for_a_slot_gets_a_checkpoint_where_it_continues(
    layers: tuple[LayerSpec, ...],
) -> None:
    of = world(layers, largest_chunk=100)
    of.engine._scheduler._max_batch = 1
    shared = text_of(1, 700)
    for number, agent in enumerate(("ann", "ben", "cay")):
        of.engine.submit(agent, (*shared, *([number + 7] * 90)), max_tokens=4)
    assert len(of.engine.waiting) == 2
    cached = {end.agent_id: end.cached_tokens for end in of.finish()}
    assert cached == {"ann": 0, "ben": 700, "cay": 700}


@with_checkpoints
def test_requests_that_continue_from_one_checkpoint_compute_what_follows_once(
    layers: tuple[LayerSpec, ...],
) -> None:
    of = world(layers, largest_chunk=100, total_blocks=4000)
    head = text_of(1, 600)
    answer(of, "zoe", (*head, 1))
    document = (*head, *text_of(2, 900))
    prompts = {agent: (*document, *([ord(agent[0]) % 90] * 40)) for agent in ("ann", "ben", "cay")}
    for agent, prompt in prompts.items():
        of.engine.submit(agent, prompt, max_tokens=4)
    done = {end.agent_id: end for end in of.finish()}
    for agent, prompt in prompts.items():
        assert done[agent].tokens == expected(of.spec, prompt, 4).tokens
    assert sorted(end.cached_tokens for end in done.values())[1:] == [1500, 1500]
    of.engine.check_integrity()


@with_checkpoints
@pytest.mark.parametrize("restarted", [False, True])
def test_the_same_prompt_again_computes_its_last_few_tokens(
    layers: tuple[LayerSpec, ...], restarted: bool
) -> None:
    first = world(layers)
    prompt = text_of(1, 700)
    answer(first, "ann", prompt)
    of = world(layers, store_of(first)) if restarted else first
    for agent in ("ann", "ben"):
        assert answer(of, agent, prompt).cached_tokens >= 700 - 16


@with_checkpoints
def test_an_edit_computes_what_follows_the_checkpoint_before_it(
    layers: tuple[LayerSpec, ...],
) -> None:
    of = world(layers)
    prompt = text_of(1, 900)
    answer(of, "ann", prompt)
    edited = [*prompt]
    edited[650] = (edited[650] + 1) % 90
    assert answer(of, "ann", edited).cached_tokens == 512
    # The same edit again, by another agent: the first took a checkpoint where it differs.
    other = [*edited[:700], *text_of(3, 100)]
    assert answer(of, "ben", other).cached_tokens >= 650


@with_checkpoints
def test_a_preempted_prompt_continues_where_it_was(layers: tuple[LayerSpec, ...]) -> None:
    of = world(layers, largest_chunk=100)
    prompt = text_of(1, 2000)
    of.engine.submit("ann", prompt, max_tokens=4)
    request = of.engine.requests[0]
    while request.computed < 600:
        of.engine.step_once()
    computed = request.computed
    scheduler = of.engine._scheduler
    of.engine._preempt(request)
    scheduler._preempt(request)
    (done,) = of.finish()
    assert done.tokens == expected(of.spec, prompt, 4).tokens
    assert done.cached_tokens == computed


@every_spec
@pytest.mark.parametrize("variant", [0, 1, 2, 4])
def test_an_answer_goes_on_after_a_preemption_with_nothing_computed_again(
    layers: tuple[LayerSpec, ...], variant: int
) -> None:
    of = world(layers)
    prompt = text_of(1, 400)
    of.engine.submit("ann", prompt, max_tokens=600, sampling=VARIANTS[variant])
    (request,) = of.engine.requests
    tokens: list[int] = []
    for n in (1, 500, 555):
        while len(request.generated) < n:
            tokens += tokens_of(of.engine.step_once())
        tokens += tokens_of(of.engine._preempt(request))
        of.engine._scheduler._preempt(request)
    while of.engine.has_work:
        tokens += tokens_of(of.engine.step_once())
    assert tuple(tokens) == expected(of.spec, prompt, 600, variant).tokens
    assert of.backend.prefilled_tokens == 399


@with_checkpoints
@pytest.mark.parametrize("n", [49, 50])
def test_a_preemption_before_the_last_token_keeps_the_whole_answer(
    layers: tuple[LayerSpec, ...], n: int
) -> None:
    of = world(layers)
    prompt = text_of(1, 300)
    of.engine.submit("ann", prompt, max_tokens=50)
    (request,) = of.engine.requests
    while len(request.generated) < n - 1:
        of.engine.step_once()
    of.engine._preempt(request)
    of.engine._scheduler._preempt(request)
    (done,) = of.finish()
    assert done.tokens == expected(of.spec, prompt, 50).tokens
    assert answer(of, "ann", (*prompt, *done.tokens, 1)).cached_tokens == 350


@with_checkpoints
def test_a_follower_computes_alone_when_the_store_refuses_checkpoints(
    layers: tuple[LayerSpec, ...],
) -> None:
    of = world(layers, MemoryStore(1), largest_chunk=100, total_blocks=4000)
    shared = text_of(1, 700)
    for number, agent in enumerate(("ann", "ben", "cay")):
        of.engine.submit(agent, (*shared, *([number + 7] * 90)), max_tokens=4)
    done = of.finish()
    assert [end.cached_tokens for end in done] == [0, 0, 0]
    assert {end.finish_reason for end in done} == {"length"}


@with_checkpoints
def test_short_prompts_with_the_same_head_do_not_starve_a_long_one(
    layers: tuple[LayerSpec, ...],
) -> None:
    of = world(layers, MemoryStore(1), largest_chunk=100, total_blocks=4000)
    head = text_of(1, 200)
    of.engine.submit("long", (*head, *text_of(2, examples(900, thorough=2000))), max_tokens=1)
    for step in range(400):
        of.engine.submit(f"short-{step}", (*head, *text_of(step + 3, 70)), max_tokens=1)
        if any(end.agent_id == "long" for end in completions(of.engine.step_once())):
            return
    raise AssertionError("the long prompt waits for ever")


def test_a_follower_goes_on_alone_when_its_leader_is_cancelled() -> None:
    of = world(largest_chunk=64)
    shared = text_of(1, 700)
    leader = of.engine.submit("ann", (*shared, 1), max_tokens=4)
    of.engine.submit("ben", (*shared, 2), max_tokens=4)
    of.engine.step_once()
    of.engine.step_once()
    of.engine.cancel(leader)
    done = {end.agent_id: end for end in of.finish()}
    assert done["ann"].finish_reason == "cancelled"
    assert done["ben"].tokens == expected(of.spec, (*shared, 2), 4).tokens


def test_nobody_waits_for_one_that_reads_what_another_computed() -> None:
    of = world(largest_chunk=256)
    reads = LateReads()
    assert of.engine._prefixes is not None
    loader = of.engine._prefixes._loader
    loader._threads = reads
    shared = text_of(1, 700)
    for agent in ("ann", "ben", "cy"):
        of.engine.submit(agent, (*shared, len(agent)), max_tokens=4)
    while all(r.phase is not Phase.DECODE for r in of.engine._scheduler.running):
        of.engine.step_once()
    of.engine.step_once()
    # The first has computed blocks of all three; both others read them, at the same time.
    assert [r.phase for r in of.engine._scheduler.running] == [Phase.DECODE, Phase.LOAD, Phase.LOAD]
    while any(r.phase is Phase.LOAD for r in of.engine._scheduler.running):
        reads.arrive()
        of.engine.step_once()
    assert of.engine._scheduler.running


def test_what_a_cancelled_prompt_computed_is_found_again() -> None:
    of = world(largest_chunk=100)
    prompt = text_of(1, 1000)
    uid = of.engine.submit("ann", prompt, max_tokens=4)
    while not of.backend.n_open:
        of.engine.step_once()
    for _ in range(6):
        of.engine.step_once()
    of.engine.cancel(uid)
    of.finish()
    done = answer(world(WHOLE, store_of(of)), "ben", prompt, 4)
    assert 512 <= done.cached_tokens < 999


@every_spec
def test_a_fork_shares_everything_and_goes_its_own_way(layers: tuple[LayerSpec, ...]) -> None:
    of = world(layers)
    prompt = text_of(1, 700)
    past = (*prompt, *answer(of, "ann", prompt).tokens)
    held, stored = of.pool.used_blocks, store_of(of).stats()[0]
    of.engine.fork("ann", "ben")
    after = store_of(of).stats()[0]
    assert of.pool.used_blocks == held
    assert (after.n_blocks, after.n_agents) == (stored.n_blocks, 2)
    for agent in ("ben", "ann"):
        done = answer(of, agent, (*past, ord(agent[0]) % 90))
        assert done.cached_tokens == len(past)
    manifest = of.engine.manifest("ben")
    assert manifest is not None
    assert manifest.parent == "ann"
    restarted = world(layers, store_of(of))
    restarted.engine.fork("ben", "dan")
    assert answer(restarted, "dan", (*manifest.token_ids, 9)).cached_tokens > 700


@pytest.mark.parametrize(("source", "new"), [("nobody", "ben"), ("ann", "ann"), ("ann", "")])
def test_a_fork_needs_an_agent_and_a_new_name(source: str, new: str) -> None:
    of = world()
    answer(of, "ann", text_of(1, 20))
    with pytest.raises(InvalidRequestError, match="fork"):
        of.engine.fork(source, new)


@every_spec
def test_a_preempted_request_comes_back_from_the_store(layers: tuple[LayerSpec, ...]) -> None:
    alone = sum(ModelCacheSpec(layers).blocks_for(1024))
    of = world(layers, total_blocks=2 * alone)
    prompts = {agent: text_of(seed, 400) for seed, agent in enumerate(("ann", "ben", "cay"))}
    for agent, prompt in prompts.items():
        of.engine.submit(agent, prompt, max_tokens=400)
    before = store_of(of).stats()[0].counts["hits"]
    done = of.finish()
    for end in done:
        assert end.tokens == expected(of.spec, prompts[end.agent_id], 400).tokens
    if of.engine.preemptions and layers == WHOLE:
        assert store_of(of).stats()[0].counts["hits"] > before


@every_spec
def test_five_hundred_agents_on_a_pool_for_few(layers: tuple[LayerSpec, ...]) -> None:
    of = world(layers, MemoryStore(2_000_000), total_blocks=40)
    for turn in range(2):
        for number in range(examples(30, thorough=60)):
            prompt = text_of(number, 200 + 13 * turn)
            of.engine.submit(f"agent-{number}", prompt, max_tokens=3)
        for end in of.finish():
            number = int(end.agent_id.split("-")[1])
            prompt = text_of(number, 200 + 13 * turn)
            assert end.tokens == expected(of.spec, prompt, 3).tokens
        (stats,) = store_of(of).stats()
        assert stats.n_bytes <= stats.max_bytes


def test_tenants_share_nothing_and_each_finds_its_own() -> None:
    of = world()
    prompt = text_of(1, 700)
    assert answer(of, "ann", prompt, tenant="x").cached_tokens == 0
    assert answer(of, "ann", prompt, tenant="y").cached_tokens == 0
    assert answer(of, "ben", prompt, tenant="").cached_tokens == 0
    assert answer(of, "ann", prompt, tenant="x").cached_tokens == len(prompt) - 1
    assert answer(of, "new", prompt, tenant="y").cached_tokens == len(prompt) - 1
    assert of.engine.manifest("ann") is None
    assert of.engine.forget("ann", tenant="x")
    assert of.engine.manifest("ann", tenant="x") is None
    assert of.engine.manifest("ann", tenant="y") is not None


def test_a_tenant_cannot_take_anothers_name_in_the_pool() -> None:
    of = world()
    answer(of, "ann", text_of(1, 300), tenant="x")
    (key,) = of.store.lru_order()
    assert key.owner != "ann"
    answer(of, key.owner, text_of(2, 300))
    of.engine.check_integrity()


def test_append_goes_on_from_what_was_saved() -> None:
    first = world()
    past = (*text_of(1, 300), *answer(first, "ann", text_of(1, 300)).tokens)
    again = world(WHOLE, store_of(first))
    again.engine.submit("ann", (4, 5), max_tokens=3, append=True)
    (done,) = again.finish()
    assert done.prompt_tokens == len(past) + 2
    assert done.tokens == expected(again.spec, (*past, 4, 5), 3).tokens


def test_the_note_comes_back_with_the_agent() -> None:
    of = world()
    of.engine.submit("ann", text_of(1, 10), max_tokens=2, note="hello \ud800")
    of.finish()
    manifest = world(WHOLE, store_of(of)).engine.manifest("ann")
    assert manifest is not None
    assert (manifest.note, manifest.prompt_tokens) == ("hello \ud800", 10)


class Damaged(MemoryStore):
    """One block's body is not what it should be, whenever it is read."""

    def __init__(self, block: int) -> None:
        super().__init__(AMPLE)
        self.block = block

    def resident(self, headers: Sequence[BlockHeader]) -> dict[BlockKey, bytes | memoryview]:  # noqa: ARG002
        return {}

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        proven = list(super().read_into(reads))
        for i, read in enumerate(reads):
            if read.header.link.start == self.block * 256:
                for target in read.targets:
                    target[:] = bytes(len(target))
                proven[i] = False
        return proven


@every_spec
@pytest.mark.parametrize("block", range(4))
def test_a_damaged_block_costs_time_and_no_token(layers: tuple[LayerSpec, ...], block: int) -> None:
    store = Damaged(block)
    prompt = text_of(1, 900)
    past = (*prompt, *answer(world(layers, store), "ann", prompt).tokens)
    done = answer(world(layers, store), "ann", (*past, 3))
    assert done.cached_tokens == (block * 256 if layers == WHOLE else 0)
    assert done.match is not None
    assert done.match.end is MatchEnd.DAMAGED


class Lossy(MemoryStore):
    """Keeps only some of what it is given, and forgets parts on purpose."""

    def __init__(self, every: int, part: Part | None = None) -> None:
        super().__init__(AMPLE)
        self.every = every
        self.part = part
        self.puts = itertools.count()

    def put(self, block: StoredBlock) -> bool:
        if self.part in (None, block.header.part) and next(self.puts) % self.every == 0:
            return False
        return super().put(block)


@every_spec
@pytest.mark.parametrize("part", [None, *Part])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_what_a_store_drops_costs_time_and_no_token(
    layers: tuple[LayerSpec, ...], part: Part | None, every: int
) -> None:
    store = Lossy(every, part)
    prompt = text_of(1, 700)
    for _ in range(3):
        of = world(layers, store)
        prompt = (*prompt, *answer(of, "ann", prompt).tokens, 4)


def test_a_cancelled_load_leaves_nothing_behind() -> None:
    first = world()
    prompt = text_of(1, 900)
    answer(first, "ann", prompt)
    again = world(WHOLE, store_of(first))
    uid = again.engine.submit("ann", prompt, max_tokens=3)
    again.engine.cancel(uid)
    (done,) = completions(again.engine.step_once())
    assert done.finish_reason == "cancelled"
    again.engine.check_integrity()
    assert answer(again, "ann", prompt).cached_tokens == len(prompt) - 1


def test_what_was_read_is_counted_in_bytes() -> None:
    first = world()
    prompt = text_of(1, 900)
    answer(first, "ann", prompt)
    assert not first.engine.restored_bytes
    again = world(WHOLE, store_of(first))
    read = answer(again, "ann", prompt).cached_tokens
    per_token = sum(again.backend.layout().bytes_per_token(Part.FULL))
    assert again.engine.restored_bytes[Tier.MEMORY] >= read * per_token


def test_a_pinned_agent_stays_pinned_from_turn_to_turn() -> None:
    of = world()
    prompt = text_of(1, 300)
    done = answer(of, "ann", prompt)
    manifest = of.engine.manifest("ann")
    assert manifest is not None
    store_of(of).save(replace(manifest, pinned=True))
    answer(of, "ann", (*prompt, *done.tokens, 1))
    manifest = of.engine.manifest("ann")
    assert manifest is not None
    assert manifest.pinned
    of.engine.fork("ann", "ben")
    forked = of.engine.manifest("ben")
    assert forked is not None
    assert not forked.pinned


def test_only_what_is_new_is_put() -> None:
    of = world()
    prompt = text_of(1, 1000)
    put: list[int] = []
    for turn in range(6):
        before = store_of(of).stats()[0].counts["written"]
        done = answer(of, "ann", prompt)
        put.append(store_of(of).stats()[0].counts["written"] - before)
        prompt = (*prompt, *done.tokens, turn)
    assert put[0] == 4
    assert max(put[1:]) <= 2


def test_seeds_hold_over_a_restart() -> None:
    of = world()
    params = SamplingParams(temperature=0.9, seed=7)
    prompt = text_of(1, 600)
    for engine in (of.engine, world(WHOLE, store_of(of)).engine):
        engine.submit("ann", prompt, max_tokens=20, sampling=params)
    first = of.finish()[0]
    again = world(WHOLE, store_of(of))
    again.engine.submit("ann", prompt, max_tokens=20, sampling=params)
    assert again.finish()[0].tokens == first.tokens


def test_two_models_share_nothing() -> None:
    store = MemoryStore(AMPLE)
    answer(world(WHOLE, store), "ann", text_of(1, 600))
    other = world((FULL, FULL, FULL), store)
    assert answer(other, "ann", text_of(1, 600)).cached_tokens == 0
    assert answer(world((FULL, STATE), store), "ann", text_of(1, 600)).cached_tokens == 0
    assert answer(world((FULL, window(300)), store), "ann", text_of(1, 600)).cached_tokens == 0


@pytest.mark.measured_reads
def test_a_store_that_is_too_slow_is_passed_over() -> None:
    first = world()
    prompt = text_of(1, 900)
    answer(first, "ann", prompt)
    again = world(WHOLE, store_of(first))
    prefix_store = again.engine._prefixes
    assert isinstance(prefix_store, PrefixStore)
    prefix_store.break_even._prefill_seconds = lambda n_tokens: n_tokens / 1e9
    for _ in range(3):
        prefix_store.break_even.observe({Tier.MEMORY: 1}, 1e9)
    done = answer(again, "ann", prompt)
    assert done.cached_tokens == 0
    assert done.match is not None
    assert done.match.end is MatchEnd.SLOWER


class SlowMemory(MemoryStore):
    """Reads a body in `seconds` of a clock, and counts them."""

    clock, seconds, n_read = FakeClock(), 0.0, 0

    def resident(self, headers: Sequence[BlockHeader]) -> dict[BlockKey, bytes | memoryview]:  # noqa: ARG002
        return {}

    def read_into(self, reads: Sequence[BlockRead]) -> list[bool]:
        self.clock.advance(self.seconds * len(reads))
        self.n_read += len(reads)
        return list(super().read_into(reads))


class LateMemory(SlowMemory):
    """Misses all that it is asked for, late."""

    def read_into(self, reads: Sequence[BlockRead]) -> list[bool]:
        super().read_into(reads)
        return [False] * len(reads)


def slow_world(
    layers: Sequence[LayerSpec], seconds: float, kind: type[SlowMemory] = SlowMemory
) -> tuple[World, SlowMemory]:
    """An engine over 12 blocks of PROMPT whose bodies take `seconds` each, a block's tokens one."""
    store = kind(AMPLE)
    answer(world(layers, store), "ann", PROMPT)
    again = world(layers, store)
    store.clock, store.seconds = again.clock, seconds
    prefix_store = again.engine._prefixes
    assert isinstance(prefix_store, PrefixStore)
    prefix_store.break_even._prefill_seconds = lambda n_tokens: n_tokens / 256
    return again, store


@pytest.mark.measured_reads
@pytest.mark.parametrize("layers", [WHOLE, (FULL, STATE)])
def test_reading_is_given_up_where_computing_overtakes_it(layers: tuple[LayerSpec, ...]) -> None:
    of, store = slow_world(layers, 10.0)
    for number in range(5):
        store.n_read, computed = 0, of.backend.prefilled_tokens
        done = answer(of, f"agent-{number}", PROMPT)
        assert done.match is not None
        assert done.match.end is MatchEnd.SLOWER
        assert store.n_read == (8 if number < 3 else 0)
        used = 0 if of.backend.layout().needs_checkpoint else store.n_read * 256
        assert done.cached_tokens == used
        assert of.backend.prefilled_tokens - computed == len(PROMPT) - 1 - used
        of.forget_all()


@pytest.mark.measured_reads
@pytest.mark.parametrize(("seconds", "n_tried"), [(10.0, 3), (0.001, 5)])
def test_a_store_that_misses_is_slow_only_if_it_misses_late(seconds: float, n_tried: int) -> None:
    of, store = slow_world(WHOLE, seconds, LateMemory)
    tried = 0
    for number in range(5):
        store.n_read = 0
        assert answer(of, f"agent-{number}", PROMPT).cached_tokens == 0
        tried += store.n_read > 0
        of.forget_all()
    assert tried == n_tried


@pytest.mark.measured_reads
def test_what_can_only_be_used_whole_is_read_to_its_end_where_little_is_left() -> None:
    """After 16 seconds 8 for the rest of the bodies, or 4 to compute the rest; without what was
    read it is 12."""
    for layers, n_read in ((WHOLE, 8), ((FULL, STATE), 12)):
        of, store = slow_world(layers, 2.0)
        answer(of, "bob", PROMPT)
        assert store.n_read == n_read


@every_spec
def test_blocks_of_others_without_a_place_to_begin_are_no_harm(
    layers: tuple[LayerSpec, ...],
) -> None:
    """Where checkpoints are needed, known blocks alone are nothing to load."""
    of = world(layers)
    answer(of, "ann", text_of(0, 600))
    answer(of, "bob", (*text_of(0, 300), 5, 6))


class Limited(MemoryStore):
    """A disk whose limit of a day is reached, until the test says otherwise."""

    is_reached = True

    @property
    def holds_back(self) -> bool:
        return self.is_reached

    @property
    def holds(self) -> Counter[Part]:
        """Which bodies are on it."""
        return Counter(key.part for key in self._blocks)


def limited(layers: Sequence[LayerSpec]) -> tuple[World, Limited]:
    """An engine above such a disk, with ample memory before it."""
    disk = Limited(AMPLE)
    tiers = TieredStore(MemoryStore(AMPLE, secret=disk.secret), disk)
    return World(ModelCacheSpec(tuple(layers)), 400, largest_chunk=256, prefix_store=tiers), disk


@every_spec
def test_at_the_limit_of_a_day_only_ends_of_turns_are_on_disk(
    layers: tuple[LayerSpec, ...],
) -> None:
    of, disk = limited(layers)
    uid = of.engine.submit("ann", text_of(1, 900), max_tokens=8)
    for _ in range(3):
        of.engine.step_once()
    of.engine.cancel(uid)
    of.finish()
    assert not disk.holds, "a request without an answer wrote"
    prompt = text_of(1, 1500)
    done = answer(of, "ann", prompt)
    assert disk.holds[Part.FULL] in {0, 6}, "the whole chain of the turn, what memory had included"
    assert disk.holds[Part.CHECKPOINT] in {0, 1}, "none but that of the end"
    again = answer(world(layers, disk), "ann", (*prompt, *done.tokens, 5))
    assert again.cached_tokens == 1508


@every_spec
def test_what_was_held_back_is_written_by_the_next_turn(layers: tuple[LayerSpec, ...]) -> None:
    """Also by a turn that finds it in the pool, on the next day."""
    of, disk = limited(layers)
    prompt = text_of(1, 900)
    uid = of.engine.submit("ann", prompt, max_tokens=8)
    for _ in range(3):
        of.engine.step_once()
    of.engine.cancel(uid)
    of.finish()
    disk.is_reached = False
    done = answer(of, "ben", prompt)
    longer = answer(world(layers, disk), "ben", (*prompt, *done.tokens, 5))
    assert longer.cached_tokens == 908
